"""Log of the numbered events of one session, for a client that lost its connection."""

from __future__ import annotations

from collections import deque
from itertools import islice

from msgspec.structs import replace

from asr_serve.errors import EventsExpired, OptionError
from asr_serve.protocols.stream.server_events import EncodedEvent, NumberedEvent

MAX_LOG_EVENTS, MAX_LOG_BYTES = 1_024, 256 << 10
"""Limits of the log: a quarter of an hour of fast speech, many times what a reconnecting client misses."""


class EventLog:
    """Events numbered from 1 without a gap; the oldest are dropped at the limits."""

    def __init__(self, *, holds: bool = False) -> None:
        """`holds`: events are not sent before `release`."""
        self._events: deque[EncodedEvent] = deque()
        self._bytes = 0
        self._holds = holds
        self.last_seq = 0
        self.released_seq = 0
        """Number of the last event that may be sent."""

    def append(self, event: NumberedEvent) -> None:
        self.append_encoded(replace(event, seq=self.last_seq + 1).encode())

    def release(self, seq: int) -> None:
        """Events up to that number may be sent."""
        self.released_seq = max(self.released_seq, min(seq, self.last_seq))

    def after(self, seq: int) -> list[EncodedEvent]:
        """Events after that number that are in the log, released or not."""
        first = self.last_seq - len(self._events) + 1
        return list(islice(self._events, max(0, seq + 1 - first), None))

    def append_encoded(self, encoded: EncodedEvent) -> None:
        """Appends an event that has its number, the next one; the first may have any."""
        assert encoded.seq is not None
        assert encoded.seq == self.last_seq + 1 or not self._events
        self.last_seq = encoded.seq
        if not self._holds:
            self.released_seq = self.last_seq
        self._events.append(encoded)
        self._bytes += len(encoded.json)
        while len(self._events) > MAX_LOG_EVENTS or self._bytes > MAX_LOG_BYTES:
            self._bytes -= len(self._events.popleft().json)

    def next(self, after: int) -> EncodedEvent | None:
        """Event after number `after`; None while there is none. Raises EventsExpired."""
        if after >= self.released_seq:
            return None
        first = self.last_seq - len(self._events) + 1
        if after + 1 < first:
            raise EventsExpired(
                f"the events behind {after} were asked for",
                f"those from {first} to {self.last_seq} are still here",
                "text is lost: begin a new session",
            )
        return self._events[after + 1 - first]

    def check_available(self, after: int) -> None:
        """Raises EventsExpired if events after `after` were dropped; OptionError if `after` is yet to come."""
        if after > self.released_seq:
            raise OptionError(
                f"after={after}",
                f"this session has told events up to {self.released_seq}",
                "send the seq of the last event that came",
                param="after",
            )
        self.next(after)
