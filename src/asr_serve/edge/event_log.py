"""Log of one session's events: numbered, bounded, read by any number of listeners from any number on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

MAX_EVENTS = 2_000
MAX_BYTES = 1 << 20


class LoggedEvent(NamedTuple):
    """Event as it is sent. `number` counts from 1."""

    number: int
    type: str
    json: bytes

    @property
    def sse(self) -> bytes:
        """Encoding as a server-sent event."""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.number, self.type.encode(), self.json)


class EdgeEventLog:
    """Log whose oldest events give way. All calls come from one event loop."""

    def __init__(self) -> None:
        self._events: deque[LoggedEvent] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.last_number = 0
        self.ended = False

    def append(self, kind: str, json: bytes) -> LoggedEvent:
        event = LoggedEvent(self.last_number + 1, kind, json)
        self.last_number += 1
        self._events.append(event)
        self._bytes += len(json)
        while len(self._events) > MAX_EVENTS or (self._bytes > MAX_BYTES and len(self._events) > 1):
            self._bytes -= len(self._events.popleft().json)
        self._wake()
        return event

    def close(self) -> None:
        """Ends every listener once it has read all events."""
        self.ended = True
        self._wake()

    @property
    def first_number(self) -> int:
        return self._events[0].number if self._events else self.last_number + 1

    async def listen(self, after: int, idle_s: float) -> AsyncIterator[LoggedEvent | None]:
        """Yields the events behind `after`, those to come too; None whenever none came for `idle_s`. An `after` beyond
        the last event is of another log, from before a restart: every event is new to its listener."""
        if after > self.last_number:
            after = 0
        while True:
            changed = self._changed
            pending = [event for event in self._events if event.number > after]
            for event in pending:
                yield event
                after = event.number
            if pending:
                continue
            if self.ended:
                return
            try:
                async with asyncio.timeout(idle_s):
                    await changed.wait()
            except TimeoutError:
                yield None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
