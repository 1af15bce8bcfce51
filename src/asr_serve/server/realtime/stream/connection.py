"""One connection of a session: what it is yet to be told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asr_serve.protocols.stream.server_events import AckEvent, EncodedEvent, StreamEvent
from asr_serve.server.realtime.stream.event_log import EventLog

CONGESTION_EVENTS = 64
"""Events that may wait for a slow reader before nothing more is taken of it."""

FormatStreamError = Callable[[Exception], str]
"""An error to the event that tells of it."""


class StreamConnection:
    """Numbered events come from the session's log; of partials and acks only the newest waits, behind them.
    Belongs to the event loop's thread."""

    def __init__(self, log: EventLog, after: int, tell: FormatStreamError) -> None:
        self._log, self._sent_seq, self._format_error = log, after, tell
        self._notices: deque[EncodedEvent] = deque()
        self._partial: EncodedEvent | None = None
        self._ack: AckEvent | None = None
        self._finished = self._stopped = False
        self._outcome: BaseException | None = None
        self._changed, self._caught_up = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.last_received_s = self._loop.time()
        """When something came of its client, on the event loop's clock."""
        self.blocked = False
        """Nothing is read: that nothing comes is not the client's doing."""

    # --- from the session ------------------------------------------------------------------------------

    def send(self, event: StreamEvent) -> None:
        """Before anything else that waits."""
        self._say(event.encode())

    def send_error(self, error: Exception) -> None:
        self._say(EncodedEvent("error", None, self._format_error(error).encode()))

    def _say(self, told: EncodedEvent) -> None:
        self._notices.append(told)
        self._changed.set()

    def show_partial(self, partial: EncodedEvent | None) -> bool:
        """Show that partial, or none. False: it replaces one that was not told."""
        replaced, self._partial = self._partial is not None and partial is not None, partial
        self._changed.set()
        return not replaced

    def acknowledge(self, ack: AckEvent) -> None:
        self._ack = ack
        self._changed.set()

    def notify(self) -> None:
        """There is something new in the log."""
        self._changed.set()

    def finish(self, failure: BaseException | None = None) -> None:
        """Nothing will follow; `told` raises the failure."""
        self._finished, self._outcome = True, self._outcome or failure
        self._changed.set()

    def stop(self, why: BaseException | None = None) -> None:
        """Tell no more, from now on; `told` raises `why`."""
        if not self._stopped:
            self._stopped, self._outcome = True, why
            self._changed.set()
            self._caught_up.set()

    def stop_if_failed(self, reader: asyncio.Task[Any]) -> None:
        """For the task that reads of the client, when it is done."""
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
        """Wait until everything is told but partial and ack."""
        self._caught_up.clear()
        if not self._stopped and (self._notices or self._sent_seq < self._log.last_seq):
            await self._caught_up.wait()

    async def pause_reading(self, coming: Awaitable[object]) -> None:
        """While nothing is read."""
        self.blocked = True
        try:
            await coming
        finally:
            self.blocked = False
            self.last_received_s = self._loop.time()

    async def events(self, quiet_s: float | None = None) -> AsyncIterator[EncodedEvent | None]:
        """Everything, in order, as it comes; None when nothing has for `quiet_s`. Raises EventsExpired where the
        log has run away from a slow reader, and what `stop` and `finish` were given."""
        while not self._stopped:
            found = self._next()
            if found is not None:
                yield found
            elif self._finished:
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
        if (logged := self._log.next(self._sent_seq)) is not None:
            self._sent_seq += 1
            return logged
        self._caught_up.set()
        if self._partial is not None:
            shown, self._partial = self._partial, None
            return shown
        if self._ack is not None:
            ack, self._ack = self._ack, None
            return ack.encode()
        return None
