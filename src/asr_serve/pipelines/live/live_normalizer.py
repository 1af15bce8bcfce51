"""Inverse text normalization of live segments, on a thread: grammars take tens of milliseconds, which would delay
all sessions of a thread.

Events keep their order: all wait behind a segment that is being normalized.
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
"""Segments of a session that may wait for normalization before it takes no more audio."""


class HeldNormalization(NamedTuple):
    event: LiveEvent
    normalized: Future[Segment] | None = None


class LiveNormalizer:
    """Normalization of one session's events."""

    def __init__(self, language: str, wake: Callable[[], None]) -> None:
        """`language`: the language of the speech; empty: not known yet. Raises UnsupportedOption for a language
        without grammars."""
        self._normalizer, self._wake = SegmentNormalizer(language, itn=True), wake
        self._held: deque[HeldNormalization] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._held)

    @property
    def full(self) -> bool:
        return sum(held.normalized is not None for held in self._held) >= MAX_PENDING_SEGMENTS

    def enqueue(self, events: Sequence[LiveEvent]) -> None:
        """Appends events, in order."""
        for event in events:
            if isinstance(event, LiveSegmentDone):
                future = _threads().submit(self._normalizer.normalize, event.segment, event.language)
                future.add_done_callback(lambda _: self._wake())
                self._held.append(HeldNormalization(event, future))
            else:
                self._held.append(HeldNormalization(event))

    def ready_events(self) -> list[LiveEvent]:
        """Returns the events that are ready, in order. Raises UnsupportedOption if the package of the grammars
        is broken."""
        events: list[LiveEvent] = []
        while self._held and ((first := self._held[0]).normalized is None or first.normalized.done()):
            self._held.popleft()
            if first.normalized is None:
                events.append(first.event)
            else:
                events.append(msgspec.structs.replace(first.event, segment=first.normalized.result()))
        return events

    def close(self) -> None:
        """Cancels what waits. May be called at any time."""
        for held in self._held:
            if held.normalized is not None:
                held.normalized.cancel()


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """Thread for all sessions: the grammars are not thread-safe."""
    return ThreadPoolExecutor(1, "asr-serve written form")
