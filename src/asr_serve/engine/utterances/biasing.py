"""Hot words of requests: lists are made into what a search reads on a thread beside the loop, and kept for those
that come with the same list; and what of a row's next tokens they make the likeliest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch import Tensor

from asr_serve.decoding.hotwords import HotWords

if TYPE_CHECKING:
    from asr_serve.engine.utterances.rows import Row

KEPT = 16
"""Lists: of ten thousand words one takes 40 MB."""
BOOST = 1.0
"""Natural-log probability that a token of a word of weight 1 is given."""
LOOKED_AT = 8
"""Likeliest tokens that may begin a word: what the model holds for less likely was not said."""
REMEMBERED = 128
"""Likeliest tokens of each place that are kept for the second look."""
NEAR = 4.0
"""Natural-log probability below the likeliest, down to which a token may begin a word."""


class Listed:
    """Those lists that were asked for of late. `ready` and `get`: on the loop's thread."""

    def __init__(self, encode: Callable[[str], list[int]] | None, text: Callable[[list[int]], str]) -> None:
        self.encode, self.text = encode, text
        self._lists: OrderedDict[str, Future[HotWords]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, bias: str) -> Future[HotWords]:
        """What it is made into, now or soon."""
        if (found := self._lists.get(bias)) is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="asr-serve-hotwords")
            assert self.encode is not None
            found = self._lists[bias] = self._thread.submit(HotWords, bias, self.encode, self.text)
        self._lists.move_to_end(bias)
        while len(self._lists) > KEPT:
            self._lists.popitem(last=False)
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


def boosted(row: Row, leading: Sequence[tuple[int, float]], logits: Tensor) -> tuple[int, float]:
    """The next token of a greedy row with hot words, and the model's own natural-log probability of it.

    In      leading: the likeliest tokens and their natural-log probabilities, likeliest first; logits (vocabulary,)
    """
    assert row.hotwords is not None
    graph, best = row.hotwords.graph, leading[0]
    known, total = dict(leading), float(logits[best[0]]) - best[1]
    for token in graph.leads(row.node):
        if token not in known:
            known[token] = float(logits[token]) - total
    token, score = best
    most = best[1]
    for each, logprob in known.items():
        if logprob < best[1] - NEAR:
            continue
        _, gain = graph.step(row.node, each)
        # Greedy cannot go back: nothing is taken from who leaves a word, or all would be said to their end.
        if logprob + BOOST * max(0.0, gain) > most:
            token, score, most = each, logprob, logprob + BOOST * gain
    return token, score
