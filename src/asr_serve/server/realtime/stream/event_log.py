"""Log of the numbered events of one session, for a client that lost its connection."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from asr_serve.errors import EventsExpired, OptionError
from asr_serve.protocols.stream.server_events import EncodedEvent, NumberedEvent

MAX_LOG_EVENTS, MAX_LOG_BYTES = 1_024, 256 << 10
"""Limits of the log: a quarter of an hour of fast speech, many times what a reconnecting client misses."""


class EventLog:
    """Events numbered from 1 without a gap; the oldest are dropped at the limits."""

    def __init__(self) -> None:
        self._events: deque[EncodedEvent] = deque()
        self._bytes = 0
        self.last_seq = 0

    def append(self, event: NumberedEvent) -> None:
        self.last_seq += 1
        encoded = replace(event, seq=self.last_seq).encode()
        self._events.append(encoded)
        self._bytes += len(encoded.json)
        while len(self._events) > MAX_LOG_EVENTS or self._bytes > MAX_LOG_BYTES:
            self._bytes -= len(self._events.popleft().json)

    def next(self, after: int) -> EncodedEvent | None:
        """Event after number `after`; None while there is none. Raises EventsExpired."""
        if after >= self.last_seq:
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
        if after > self.last_seq:
            raise OptionError(
                f"after={after}",
                f"this session has told events up to {self.last_seq}",
                "send the seq of the last event that came",
                param="after",
            )
        self.next(after)
