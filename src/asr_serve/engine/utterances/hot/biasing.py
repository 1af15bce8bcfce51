"""Hot words of requests: lists are made into what a search reads on a thread beside the loop, and kept for those
that come with the same list; and what greedy rows with hot words could have said."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

from asr_serve.decoding.beam import leading
from asr_serve.decoding.hotwords import HotWords
from asr_serve.engine.utterances.hot.listed import Listed
from asr_serve.engine.utterances.hot.lists import Lists
from asr_serve.errors import StepFailed

if TYPE_CHECKING:
    from asr_serve.engine.session import Utterance
    from asr_serve.engine.utterances.rows import Row

REMEMBERED = 128
"""Likeliest tokens of each place that are kept for the second look."""


class Spelling:
    """Requests whose hot words are not ready wait for them: a long list takes half a second, and others go on. On
    the loop's thread."""

    def __init__(
        self,
        encode: Callable[[str], list[int]] | None,
        text: Callable[[list[int]], str],
        call: Callable[[Callable[[], None]], None],
        fail: Callable[[list[int], Exception], None],
    ) -> None:
        """`encode`: None of a model that has no use for it. `call`: Keeper.call."""
        self._encode, self._text, self._call, self._fail = encode, text, call, fail
        self._lists: Lists[HotWords] = Lists()
        self._waiting: dict[int, tuple[Future[HotWords], Callable[[], None]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def then(self, utterance: Utterance, go_on: Callable[[], None]) -> None:
        """Once its hot words are what searches read."""
        if not utterance.options.bias:
            go_on()
            return
        made = self._made(utterance.options.bias, utterance.options.beam > 1)
        if made.done():
            self._go_on(utterance, made, go_on)
            return
        self._waiting[utterance.id] = made, lambda: self._go_on(utterance, made, go_on)
        made.add_done_callback(lambda _: self._call(lambda: self._ready(utterance.id)))

    def _ready(self, request_id: int) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1]()

    def leave(self, request_id: int) -> None:
        """A list that nobody waits for any more, and that was not begun, is not made."""
        made, _ = self._waiting.pop(request_id, (None, None))
        if made is not None and all(made is not other for other, _ in self._waiting.values()):
            self._lists.drop(made)

    def close(self) -> None:
        self._lists.close()

    def _made(self, bias: str, beams: bool) -> Future[HotWords]:
        encode = self._encode
        assert encode is not None, "hot words came to a model without a vocabulary"
        return self._lists.ask(bias, lambda: Listed.made(bias, encode, self._text, beams), beams=beams)

    def _go_on(self, utterance: Utterance, made: Future[HotWords], go_on: Callable[[], None]) -> None:
        if (failure := made.exception()) is not None:
            told = f"spelling hot words failed: {type(failure).__name__}: {failure}"
            error = StepFailed(told, todo="leave them out; if it stays, report it")
            error.__cause__ = failure
            self._fail([utterance.id], error)
            return
        utterance.hotwords = made.result()
        go_on()


def remembered(row: Row, logits: Tensor, hidden: Tensor, weight: Tensor | None) -> tuple[int, float]:
    """The next token of a greedy row with hot words, which is the likeliest, and its natural-log probability; what
    else may be said there is remembered for the second look. Greedy cannot go back: a token that is made likelier
    than what was heard costs other words more than it finds.

    In      logits (vocabulary,), hidden (width,), weight: as decoding/beam.leading has them
    """
    likeliest = leading(logits[None], hidden[None], weight, REMEMBERED)[0]
    row.likeliest[len(row.tokens)] = dict(likeliest)
    return likeliest[0]
