"""One connection of a session: what it is yet to be told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asr_serve.protocols.stream_events import Ack, Event, Told
from asr_serve.server.streams.log import EventLog

CROWD = 64
"""Events that may wait for a slow reader before nothing more is taken of it."""

Tell = Callable[[Exception], str]
"""An error to the event that tells of it."""


class Connection:
    """Numbered events come from the session's log; of partials and acks only the newest waits, behind them.
    Belongs to the event loop's thread."""

    def __init__(self, log: EventLog, after: int, tell: Tell) -> None:
        self._log, self._told_seq, self._tell = log, after, tell
        self._notices: deque[Told] = deque()
        self._partial: Told | None = None
        self._ack: Ack | None = None
        self._finished = self._stopped = False
        self._outcome: BaseException | None = None
        self._changed, self._caught_up = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        """When something came of its client, on the event loop's clock."""
        self.blocked = False
        """Nothing is read: that nothing comes is not the client's doing."""

    # --- from the session ------------------------------------------------------------------------------

    def say(self, event: Event) -> None:
        """Before anything else that waits."""
        self._say(event.told())

    def refuse(self, error: Exception) -> None:
        self._say(Told("error", None, self._tell(error).encode()))

    def _say(self, told: Told) -> None:
        self._notices.append(told)
        self._changed.set()

    def show(self, partial: Told | None) -> bool:
        """Show that partial, or none. False: it replaces one that was not told."""
        replaced, self._partial = self._partial is not None and partial is not None, partial
        self._changed.set()
        return not replaced

    def acknowledge(self, ack: Ack) -> None:
        self._ack = ack
        self._changed.set()

    def look(self) -> None:
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
    def crowded(self) -> bool:
        return self._log.last_seq - self._told_seq + len(self._notices) >= CROWD

    async def caught_up(self) -> None:
        """Wait until everything is told but partial and ack."""
        self._caught_up.clear()
        if not self._stopped and (self._notices or self._told_seq < self._log.last_seq):
            await self._caught_up.wait()

    async def wait(self, coming: Awaitable[object]) -> None:
        """While nothing is read."""
        self.blocked = True
        try:
            await coming
        finally:
            self.blocked = False
            self.heard_s = self._loop.time()

    async def told(self, quiet_s: float | None = None) -> AsyncIterator[Told | None]:
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

    def _next(self) -> Told | None:
        if self._notices:
            return self._notices.popleft()
        if (logged := self._log.next(self._told_seq)) is not None:
            self._told_seq += 1
            return logged
        self._caught_up.set()
        if self._partial is not None:
            shown, self._partial = self._partial, None
            return shown
        if self._ack is not None:
            ack, self._ack = self._ack, None
            return ack.told()
        return None
