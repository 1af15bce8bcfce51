"""Audio of live segments for models that decode it anew for each hypothesis: sent whole, or incrementally."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient, RecognitionStream
from asr_serve.engine.request import HypothesisRequest
from asr_serve.pipelines.segments import PADDING_SAMPLES, pad_with_silence
from asr_serve.types import Priority, Span


class HypothesisInput(NamedTuple):
    """Request for a hypothesis of part of a segment's audio."""

    span: Span
    options: SearchOptions
    priority: Priority
    draft: DraftTokens
    within_ms: int
    ends_at: int | None = None
    """Set for the last request of a segment: end of the audio that was known when the segment closed."""


class SegmentEncoder(Protocol):
    """Sender of one segment's audio to the engine."""

    by_deadline: bool
    """Whether a request may overtake others: then a pending one is submitted again when it becomes urgent."""

    def submit(self, question: HypothesisInput) -> tuple[Future[Recognition], Callable[[], None]]:
        """Returns the future hypothesis, and a function that cancels it."""

    def close(self) -> None:
        """Ends the stream, after the last request or a failure. `submit` opens a new one."""


class WholeSegmentEncoder:
    """Sends all audio for each hypothesis."""

    by_deadline = True

    def __init__(self, client: EngineClient, audio: AudioHistory) -> None:
        self._client, self._audio = client, audio

    def submit(self, question: HypothesisInput) -> tuple[Future[Recognition], Callable[[], None]]:
        ticket = self._client.submit(
            pad_with_silence(self._audio.slice(question.span)),
            question.options,
            question.priority,
            admitted=True,
            draft=question.draft,
            within_ms=question.within_ms,
        )
        return ticket.future, partial(self._client.cancel, ticket)

    def close(self) -> None:
        pass


class IncrementalSegmentEncoder:
    """Sends the audio since the last hypothesis; the engine caches the encoding of what came before. A stream
    begins where the segment's audio does, and anew if that moves."""

    by_deadline = False

    def __init__(self, client: EngineClient, audio: AudioHistory, longest: int) -> None:
        """`longest`: limit of a segment, in samples."""
        self._client, self._audio = client, audio
        self._longest = longest + 2 * PADDING_SAMPLES
        self._stream: RecognitionStream | None = None
        self._start = self._sent_to = 0
        self._ended = False
        """Whether its last request was submitted."""

    def submit(self, question: HypothesisInput) -> tuple[Future[Recognition], Callable[[], None]]:
        span, last = question.span, question.ends_at is not None
        parts = []
        if self._stream is None or self._ended or self._start != span.start_samples:
            self.close()
            self._stream = self._client.open_stream(live=question.priority == "live", samples=self._longest)
            self._start = self._sent_to = span.start_samples
            self._ended = False
            parts.append(np.zeros(PADDING_SAMPLES, np.float32))
        end = max(self._sent_to, span.end_samples, question.ends_at or 0)
        if end > self._sent_to:
            parts.append(self._audio.slice(Span(self._sent_to, end)))
        if last:
            parts.append(np.zeros(PADDING_SAMPLES, np.float32))
        samples = PADDING_SAMPLES + span.samples + (PADDING_SAMPLES if last else 0)
        request = HypothesisRequest(samples, question.options, question.draft, question.priority)
        pcm = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        answer = self._stream.submit_hypothesis(pcm, request, last=last)
        self._sent_to, self._ended = end, last
        return answer, lambda: None  # no cancelling: the next request follows it in the same stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
