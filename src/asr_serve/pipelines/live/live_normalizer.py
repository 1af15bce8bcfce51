"""Segments of a live caller are written as one writes, in a thread: grammars take tens of milliseconds, which is
time of all callers where one thread hears them.

What is told keeps its order: behind a segment that is being written everything waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import msgspec

from asr_serve.pipelines.live.events import LiveEvent, LiveSegmentDone
from asr_serve.pipelines.segments import SegmentNormalizer
from asr_serve.types import Segment

MAX_PENDING_SEGMENTS = 16
"""Segments of a caller that wait to be written before no more is heard."""


class HeldNormalization(NamedTuple):
    event: LiveEvent
    normalized: Future[Segment] | None = None


class LiveNormalizer:
    """One caller."""

    def __init__(self, language: str, wake: Callable[[], None]) -> None:
        """`language`: what is spoken; empty: it is yet to be heard. Raises UnsupportedOption where nothing can be
        written so."""
        self._normalizer, self._wake = SegmentNormalizer(language, itn=True), wake
        self._held: deque[HeldNormalization] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._held)

    @property
    def full(self) -> bool:
        return sum(each.normalized is not None for each in self._held) >= MAX_PENDING_SEGMENTS

    def enqueue(self, events: Sequence[LiveEvent]) -> None:
        """These are to be told, in this order, behind what is held."""
        for event in events:
            if isinstance(event, LiveSegmentDone):
                written = _threads().submit(self._normalizer.normalize, event.segment, event.language)
                written.add_done_callback(lambda _: self._wake())
                self._held.append(HeldNormalization(event, written))
            else:
                self._held.append(HeldNormalization(event))

    def ready_events(self) -> list[LiveEvent]:
        """What can be told by now. Raises UnsupportedOption where the package of the grammars is broken."""
        events: list[LiveEvent] = []
        while self._held and ((first := self._held[0]).normalized is None or first.normalized.done()):
            self._held.popleft()
            if first.normalized is None:
                events.append(first.event)
            else:
                events.append(msgspec.structs.replace(first.event, segment=first.normalized.result()))
        return events

    def close(self) -> None:
        """At any time: nobody wants to be told."""
        for each in self._held:
            if each.normalized is not None:
                each.normalized.cancel()


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """One for all callers: the grammars are one thread's at a time."""
    return ThreadPoolExecutor(1, "asr-serve written form")
