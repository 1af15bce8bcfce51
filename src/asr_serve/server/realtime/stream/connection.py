"""Connection of a session, with the events that it has not been sent yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asr_serve.protocols.stream.server_events import AckEvent, EncodedEvent, StreamEvent
from asr_serve.server.realtime.stream.event_log import EventLog

CONGESTION_EVENTS = 64
"""Pending events of a slow reader from which on nothing more is read from it."""

FormatStreamError = Callable[[Exception], str]
"""Formats an error as an event."""


class StreamConnection:
    """Events of one connection: numbered ones from the session's log, then the newest partial and the newest ack.
    Belongs to the event loop's thread."""

    def __init__(self, log: EventLog, after: int, format_error: FormatStreamError) -> None:
        self._log, self._sent_seq, self._format_error = log, after, format_error
        self._notices: deque[EncodedEvent] = deque()
        self._partial: EncodedEvent | None = None
        self._ack: AckEvent | None = None
        self._finished = self._stopped = False
        self._outcome: BaseException | None = None
        self._changed, self._caught_up = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.last_received_s = self._loop.time()
        """Time of the client's last message, on the event loop's clock."""
        self.blocked = False
        """Whether reading is paused, so that silence is not the client's doing."""

    # --- from the session ------------------------------------------------------------------------------

    def send(self, event: StreamEvent) -> None:
        """Sends an event before the pending ones of log, partial and ack."""
        self._say(event.encode())

    def send_error(self, error: Exception) -> None:
        self._say(EncodedEvent("error", None, self._format_error(error).encode()))

    def _say(self, event: EncodedEvent) -> None:
        self._notices.append(event)
        self._changed.set()

    def show_partial(self, partial: EncodedEvent | None) -> bool:
        """Shows that partial, or none. False: it replaces one that was not sent."""
        replaced, self._partial = self._partial is not None and partial is not None, partial
        self._changed.set()
        return not replaced

    def acknowledge(self, ack: AckEvent) -> None:
        self._ack = ack
        self._changed.set()

    def notify(self) -> None:
        """Announces new events in the log."""
        self._changed.set()

    def finish(self, failure: BaseException | None = None) -> None:
        """Ends `events` once all is sent; `events` then raises the failure."""
        self._finished, self._outcome = True, self._outcome or failure
        self._changed.set()

    def stop(self, reason: BaseException | None = None) -> None:
        """Ends `events` at once; `events` then raises `reason`."""
        if not self._stopped:
            self._stopped, self._outcome = True, reason
            self._changed.set()
            self._caught_up.set()

    def stop_if_failed(self, reader: asyncio.Task[Any]) -> None:
        """Done callback of the task that reads from the client: stops if it failed."""
        if not reader.cancelled() and (failure := reader.exception()) is not None:
            self.stop(failure)

    # --- to the client ---------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def congested(self) -> bool:
        return self._log.last_seq - self._sent_seq + len(self._notices) >= CONGESTION_EVENTS

    async def wait_caught_up(self) -> None:
        """Waits until everything but partial and ack is sent."""
        self._caught_up.clear()
        if not self._stopped and (self._notices or self._sent_seq < self._log.last_seq):
            await self._caught_up.wait()

    async def pause_reading(self, awaitable: Awaitable[object]) -> None:
        """Awaits `awaitable` with reading paused."""
        self.blocked = True
        try:
            await awaitable
        finally:
            self.blocked = False
            self.last_received_s = self._loop.time()

    async def events(self, quiet_s: float | None = None) -> AsyncIterator[EncodedEvent | None]:
        """Yields all events in order, as they come; None after `quiet_s` without one. Raises EventsExpired if the
        log has dropped events that a slow reader lacks, and the errors of `stop` and `finish`."""
        while not self._stopped:
            event = self._next()
            if event is not None:
                yield event
            elif self._finished and self._sent_seq >= self._log.last_seq:
                break
            else:
                self._changed.clear()
                try:
                    async with asyncio.timeout(quiet_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield None
        if self._outcome is not None:
            raise self._outcome

    def _next(self) -> EncodedEvent | None:
        if self._notices:
            return self._notices.popleft()
        if (event := self._log.next(self._sent_seq)) is not None:
            self._sent_seq += 1
            if event.type == "end":
                self._ack = None  # nothing follows the end
            return event
        held = self._sent_seq < self._log.last_seq
        if not held:
            self._caught_up.set()
        if self._partial is not None and not held:  # it is the text after those events
            partial, self._partial = self._partial, None
            return partial
        if self._ack is not None:
            ack, self._ack = self._ack, None
            return ack.encode()
        return None
