"""Log of one session's events: numbered, bounded, read by any number of listeners from any number on."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import NamedTuple

import msgspec

from asr_serve.errors import AtCapacity, MalformedRequest

MAX_EVENTS = 2_000
MAX_BYTES = 1 << 20
MAX_LISTENERS = 64
"""Listeners of one log at once."""
MAX_DIGITS = 12
RETRY_MS = 1_000


class EventPosition(NamedTuple):
    """Place behind an event. `epoch`: of the log that numbered it; None: the log at hand."""

    epoch: str | None
    number: int


FROM_START = EventPosition(None, 0)


def parse_event_id(text: str) -> EventPosition:
    """Parses the id of an event, `EPOCH-N`, or its number alone. Raises MalformedRequest."""
    found = re.fullmatch(rf"(?:([0-9a-f]{{1,32}})-)?0{{0,8}}(\d{{1,{MAX_DIGITS}}})", text, re.ASCII)
    if found is None:
        raise MalformedRequest(f"after={text[:60]!r}", "the id of an event, its number, or 0 for all")
    return EventPosition(found[1], int(found[2]))


class LogRestarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="restarted"):
    """Answer to an id of another log: the process has restarted, and events come from the first on."""

    epoch: str


class EventsMissed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="missed"):
    """Events between two that are told: the log had no room for them any more."""

    events: int


class LoggedEvent(NamedTuple):
    """Event as it is sent. `id` is empty for what is about the log itself, and no place to go on from."""

    id: str
    number: int
    type: str
    json: bytes

    @property
    def sse(self) -> bytes:
        """Encoding as a server-sent event."""
        head = f"id: {self.id}\n" if self.id else ""
        return b"%sevent: %s\ndata: %s\n\n" % (head.encode(), self.type.encode(), self.json)

    @property
    def message(self) -> str:
        """Encoding as the message of a WebSocket: the JSON object, with its id in front."""
        text = self.json.decode()
        if not self.id:
            return text
        rest = text[1:].lstrip()
        return f'{{"id":"{self.id}"{"" if rest == "}" else ","}{rest}'


class EdgeEventLog:
    """Log whose oldest events give way. All calls come from one event loop.

    Numbers count from 1. The epoch before them is the log's own: a listener that comes with an id of another log, from
    before a restart, is told so, and gets all events.
    """

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(4)
        self._events: deque[LoggedEvent] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._listeners = 0
        self.last_number = 0
        self.ended = False

    def append(self, kind: str, json: bytes) -> LoggedEvent:
        number = self.last_number + 1
        event = LoggedEvent(f"{self.epoch}-{number}", number, kind, json)
        self.last_number = number
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
        """Number of the oldest event that is kept."""
        return self._events[0].number if self._events else self.last_number + 1

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Keeps a listener's place. Raises AtCapacity where one more may not listen."""
        if self._listeners >= MAX_LISTENERS:
            raise AtCapacity(f"{self._listeners} listen to these events", f"up to {MAX_LISTENERS} may", RETRY_MS)
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1

    async def listen(self, position: EventPosition, idle_s: float) -> AsyncGenerator[LoggedEvent | None, None]:
        """Yields the events behind a position, those to come too; None whenever none came for `idle_s`. A position of
        another log, or beyond the last event, begins with LogRestarted and all events."""
        after = position.number
        if position.epoch not in (None, self.epoch) or after > self.last_number:
            after = 0
            yield _about_log(LogRestarted(epoch=self.epoch))
        while True:
            changed = self._changed
            if (missed := self.first_number - after - 1) > 0:
                after += missed
                yield _about_log(EventsMissed(events=missed))
                continue
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


def _about_log(told: LogRestarted | EventsMissed) -> LoggedEvent:
    return LoggedEvent("", 0, str(told.__struct_config__.tag), msgspec.json.encode(told))
