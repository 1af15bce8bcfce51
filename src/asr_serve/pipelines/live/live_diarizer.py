"""Speakers of live segments: each is diarized before its event is emitted.

Events keep their order: all wait behind a segment that is being diarized, some tens of milliseconds. Where the
engine has no capacity, or died meanwhile, a segment gets the last speaker. At the end all windows are clustered
once more, in a thread: for hours of speech that takes seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve.diarization.clustering import SpeakerCount
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.online import OnlineDiarizer
from asr_serve.diarization.speaker_groups import DiarizationWindow
from asr_serve.diarization.windowing import DENSE, window_starts
from asr_serve.diarization.word_speakers import TurnIndex, split_by_speaker
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity, StepFailed
from asr_serve.pipelines.live.events import LiveEvent, LiveSegmentDone, SessionFinished, SpeakersRevised
from asr_serve.types import Span


class PendingVoiceWindow(NamedTuple):
    start_samples: int
    samples: int
    answer: Future[LocalSpeakers]


class HeldSpeakerEvent(NamedTuple):
    event: LiveEvent
    asked: tuple[PendingVoiceWindow, ...] = ()


class LiveDiarizer:
    """Diarization of one session's events."""

    def __init__(self, client: EngineClient, words: bool, how_many: SpeakerCount, wake: Callable[[], None]) -> None:
        """`words`: whether segments are to have words. `how_many`: number of speakers, for the clustering at
        the end."""
        self._client, self._words, self._how_many, self._wake = client, words, how_many, wake
        self._clusterer = OnlineDiarizer()
        self._held: deque[HeldSpeakerEvent] = deque()
        self._submitted: dict[int, HeldSpeakerEvent] = {}
        """Segments submitted and not yet enqueued, by identity."""
        self._emitted_spans: list[Span] = []
        self._last_speaker = ""
        self._final_pass: Future[SpeakersRevised] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def submit_segment(self, done: LiveSegmentDone, span: Span, pcm: np.ndarray) -> None:
        """Submits a segment that is enqueued next; `span` and `pcm` are its audio. Raises EngineClosed."""
        windows = []
        starts = window_starts(len(pcm), DENSE.step_samples)
        for number, start in enumerate(starts):
            part = np.ascontiguousarray(pcm[start : start + WINDOW_SAMPLES])
            embedded = number % DENSE.every == 0 or start == starts[-1]
            try:
                budget = DENSE.budget_samples if embedded else 0
                answer = self._client.diarize_window(part, budget_samples=budget, live=True)
            except AtCapacity:
                break
            answer.add_done_callback(lambda _: self._wake())
            windows.append(PendingVoiceWindow(span.start_samples + start, len(part), answer))
        self._submitted[id(done)] = HeldSpeakerEvent(done, tuple(windows))

    def enqueue(self, events: Sequence[LiveEvent]) -> None:
        """Appends events, in order."""
        self._held.extend(self._submitted.pop(id(event), HeldSpeakerEvent(event)) for event in events)

    def ready_events(self) -> list[LiveEvent]:
        """Returns the events that are ready, in order. Raises WeightsMissing, WeightsCorrupt, EngineClosed."""
        events: list[LiveEvent] = []
        while self._held and all(window.answer.done() for window in self._held[0].asked):
            first = self._held[0]
            if isinstance(first.event, SessionFinished):
                if self._final_pass is None:  # all segments are emitted: nothing else uses the clusterer
                    self._final_pass = _threads().submit(self._final_speakers)
                    self._final_pass.add_done_callback(lambda _: self._wake())
                if not self._final_pass.done():
                    break
                events.append(self._final_pass.result())
            self._held.popleft()
            if isinstance(first.event, LiveSegmentDone):
                events += self._assign_speakers(first.event, first)
            else:
                events.append(first.event)
        return events

    def close(self) -> None:
        """Cancels the clustering at the end. May be called at any time."""
        if self._final_pass is not None:
            self._final_pass.cancel()

    def _assign_speakers(self, done: LiveSegmentDone, held: HeldSpeakerEvent) -> list[LiveEvent]:
        windows = []
        for start, samples, answer in held.asked:
            if isinstance(failure := answer.exception(), StepFailed):
                continue
            if failure is not None:
                raise failure
            windows.append(DiarizationWindow(start, samples, answer.result()))
        turns = TurnIndex(self._clusterer.append_windows(windows))
        parts = split_by_speaker(done.segment, turns, self._words)
        events: list[LiveEvent] = []
        for part in parts:
            self._last_speaker = part.speaker or self._last_speaker or "SPEAKER_00"
            self._emitted_spans.append(Span(part.start_samples, part.end_samples))
            named = msgspec.structs.replace(part, speaker=self._last_speaker)
            events.append(msgspec.structs.replace(done, segment=named))
        return events

    def _final_speakers(self) -> SpeakersRevised:
        """Speaker of each segment, by all audio."""
        turns = TurnIndex(self._clusterer.finalize(self._how_many).turns)
        speakers, last = [], self._last_speaker
        for span in self._emitted_spans:
            last = turns.speaker(span.start_samples, span.end_samples) or last
            speakers.append(last)
        return SpeakersRevised(tuple(speakers))


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """Threads for all sessions: one that clusters an hour does not delay one that clusters a minute."""
    return ThreadPoolExecutor(2, "asr-serve speakers")
