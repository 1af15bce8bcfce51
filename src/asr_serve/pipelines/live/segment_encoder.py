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


class SubmittedHypothesis(NamedTuple):
    """Request for a hypothesis that the engine has."""

    answer: Future[Recognition]
    cancel: Callable[[], None]
    expedite: Callable[[int], None] | None
    """Shortens the time within which it should be encoded to so many ms since its arrival; None where requests never
    overtake others."""


class SegmentEncoder(Protocol):
    """Sender of one segment's audio to the engine."""

    def submit(self, question: HypothesisInput) -> SubmittedHypothesis: ...

    def close(self) -> None:
        """Ends the stream, after the last request or a failure. `submit` opens a new one."""


class WholeSegmentEncoder:
    """Sends all audio for each hypothesis."""

    def __init__(self, client: EngineClient, audio: AudioHistory) -> None:
        self._client, self._audio = client, audio

    def submit(self, question: HypothesisInput) -> SubmittedHypothesis:
        ticket = self._client.submit(
            pad_with_silence(self._audio.slice(question.span)),
            question.options,
            question.priority,
            admitted=True,
            draft=question.draft,
            within_ms=question.within_ms,
        )
        cancel, expedite = partial(self._client.cancel, ticket), partial(self._client.expedite, ticket)
        return SubmittedHypothesis(ticket.future, cancel, expedite)

    def close(self) -> None:
        pass


class IncrementalSegmentEncoder:
    """Sends the audio since the last hypothesis; the engine caches the encoding of what came before. A stream
    begins where the segment's audio does, and anew if that moves."""

    def __init__(self, client: EngineClient, audio: AudioHistory, longest: int) -> None:
        """`longest`: limit of a segment, in samples."""
        self._client, self._audio = client, audio
        self._longest = longest + 2 * PADDING_SAMPLES
        self._stream: RecognitionStream | None = None
        self._start = self._sent_to = 0
        self._ended = False
        """Whether its last request was submitted."""

    def submit(self, question: HypothesisInput) -> SubmittedHypothesis:
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
        # No cancelling: the next request follows it in the same stream.
        return SubmittedHypothesis(answer, lambda: None, None)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
