"""Parallel long-form transcription: voice activity cuts a file into independent segments.

A decoder may end its answer at a pause although speech follows: Whisper does where speakers change. A model with
timestamps shows this, so timestamps are always requested, and a segment whose answer ends early is continued from
there. Only where voice activity cut it: then speech lasts until its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve.audio.audio_buffers import AudioHistory, WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES, EndpointConfig, Endpointer
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import VadSession
from asr_serve.models.registry import AsrCard, TimestampTokens
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.pipelines.offline.long_form import (
    MIN_ANSWER_SAMPLES,
    TIMESTAMP_SLACK_SAMPLES,
    SegmentAnswer,
    SegmentRequest,
)
from asr_serve.pipelines.segment_recognizer import AnsweringModel
from asr_serve.pipelines.segments import (
    PADDING_SAMPLES,
    build_segment,
    constant_speech_scores,
    is_speech,
    pad_with_silence,
    select_tokens,
)
from asr_serve.pipelines.silence_tracker import SilenceTracker, silences_by_level
from asr_serve.types import Segment, Span

VAD_BATCH_WINDOWS = 512
"""Limit of windows submitted to voice activity at once: 16 s."""
MAX_PENDING_VAD_BATCHES = 2
"""Batches of one file that may wait for voice activity."""
MAX_FOLLOW_UPS = 8
"""Limit of requests that continue one segment; a model that needs more has lost its place."""


class ParallelLongForm:
    """LongFormStrategy. Buffers MAX_PENDING_VAD_BATCHES batches, the one being read, and the audio that the
    open segment may need."""

    def __init__(
        self,
        card: AsrCard,
        endpoint: EndpointConfig,
        search: SearchOptions,
        session: VadSession | None,
        most_windows: int,
        text: Callable[[list[int]], str],
        wake: Callable[[Future[Any]], None],
        model_of: Callable[[Recognition], AnsweringModel] | None = None,
    ) -> None:
        """`session`: None where all audio counts as speech. `most_windows`: limit of the session for one
        submission. `wake` is called with its results. `model_of`: model of an answer, where it is not always that of
        `card` and `text`."""
        self._endpoint = endpoint
        self._model_of = model_of or (lambda _: AnsweringModel(card, text))
        self._search = msgspec.structs.replace(search, timestamps=card.times is not None)
        self._session, self._wake = session, wake
        self._context = PADDING_SAMPLES if session is not None and card.pads_segments else 0
        """Samples of silence added on each side of a segment; none without voice activity."""
        self._piece_samples = min(VAD_BATCH_WINDOWS, most_windows) * WINDOW_SAMPLES
        self.read_samples = 0
        self.finished = False
        self._reading = True
        self._unscored = WindowAlignedBuffer()
        self._audio = AudioHistory()
        self._scoring: deque[tuple[np.ndarray, Future[np.ndarray]]] = deque()
        self._endpointer = Endpointer(endpoint)
        self._silence = SilenceTracker(endpoint.neg_threshold)
        self._pending_requests: deque[SegmentRequest] = deque()
        """Requests without an answer, in order."""

    def advance(self, source: AudioReader, room: bool) -> tuple[bool, list[SegmentRequest]]:
        progressed, requests = False, list[SegmentRequest]()
        while room and self._reading and len(self._scoring) < MAX_PENDING_VAD_BATCHES:
            if not self._read(source):
                break
            progressed = True
        while self._scoring and self._scoring[0][1].done():
            progressed = True
            pcm, future = self._scoring.popleft()
            probabilities = future.result()
            self._audio.append(pcm)
            if self._search.words and self._session is not None:
                self._silence.append_scores(probabilities)
            requests += self._requests_for(self._endpointer.append_probabilities(probabilities))
        # Not when the last batch is scored: a file may end at a batch's end, and that is only known later.
        if not self.finished and not self._reading and not self._scoring:
            progressed = self.finished = True
            requests += self._requests_for(self._endpointer.finish(self.read_samples))
        return progressed, requests

    def accept_answer(self, span: Span, answer: Recognition) -> SegmentAnswer:
        request = self._pending_requests.popleft()
        assert request.span == span, "answers come in the order of requests"
        model = self._model_of(answer)
        if not is_speech(answer, model.card, request.search.task):
            return SegmentAnswer((), span.end_samples, answer.language, answer.phases)
        follow_up = self._follow_up(request, answer, model.card.times)
        if follow_up is not None:
            self._pending_requests.appendleft(follow_up)
            span = Span(span.start_samples, follow_up.span.start_samples)
        origin = request.span.start_samples - self._context
        spoken = _without_times(answer, model.card.times)
        segment = build_segment(span, spoken, model.text, origin, request.silences, request.search.hypotheses)
        segments = (segment,) if segment else ()
        return SegmentAnswer(
            segments, span.end_samples, answer.language, answer.phases, follow_up, answer.language_prob
        )

    def turn_request(self, span: Span, pcm: np.ndarray, search: SearchOptions) -> SegmentRequest:
        """Returns the request for one speaker's turn, `pcm` (span.samples,) float32, separated from others."""
        silences = silences_by_level(pcm, span) if search.words else ()
        return SegmentRequest(span, pad_with_silence(pcm) if self._context else pcm, search, silences=silences)

    def turn_segment(self, request: SegmentRequest, answer: Recognition) -> Segment | None:
        """Returns the segment of a `turn_request`, which ends where the answer ends; None if it has no text, or if the
        model lost its place. It is not continued behind the end of an answer."""
        model, span = self._model_of(answer), request.span
        if answer.finish != "stop" or not is_speech(answer, model.card, request.search.task):
            return None
        origin, spoken = span.start_samples - self._context, _without_times(answer, model.card.times)
        if (end := self._early_end(request, answer, model.card.times)) is not None:
            span = Span(span.start_samples, end)
        return build_segment(span, spoken, model.text, origin, request.silences, request.search.hypotheses)

    def _follow_up(
        self, request: SegmentRequest, answer: Recognition, times: TimestampTokens | None
    ) -> SegmentRequest | None:
        """Returns the request for the rest of a segment whose answer ends early; None if there is none."""
        span = request.span
        if self._session is None or request.retries == MAX_FOLLOW_UPS:
            return None
        if (end := self._early_end(request, answer, times)) is None:
            return None
        rest, answered = Span(end, span.end_samples), end - span.start_samples
        pcm = request.pcm[PADDING_SAMPLES + answered : PADDING_SAMPLES + span.samples]
        search = msgspec.structs.replace(request.search, language=request.search.language or answer.language)
        return SegmentRequest(rest, pad_with_silence(pcm), search, request.retries + 1, request.silences)

    def _early_end(self, request: SegmentRequest, answer: Recognition, times: TimestampTokens | None) -> int | None:
        """Returns where an answer ends that ends before the request's span does, in samples of the file."""
        if times is None or answer.finish != "stop" or answer.tokens[-1] < times.first:
            return None
        answered = (answer.tokens[-1] - times.first) * times.step_samples - self._context
        if answered < MIN_ANSWER_SAMPLES or request.span.samples - answered <= TIMESTAMP_SLACK_SAMPLES:
            return None
        return request.span.start_samples + answered

    def close(self) -> None:
        self._scoring.clear()
        if self._session is not None:
            self._session.close()

    def _read(self, source: AudioReader) -> bool:
        """Submits the next batch to voice activity, or ends the reading; False when a slow input has too little
        audio.

        Audio of a slow input is submitted as soon as none of it is pending, so that its text comes early.
        """
        while self._unscored.samples < self._piece_samples and (chunk := source.next_chunk()) is not None:
            self._unscored.append(chunk)
            self.read_samples += len(chunk)
        self._reading = not source.ended
        whole_samples = self._unscored.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if self._reading and whole_samples < self._piece_samples and (self._scoring or not whole_samples):
            return False
        pcm = self._unscored.take_windows(
            min(whole_samples, self._piece_samples), WINDOW_SAMPLES, last=not self._reading
        )
        if len(pcm):
            future = self._voice_activity(pcm)
            self._scoring.append((pcm, future))
            future.add_done_callback(self._wake)
        return True

    def _voice_activity(self, pcm: np.ndarray) -> Future[np.ndarray]:
        if self._session is not None:
            return self._session.submit_windows(pcm)
        future: Future[np.ndarray] = Future()
        future.set_result(constant_speech_scores(pcm, self._endpoint.threshold))
        return future

    def _requests_for(self, spans: list[Span]) -> list[SegmentRequest]:
        requests = []
        for span in spans:
            pcm = self._audio.slice(span)
            padded = pad_with_silence(pcm) if self._context else pcm
            requests.append(SegmentRequest(span, padded, self._search, silences=self._silences_in(span, pcm)))
        self._pending_requests += requests
        self._audio.drop_before(self._endpointer.keep_from_samples)
        self._silence.forget_before(self._endpointer.keep_from_samples)
        return requests

    def _silences_in(self, span: Span, pcm: np.ndarray) -> tuple[Span, ...]:
        if not self._search.words:
            return ()
        return silences_by_level(pcm, span) if self._session is None else self._silence.silences_in(span)


def _without_times(answer: Recognition, times: TimestampTokens | None) -> Recognition:
    if times is None:
        return answer

    def words(tokens: tuple[int, ...]) -> list[int]:
        return [i for i, token in enumerate(tokens) if token < times.words_below]

    spoken = select_tokens(answer, words(answer.tokens))
    return msgspec.structs.replace(
        spoken, hypotheses=tuple(select_tokens(each, words(each.tokens)) for each in answer.hypotheses)
    )
