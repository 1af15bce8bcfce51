"""Messages that one client has not received yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Send

from asr_serve.errors import ClientGone

OUTBOX_SEND_TIMEOUT_S = 60.0
"""Longest time for which a client may receive nothing."""
CONGESTION_EVENTS = 64
"""Pending events from which on nothing more is read from the client."""


class Outbox:
    """Outgoing messages of one socket. Every event is sent, in order; bytes as a binary message. Only the newest state
    is pending, formatted when its turn comes: a slow reader gets fewer states and delays nobody. Belongs to the event
    loop's thread."""

    def __init__(self, send: Send, send_s: float = OUTBOX_SEND_TIMEOUT_S) -> None:
        self._send, self._send_s = send, send_s
        self._events: deque[str | bytes] = deque()
        self._state: Callable[[], str | bytes] | None = None
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._emptied.set()

    def send(self, event: str | bytes) -> None:
        self._events.append(event)
        self._mark_filled()

    def send_state(self, state: Callable[[], str | bytes]) -> bool:
        """Sends a state after all pending events. False: it replaces one that was not sent."""
        replaced, self._state = self._state is not None, state
        self._mark_filled()
        return not replaced

    def send_replacing_state(self, event: str | bytes) -> None:
        """Sends an event that contains all that the pending state would show, in place of that state."""
        self._state = None
        self.send(event)

    @property
    def congested(self) -> bool:
        return len(self._events) >= CONGESTION_EVENTS

    async def wait_empty(self) -> None:
        """Waits until all is sent."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Sends forever. Raises ClientGone when the client receives nothing in time."""
        while True:
            event: str | bytes
            if self._events:
                event = self._events.popleft()
            elif self._state is not None:
                state, self._state = self._state, None
                event = state()
            else:
                self._emptied.set()
                await self._filled.wait()
                self._filled.clear()
                continue
            try:
                async with asyncio.timeout(self._send_s):
                    kind = "text" if isinstance(event, str) else "bytes"
                    await self._send({"type": "websocket.send", kind: event})
            except TimeoutError:
                raise ClientGone(f"the client took nothing for {self._send_s:g} s") from None

    def _mark_filled(self) -> None:
        self._emptied.clear()
        self._filled.set()
