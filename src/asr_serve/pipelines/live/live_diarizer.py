"""Who says each segment of a live caller: it is heard once more for its speakers before it is told.

What is told keeps its order: behind a segment that is being heard everything waits, some tens of milliseconds.
Where the engine has no time for it, or has died over it, a segment is told as the last speaker's. At the end all
that was heard is clustered once more, in a thread: for hours of talk that takes seconds.
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
    """One caller."""

    def __init__(
        self,
        client: EngineClient,
        words: bool,
        how_many: SpeakerCount,
        wake: Callable[[], None],
    ) -> None:
        """`words`: whether they are to be told. `how_many` speakers there are, at the end."""
        self._client, self._words, self._how_many, self._wake = client, words, how_many, wake
        self._clusterer = OnlineDiarizer()
        self._held: deque[HeldSpeakerEvent] = deque()
        self._submitted: dict[int, HeldSpeakerEvent] = {}
        """Segments that are heard and not held yet, by identity."""
        self._emitted_spans: list[Span] = []
        self._last_speaker = ""
        self._final_pass: Future[SpeakersRevised] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def submit_segment(self, done: LiveSegmentDone, span: Span, pcm: np.ndarray) -> None:
        """A segment that is to be held next: `span` and `pcm` of what was heard of it. Raises EngineClosed."""
        asked = []
        starts = window_starts(len(pcm), DENSE.step_samples)
        for number, start in enumerate(starts):
            part = np.ascontiguousarray(pcm[start : start + WINDOW_SAMPLES])
            listened = number % DENSE.every == 0 or start == starts[-1]
            try:
                budget = DENSE.budget_samples if listened else 0
                answer = self._client.diarize_window(part, budget_samples=budget, live=True)
            except AtCapacity:
                break
            answer.add_done_callback(lambda _: self._wake())
            asked.append(PendingVoiceWindow(span.start_samples + start, len(part), answer))
        self._submitted[id(done)] = HeldSpeakerEvent(done, tuple(asked))

    def enqueue(self, events: Sequence[LiveEvent]) -> None:
        """These are to be told, in this order, behind what is held."""
        self._held.extend(self._submitted.pop(id(event), HeldSpeakerEvent(event)) for event in events)

    def ready_events(self) -> list[LiveEvent]:
        """What can be told by now. Raises WeightsMissing, WeightsCorrupt, EngineClosed."""
        events: list[LiveEvent] = []
        while self._held and all(each.answer.done() for each in self._held[0].asked):
            held = self._held[0]
            if isinstance(held.event, SessionFinished):
                if self._final_pass is None:  # all that was said is told: nobody else touches what it reads
                    self._final_pass = _threads().submit(self._final_speakers)
                    self._final_pass.add_done_callback(lambda _: self._wake())
                if not self._final_pass.done():
                    break
                events.append(self._final_pass.result())
            self._held.popleft()
            if isinstance(held.event, LiveSegmentDone):
                events += self._assign_speakers(held.event, held)
            else:
                events.append(held.event)
        return events

    def close(self) -> None:
        """At any time: nobody wants to be told."""
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
        """Of each segment, as all that was said shows."""
        turns = TurnIndex(self._clusterer.finalize(self._how_many).turns)
        found, last = [], self._last_speaker
        for span in self._emitted_spans:
            last = turns.speaker(span.start_samples, span.end_samples) or last
            found.append(last)
        return SpeakersRevised(tuple(found))


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """For all callers: who has spoken for an hour does not hold up who has spoken for a minute."""
    return ThreadPoolExecutor(2, "asr-serve speakers")
