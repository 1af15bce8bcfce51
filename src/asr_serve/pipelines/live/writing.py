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

from asr_serve.pipelines.live.caller import Event, SegmentDone
from asr_serve.pipelines.utterance import Finishing
from asr_serve.types import Segment

MOST_HELD = 16
"""Segments of a caller that wait to be written before no more is heard."""


class Held(NamedTuple):
    event: Event
    written: Future[Segment] | None = None


class Writing:
    """One caller."""

    def __init__(self, language: str, wake: Callable[[], None]) -> None:
        """`language`: what is spoken; empty: it is yet to be heard. Raises UnsupportedOption where nothing can be
        written so."""
        self._finishing, self._wake = Finishing(language, itn=True), wake
        self._held: deque[Held] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._held)

    @property
    def full(self) -> bool:
        return sum(each.written is not None for each in self._held) >= MOST_HELD

    def hold(self, events: Sequence[Event]) -> None:
        """These are to be told, in this order, behind what is held."""
        for event in events:
            if isinstance(event, SegmentDone):
                written = _threads().submit(self._finishing.of, event.segment, event.language)
                written.add_done_callback(lambda _: self._wake())
                self._held.append(Held(event, written))
            else:
                self._held.append(Held(event))

    def take(self) -> list[Event]:
        """What can be told by now. Raises UnsupportedOption where the package of the grammars is broken."""
        events: list[Event] = []
        while self._held and ((first := self._held[0]).written is None or first.written.done()):
            self._held.popleft()
            if first.written is None:
                events.append(first.event)
            else:
                events.append(msgspec.structs.replace(first.event, segment=first.written.result()))
        return events

    def close(self) -> None:
        """At any time: nobody wants to be told."""
        for each in self._held:
            if each.written is not None:
                each.written.cancel()


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    """One for all callers: the grammars are one thread's at a time."""
    return ThreadPoolExecutor(1, "asr-serve written form")
