"""Queue of requests whose hotwords are compiled on a thread beside the loop; and what greedy rows record for the
rescoring of hotwords."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from asr_serve.decoding.beam_search import top_tokens
from asr_serve.decoding.biasing_graph import written_forms, yield_between
from asr_serve.decoding.biasing_list import CompiledBiasingList
from asr_serve.engine.cache.biasing_list_cache import BiasingListCache
from asr_serve.errors import StepFailed

if TYPE_CHECKING:
    from asr_serve.engine.request import RecognitionRequest
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow


class WrittenForm(NamedTuple):
    """Written form of a word: the word's index in the list, its text, and its tokens after a space."""

    word: int
    text: str
    tokens: tuple[int, ...]


class RescoringList(CompiledBiasingList):
    """Biasing list with the tokens of every written form. Built on a thread beside the loop; may be read on any."""

    def __init__(self, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str]) -> None:
        super().__init__(bias, encode, text)
        self.forms_by_first_token: dict[int, list[WrittenForm]] = {}
        """Written forms by their first token."""
        self.tokens_by_form: dict[str, tuple[int, ...]] = {}
        """Tokens of each written form."""
        for number, word in enumerate(yield_between(self.words)):
            for form in written_forms(word.text):
                if tokens := tuple(encode(f" {form}")):
                    self.tokens_by_form[form] = tokens
                    self.forms_by_first_token.setdefault(tokens[0], []).append(WrittenForm(number, form, tokens))

    @classmethod
    def build(
        cls, bias: str, encode: Callable[[str], list[int]], text: Callable[[list[int]], str], beams: bool
    ) -> CompiledBiasingList:
        """Builds a list, and its graph if it is for beam search."""
        biasing_list = cls(bias, encode, text)
        if beams:
            _ = biasing_list.graph
        return biasing_list


MAX_RECORDED_TOKENS = 128
"""Likeliest tokens that are recorded at each position for rescoring."""


class BiasingQueue:
    """Queue of requests that wait for their hotwords to be compiled: a long list takes half a second, which others do
    not wait. Belongs to the loop's thread."""

    def __init__(
        self,
        encode: Callable[[str], list[int]] | None,
        text: Callable[[list[int]], str],
        call: Callable[[Callable[[], None]], None],
        fail: Callable[[list[int], Exception], None],
    ) -> None:
        """`encode`: None for a model that cannot use hotwords. `call`: LoopContext.call."""
        self._encode, self._text, self._call, self._fail = encode, text, call, fail
        self._lists: BiasingListCache[CompiledBiasingList] = BiasingListCache()
        self._waiting: dict[int, tuple[Future[CompiledBiasingList], Callable[[], None]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def when_ready(self, utterance: RecognitionRequest, go_on: Callable[[], None]) -> None:
        """Calls `go_on` once the request's hotwords are compiled."""
        if not utterance.options.bias:
            go_on()
            return
        future = self._build(utterance.options.bias, utterance.options.beam > 1)
        if future.done():
            self._resume(utterance, future, go_on)
            return
        self._waiting[utterance.id] = future, lambda: self._resume(utterance, future, go_on)
        future.add_done_callback(lambda _: self._call(lambda: self._ready(utterance.id)))

    def _ready(self, request_id: int) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1]()

    def cancel(self, request_id: int) -> None:
        """Stops waiting for a list; one that nobody else waits for is cancelled, unless its compilation has
        begun."""
        future, _ = self._waiting.pop(request_id, (None, None))
        if future is not None and all(future is not other for other, _ in self._waiting.values()):
            self._lists.cancel(future)

    def close(self) -> None:
        self._lists.close()

    def _build(self, bias: str, beams: bool) -> Future[CompiledBiasingList]:
        encode = self._encode
        assert encode is not None, "hotwords came to a model without a vocabulary"
        return self._lists.get_or_build(bias, lambda: RescoringList.build(bias, encode, self._text, beams), beams=beams)

    def _resume(
        self, utterance: RecognitionRequest, compiled: Future[CompiledBiasingList], go_on: Callable[[], None]
    ) -> None:
        if (failure := compiled.exception()) is not None:
            message = f"compiling hotwords failed: {type(failure).__name__}: {failure}"
            error = StepFailed(message, todo="leave them out; if it happens again, report it")
            error.__cause__ = failure
            self._fail([utterance.id], error)
            return
        utterance.hotwords = compiled.result()
        go_on()


def pick_and_record(row: DecodeRow, logits: Tensor, hidden: Tensor, weight: Tensor | None) -> tuple[int, float]:
    """Returns the likeliest next token of a greedy row with hotwords, and its natural-log probability; records the
    alternatives for rescoring. Nothing is boosted here: greedy search cannot go back, and boosting a token that was
    not recognized costs other words more than it finds.

    In      logits (vocabulary,), hidden (width,), weight: as in decoding/beam_search.top_tokens
    """
    likeliest = top_tokens(logits[None], hidden[None], weight, MAX_RECORDED_TOKENS)[0]
    row.top_tokens[len(row.tokens)] = dict(likeliest)
    return likeliest[0]
