"""Table of open requests: the resources that each needs, its progress, and its result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from asr_serve import units
from asr_serve.decoding.hypothesis import Hypothesis, Recognition, Reused
from asr_serve.decoding.language_model.token_models import (
    SessionLanguageModel,
    TokenLanguageModel,
    choose_language_model,
)
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.request import RecognitionRequest, resolve
from asr_serve.engine.seq2seq.decode_batch import rows_for
from asr_serve.engine.seq2seq.encoder import BorrowedPages
from asr_serve.engine.seq2seq.scheduler import ScheduledRequest
from asr_serve.engine.seq2seq.token_aligner import Answer
from asr_serve.engine.stats import EngineStats
from asr_serve.models.interfaces import EncoderDecoderModel, SpeechLanguageModel
from asr_serve.types import EngineTimestamps, Priority


class ResourceNeed(NamedTuple):
    """Frames to encode, and rows and pages to decode."""

    frames: int
    rows: int
    pages: int


class DecoderCapacity(Protocol):
    """Rows and pages of what decodes: `decoder.DecodeRunner`, or vLLM."""

    def pages_needed(self, frames: int, max_tokens: int, options: SearchOptions) -> int:
        """Pages that a request needs. Raises OptionError for one that can never be decoded."""

    def validate_capacity(self, rows: int, pages: int) -> None:
        """Raises OptionError for more rows or pages than there are."""


class RequestTable:
    """Open requests of one engine by id; belongs to the loop's thread."""

    stats: EngineStats
    """Counters of the loop."""

    def __init__(
        self,
        model: EncoderDecoderModel,
        runner: DecoderCapacity,
        window: str,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        language_models: Mapping[str, TokenLanguageModel],
    ) -> None:
        """`window`: see EngineConfig. `language_models`: those of beam search by name."""
        self._language_models = language_models
        self._model, self._runner = model, runner
        self._window = window if model.pads_to_window else "packed"
        self.text, self._tokens_per_s = text, tokens_per_s
        self._on_done, self.on_start = on_done, on_start
        self.open: dict[int, RecognitionRequest] = {}
        self.borrowed_pages: dict[int, BorrowedPages] = {}
        """Pages of requests whose audio was encoded elsewhere."""
        self.counts: Counter[Priority] = Counter()
        self.last_live_s = -math.inf
        """Arrival of the latest live request, on the monotonic clock."""

    @property
    def has_interactive(self) -> bool:
        """Returns whether a live or interactive request is open."""
        return bool(self.counts["live"] or self.counts["interactive"])

    def add(self, utterance: RecognitionRequest, borrowed: BorrowedPages | None = None) -> None:
        self.open[utterance.id] = utterance
        self.counts[utterance.priority] += 1
        utterance.full_window, utterance.arrived_s = self._window == "whole", time.monotonic()
        if borrowed is not None:
            self.borrowed_pages[utterance.id] = borrowed
        if utterance.priority == "live":
            self.last_live_s = utterance.arrived_s

    def remove(self, request_id: int) -> RecognitionRequest:
        utterance = self.open.pop(request_id)
        self.counts[utterance.priority] -= 1
        if self.borrowed_pages.pop(request_id, None) is None:
            self._on_done(utterance.samples)
        return utterance

    def mark_started(self, ids: list[int]) -> list[RecognitionRequest]:
        """Marks the requests as started; returns them."""
        start_ns = time.time_ns()
        batch = [self.open[i] for i in ids]
        new = [utterance for utterance in batch if not utterance.encode_start_ns]
        for utterance in new:
            utterance.encode_start_ns = start_ns
            self.stats.record_queue_time(utterance.priority, max(0, start_ns - utterance.submitted_ns) / 1e9)
        self.on_start([utterance.id for utterance in new])
        return batch

    def mark_encoded(self, utterance: RecognitionRequest) -> None:
        """Records that the frames are in pages; drops the audio, unless it may be encoded again."""
        if not self.omits_window_silence(utterance):
            utterance.pcm = None
        utterance.encode_end_ns = time.time_ns()

    def finish_from_cache(self, utterance: RecognitionRequest, answer: Recognition) -> None:
        """Resolves the request with the answer of an earlier one with the same answer digest."""
        self.finish(utterance, answer, "answer")

    def finish(self, utterance: RecognitionRequest, answer: Recognition, reused: Reused) -> None:
        """Removes the request and resolves its future."""
        answer = self._without_header(utterance, answer)  # may fail: the request must still be open then
        self.remove(utterance.id)
        now_ns = time.time_ns()
        if utterance.answer_digest:
            self.stats.record_cache_lookup(reused or "none")
        self.stats.record_recognition(utterance.samples, 0 if reused == "answer" else len(answer.tokens))
        phases = EngineTimestamps(
            submitted_ns=utterance.submitted_ns,
            encode_start_ns=utterance.encode_start_ns or now_ns,
            encode_end_ns=utterance.encode_end_ns or now_ns,
            decode_end_ns=now_ns,
            peer=utterance.peer_timings,
        )
        resolve(utterance.future, msgspec.structs.replace(answer, phases=phases, reused=reused))

    def _without_header(self, utterance: RecognitionRequest, answer: Recognition) -> Recognition:
        """Returns the answer with the language that its header names, and without the header's tokens; the text is cut
        to `max_new_tokens`. Rescoring and alignment, which come before, need all tokens."""
        model = self._model
        if not self._header_tokens(utterance) or not isinstance(model, SpeechLanguageModel):
            return answer
        read_header, limit = model.read_header, utterance.options.max_new_tokens

        def text(each: Answer) -> Answer:
            first = read_header(each.tokens).tokens
            part = slice(first, None if limit is None else first + limit)
            return msgspec.structs.replace(
                each, tokens=each.tokens[part], logprobs=each.logprobs[part], times=each.times[part]
            )

        hypotheses = tuple(map(text, answer.hypotheses))
        language = read_header(answer.tokens).language
        return msgspec.structs.replace(text(answer), language=language, hypotheses=hypotheses)

    # --- resources ----------------------------------------------------------------------------------------

    def resources_needed(self, utterance: RecognitionRequest) -> ResourceNeed:
        pcm = utterance.pcm
        frames = 0 if pcm is None else self._model.count_frames(len(pcm), utterance.full_window)
        limit, options = self._max_tokens(utterance), utterance.options
        return ResourceNeed(frames, rows_for(options), self._runner.pages_needed(frames, limit, options))

    def to_scheduled(self, each: RecognitionRequest, like: RecognitionRequest) -> ScheduledRequest:
        """Returns the scheduler's record of the request, as urgent as `like`."""
        frames, rows, pages = self.resources_needed(each)
        urgent = like.priority == "live" and like.urgent
        arrived_ms = like.arrived_s * 1_000
        return ScheduledRequest(each.id, frames, pages, like.priority, arrived_ms, like.within_ms, rows, urgent)

    def validate_capacity(self, utterance: RecognitionRequest) -> None:
        """Raises OptionError if the request needs more rows or pages than there will ever be."""
        _, rows, pages = self.resources_needed(utterance)
        self._runner.validate_capacity(rows, pages)

    def hypothesis(self, utterance: RecognitionRequest) -> Hypothesis:
        limit = self._max_tokens(utterance)
        hypothesis = Hypothesis(utterance.options, self._model.eos, limit, self.text, utterance.draft)
        hypothesis.hotwords, hypothesis.stop_tokens = utterance.hotwords, self._model.stop_tokens
        chosen = self.language_model(utterance)
        hypothesis.language_model = None if chosen is None else chosen.fusion
        return hypothesis

    def language_model(self, utterance: RecognitionRequest) -> SessionLanguageModel | None:
        """Returns the language model of the request; None: it has none. Raises UnsupportedOption."""
        return choose_language_model(self._language_models, utterance.options.language_model)

    def omits_window_silence(self, utterance: RecognitionRequest) -> bool:
        """Returns whether silence was left out of its window, and it may still be encoded with all of it."""
        pcm = None if self._window != "checked" or utterance.full_window else utterance.pcm
        count = self._model.count_frames
        return pcm is not None and count(len(pcm)) < count(len(pcm), True)

    def _max_tokens(self, utterance: RecognitionRequest) -> int:
        """Most tokens of the answer: more than anybody says in that time, or the request's own limit, if that is less;
        within the model's positions, the first of which is BOS."""
        bound = 4 + int(units.samples_to_s(utterance.samples) * self._tokens_per_s)
        limit = utterance.options.max_new_tokens
        most = bound if limit is None else min(bound, limit)
        # A header may be shorter than its maximum; `_without_header` cuts the text to the limit then.
        return min(self._model.max_tokens - 1, most + self._header_tokens(utterance))

    def _header_tokens(self, utterance: RecognitionRequest) -> int:
        """Returns the maximum length of the header before the answer's text; 0: there is none."""
        model = self._model
        if utterance.options.language or not isinstance(model, SpeechLanguageModel):
            return 0
        return model.max_header_tokens
