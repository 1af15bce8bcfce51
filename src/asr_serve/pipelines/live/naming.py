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

from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity, StepFailed
from asr_serve.pipelines.live.caller import Event, Finished, SegmentDone, Speakers
from asr_serve.speaker.assigning import Turns, told
from asr_serve.speaker.clustering import HowMany
from asr_serve.speaker.following import Following
from asr_serve.speaker.grouping import Window
from asr_serve.speaker.listening import CLOSE, starts_of
from asr_serve.speaker.local import WINDOW_SAMPLES, LocalVoices
from asr_serve.types import Span


class Asked(NamedTuple):
    start_samples: int
    samples: int
    answer: Future[LocalVoices]


class Held(NamedTuple):
    event: Event
    asked: tuple[Asked, ...] = ()


class Naming:
    """One caller."""

    def __init__(
        self,
        client: EngineClient,
        words: bool,
        how_many: HowMany,
        wake: Callable[[], None],
    ) -> None:
        """`words`: whether they are to be told. `how_many` speakers there are, at the end."""
        self._client, self._words, self._how_many, self._wake = client, words, how_many, wake
        self._following = Following()
        self._held: deque[Held] = deque()
        self._heard: dict[int, Held] = {}
        """Segments that are heard and not held yet, by identity."""
        self._told: list[Span] = []
        self._last = ""
        self._settling: Future[Speakers] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._held)

    def hear(self, done: SegmentDone, span: Span, pcm: np.ndarray) -> None:
        """A segment that is to be held next: `span` and `pcm` of what was heard of it. Raises EngineClosed."""
        asked = []
        starts = starts_of(len(pcm), CLOSE.step_samples)
        for number, start in enumerate(starts):
            part = np.ascontiguousarray(pcm[start : start + WINDOW_SAMPLES])
            listened = number % CLOSE.every == 0 or start == starts[-1]
            try:
                budget = CLOSE.budget_samples if listened else 0
                answer = self._client.voices(part, budget_samples=budget, live=True)
            except AtCapacity:
                break
            answer.add_done_callback(lambda _: self._wake())
            asked.append(Asked(span.start_samples + start, len(part), answer))
        self._heard[id(done)] = Held(done, tuple(asked))

    def hold(self, events: Sequence[Event]) -> None:
        """These are to be told, in this order, behind what is held."""
        self._held.extend(self._heard.pop(id(event), Held(event)) for event in events)

    def take(self) -> list[Event]:
        """What can be told by now. Raises WeightsMissing, WeightsCorrupt, EngineClosed."""
        events: list[Event] = []
        while self._held and all(each.answer.done() for each in self._held[0].asked):
            held = self._held[0]
            if isinstance(held.event, Finished):
                if self._settling is None:  # all that was said is told: nobody else touches what it reads
                    self._settling = _threads().submit(self._settled)
                    self._settling.add_done_callback(lambda _: self._wake())
                if not self._settling.done():
                    break
                events.append(self._settling.result())
            self._held.popleft()
            if isinstance(held.event, SegmentDone):
                events += self._named(held.event, held)
            else:
                events.append(held.event)
        return events

    def close(self) -> None:
        """At any time: nobody wants to be told."""
        if self._settling is not None:
            self._settling.cancel()

    def _named(self, done: SegmentDone, held: Held) -> list[Event]:
        windows = []
        for start, samples, answer in held.asked:
            if isinstance(failure := answer.exception(), StepFailed):
                continue
            if failure is not None:
                raise failure
            windows.append(Window(start, samples, answer.result()))
        turns = Turns(self._following.hear(windows))
        parts = told(done.segment, turns, self._words)
        events: list[Event] = []
        for part in parts:
            self._last = part.speaker or self._last or "SPEAKER_00"
            self._told.append(Span(part.start_samples, part.end_samples))
            named = msgspec.structs.replace(part, speaker=self._last)
            events.append(msgspec.structs.replace(done, segment=named))
        return events

    def _settled(self) -> Speakers:
        """Of each segment, as all that was said shows."""
        turns = Turns(self._following.settle(self._how_many).turns)
        found, last = [], self._last
        for span in self._told:
            last = turns.speaker(span.start_samples, span.end_samples) or last
            found.append(last)
        return Speakers(tuple(found))


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """For all callers: who has spoken for an hour does not hold up who has spoken for a minute."""
    return ThreadPoolExecutor(2, "asr-serve speakers")
