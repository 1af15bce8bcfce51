"""How long the conversation of one socket goes on, and how it ends, whatever its words.

It goes on until the client leaves. What cannot go on ends it: an error that is raised here is told, and the socket
closed, by whoever runs it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, MutableMapping
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from asr_serve.errors import AsrServeError, AudioTooLong, Draining, IdleTimeout
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.units import samples_to_s

DRAIN_RETRY_MS = 5_000


class SessionLimits(msgspec.Struct, frozen=True):
    idle_s: float
    """How long nothing may come."""
    session_s: float
    """Longest session, in seconds of audio and of time."""
    frame_bytes: int


class Conversation(Protocol):
    """What a protocol makes of it."""

    @property
    def active(self) -> bool:
        """Somebody is heard. Once that is out and given back, call `Life.rest`."""

    @property
    def started_s(self) -> float | None:
        """When began what may become too long, on the event loop's clock; None: there is no such thing."""

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        """What the client sent. Raises what ends the conversation."""

    def send_error(self, error: AsrServeError) -> None:
        """Tell the client."""

    def finish(self) -> None:
        """No more audio will come for what is heard. Raises what ends the conversation."""

    def on_disconnect(self, code: int | None) -> None:
        """The client has; it closed with that code, 1005 for nothing."""

    def fail(self, error: AsrServeError) -> None:
        """The conversation ends with that: say what will not come."""

    async def close(self) -> None:
        """At any time, idempotent: give everything back."""


class ConnectionLifecycle:
    """Belongs to the event loop's thread."""

    def __init__(self, receive: Receive, outbox: Outbox, limits: SessionLimits, dialogue: Conversation) -> None:
        self._receive, self._outbox, self._limits, self._conversation = receive, outbox, limits, dialogue
        self._loop = asyncio.get_running_loop()
        self._last_activity_s = self._loop.time()
        self._blocked = False
        self.finishing = False
        """No more audio is taken for what is heard."""
        self.end_reason: BaseException | None = None
        """Why the conversation ends, once the text of what was heard is out."""
        self._outcome: BaseException | None = None
        self._drain_error: Draining | None = None
        self._over = False
        self._main: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> Draining | None:
        """Until the end: None when the client has left, Draining when it was told so. Raises what else ends it,
        when all that was said before is sent: AtCapacity, IdleTimeout, ClientGone, StepFailed, ..."""
        self._main = asyncio.current_task()
        writer = self._start(self._outbox.run())
        self._check_timeouts()
        if self.end_reason is not None:
            self.end(self.end_reason)  # told to drain before it began
        try:
            outcome = await self._until_over()
            if isinstance(outcome, AsrServeError):
                self._conversation.fail(outcome)
            if outcome is not None:
                await self._flush(writer)
        finally:
            try:
                await cancel_and_wait(*self._tasks)
            finally:  # also when we are cancelled once more
                await self._conversation.close()
        if outcome is not None and outcome is not self._drain_error:
            raise outcome
        return self._drain_error if outcome is not None else None

    def drain(self) -> None:
        """The server goes down: say so, finish the text, and end."""
        if self.end_reason is None:
            self._drain_error = Draining("the server is going down", "it ends every session", DRAIN_RETRY_MS)
            self._conversation.send_error(self._drain_error)
            self.end(self._drain_error)

    # --- what is heard --------------------------------------------------------------------------------

    def start_session(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Somebody is heard from now on, by `work`: what it raises ends the conversation."""
        self.finishing = False
        task = self._start(work)
        self._check_timeouts()
        if self.end_reason is not None:  # since what was heard before was given up
            self.end(self.end_reason)
        return task

    def check_audio_limit(self, samples: int) -> None:
        """So much has come: more than is allowed ends the conversation."""
        if samples_to_s(samples) > self._limits.session_s:
            self.end(self._too_long())

    async def pause_reading(self, coming: Awaitable[object]) -> None:
        """While nothing is read: that nothing comes is not the client's doing."""
        self._blocked = True
        try:
            await coming
        finally:
            self._blocked = False
            self._last_activity_s = self._loop.time()

    def reset_idle(self) -> None:
        """What is done for the client counts as if something had come of it."""
        self._last_activity_s = self._loop.time()

    def finish(self) -> None:
        """No more audio for what is heard."""
        if self.finishing:
            return
        self.finishing = self._conversation.active
        try:
            self._conversation.finish()
        except AsrServeError as error:  # a timer, or whoever drains us, could do nothing with it
            self._stop(error)

    def session_done(self) -> None:
        """What was heard is out, and nobody is heard."""
        self.finishing = False
        self._last_activity_s = self._loop.time()
        if self.end_reason is not None:
            self.end(self.end_reason)

    def end(self, why: BaseException) -> None:
        """When the text of what was heard is out."""
        if self.end_reason is None:
            self.end_reason = why
        self.finish()
        if not self._conversation.active:
            self._stop(self.end_reason)

    # --- how it goes on -------------------------------------------------------------------------------

    async def _until_over(self) -> BaseException | None:
        """Why it ends; None when the client has left."""
        assert self._main is not None
        try:
            await self._read()
            return None
        except asyncio.CancelledError:
            if self._outcome is None:
                raise
            self._main.uncancel()
            return self._outcome
        except AsrServeError as error:
            return error
        finally:
            self._over = True
            assert self._timer is not None, "it was set before anything was read"
            self._timer.cancel()

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            self._last_activity_s = self._loop.time()
            await self._conversation.on_message(message)
            if self._outbox.congested:
                await self.pause_reading(self._outbox.wait_empty())
        self._conversation.on_disconnect(message.get("code"))

    async def _flush(self, writer: asyncio.Task[None]) -> None:
        emptied = self._loop.create_task(self._outbox.wait_empty())
        try:
            await asyncio.wait({writer, emptied}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(emptied)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_over)
        return task

    def _task_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._stop(failure)

    def _stop(self, outcome: BaseException) -> None:
        """Now: nothing more is read."""
        if not self._over and self._outcome is None and self._main is not None:
            self._outcome = outcome
            self._main.cancel()

    def _check_timeouts(self) -> None:
        """Look whether the client is still there and the session not too long; and when to look again."""
        if self._timer is not None:
            self._timer.cancel()
        now_s, began_s = self._loop.time(), self._conversation.started_s
        if self.finishing or self._blocked:
            self._last_activity_s = now_s  # it waits for us
        idle_s = self._last_activity_s + self._limits.idle_s
        late_s = math.inf if began_s is None else began_s + self._limits.session_s
        if now_s >= idle_s:
            self.end(IdleTimeout(f"nothing came for {self._limits.idle_s:g} s", "a silent microphone sends, too"))
        elif now_s >= late_s:
            self.end(self._too_long())
        due_s = idle_s if self.end_reason is not None else min(idle_s, late_s)
        self._timer = self._loop.call_at(max(due_s, now_s + 1e-3), self._check_timeouts)

    def _too_long(self) -> AudioTooLong:
        return AudioTooLong(
            "the session has become too long",
            f"up to {self._limits.session_s:g} s, of audio and of time",
            "connect again for another",
        )


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancel them, and wait until they are over."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
