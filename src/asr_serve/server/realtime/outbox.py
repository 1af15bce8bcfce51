"""What one client is to be told and has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Send

from asr_serve.errors import ClientGone

OUTBOX_SEND_TIMEOUT_S = 60.0
"""How long a client may take nothing."""
CONGESTION_EVENTS = 64
"""Events that may wait before no more is read of a client."""


class Outbox:
    """Events go out in order, every one; bytes among them are sound. Of the state only the newest waits, made into
    text when its turn comes: a slow reader gets fewer of them, and holds up nobody. Belongs to the event loop's
    thread."""

    def __init__(self, send: Send, send_s: float = OUTBOX_SEND_TIMEOUT_S) -> None:
        self._send, self._send_s = send, send_s
        self._events: deque[str | bytes] = deque()
        self._state: Callable[[], str] | None = None
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._emptied.set()

    def send(self, event: str | bytes) -> None:
        self._events.append(event)
        self._wait_message()

    def send_state(self, state: Callable[[], str]) -> bool:
        """Send this state, once events that were said before are out. False: it replaces one that nobody saw."""
        replaced, self._state = self._state is not None, state
        self._wait_message()
        return not replaced

    def send_replacing_state(self, event: str) -> None:
        """An event that holds all that the waiting state would show."""
        self._state = None
        self.send(event)

    @property
    def congested(self) -> bool:
        return len(self._events) >= CONGESTION_EVENTS

    async def wait_empty(self) -> None:
        """Wait until all is sent."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Send, for ever. Raises ClientGone when the client takes nothing."""
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

    def _wait_message(self) -> None:
        self._emptied.clear()
        self._filled.set()
