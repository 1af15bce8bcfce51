"""Hot words of requests: lists are made into what a search reads on a thread beside the loop, and kept for those
that come with the same list; and what greedy rows with hot words could have said."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from asr_serve.decoding.beam_search import top_tokens
from asr_serve.decoding.biasing import written_forms, yield_between
from asr_serve.decoding.biasing_list import CompiledBiasingList
from asr_serve.engine.cache.biasing_lists import BiasingListCache
from asr_serve.errors import StepFailed

if TYPE_CHECKING:
    from asr_serve.engine.request import RecognitionRequest
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow


class WrittenForm(NamedTuple):
    """A way of writing a word: which one of the list it is, and its tokens behind a space."""

    word: int
    text: str
    tokens: tuple[int, ...]


class RescoringList(CompiledBiasingList):
    """Made on a thread beside the loop, and read by any."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        super().__init__(bias, encode, text)
        self.forms_by_first_token: dict[int, list[WrittenForm]] = {}
        """Forms by their first token."""
        self.tokens_by_form: dict[str, tuple[int, ...]] = {}
        """Of each form."""
        for number, word in enumerate(yield_between(self.words)):
            for form in written_forms(word.text):
                if tokens := tuple(encode(f" {form}")):
                    self.tokens_by_form[form] = tokens
                    self.forms_by_first_token.setdefault(tokens[0], []).append(WrittenForm(number, form, tokens))

    @classmethod
    def build(
        cls, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str], beams: bool
    ) -> CompiledBiasingList:
        """With its graph, where beams are to read it."""
        found = cls(bias, encode, text)
        if beams:
            _ = found.graph
        return found


MAX_RECORDED_TOKENS = 128
"""Likeliest tokens of each place that are kept for the second look."""


class BiasingQueue:
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
        self._lists: BiasingListCache[CompiledBiasingList] = BiasingListCache()
        self._waiting: dict[int, tuple[Future[CompiledBiasingList], Callable[[], None]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def when_ready(self, utterance: RecognitionRequest, go_on: Callable[[], None]) -> None:
        """Once its hot words are what searches read."""
        if not utterance.options.bias:
            go_on()
            return
        made = self._build(utterance.options.bias, utterance.options.beam > 1)
        if made.done():
            self._resume(utterance, made, go_on)
            return
        self._waiting[utterance.id] = made, lambda: self._resume(utterance, made, go_on)
        made.add_done_callback(lambda _: self._call(lambda: self._ready(utterance.id)))

    def _ready(self, request_id: int) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1]()

    def cancel(self, request_id: int) -> None:
        """A list that nobody waits for any more, and that was not begun, is not made."""
        made, _ = self._waiting.pop(request_id, (None, None))
        if made is not None and all(made is not other for other, _ in self._waiting.values()):
            self._lists.cancel(made)

    def close(self) -> None:
        self._lists.close()

    def _build(self, bias: str, beams: bool) -> Future[CompiledBiasingList]:
        encode = self._encode
        assert encode is not None, "hot words came to a model without a vocabulary"
        return self._lists.get_or_build(
            bias, lambda: RescoringList.build(bias, encode, self._text, beams), beams=beams
        )

    def _resume(
        self, utterance: RecognitionRequest, made: Future[CompiledBiasingList], go_on: Callable[[], None]
    ) -> None:
        if (failure := made.exception()) is not None:
            told = f"spelling hot words failed: {type(failure).__name__}: {failure}"
            error = StepFailed(told, todo="leave them out; if it stays, report it")
            error.__cause__ = failure
            self._fail([utterance.id], error)
            return
        utterance.hotwords = made.result()
        go_on()


def pick_and_record(row: DecodeRow, logits: Tensor, hidden: Tensor, weight: Tensor | None) -> tuple[int, float]:
    """The next token of a greedy row with hot words, which is the likeliest, and its natural-log probability; what
    else may be said there is remembered for the second look. Greedy cannot go back: a token that is made likelier
    than what was heard costs other words more than it finds.

    In      logits (vocabulary,), hidden (width,), weight: as decoding/beam_search.top_tokens has them
    """
    likeliest = top_tokens(logits[None], hidden[None], weight, MAX_RECORDED_TOKENS)[0]
    row.top_tokens[len(row.tokens)] = dict(likeliest)
    return likeliest[0]
