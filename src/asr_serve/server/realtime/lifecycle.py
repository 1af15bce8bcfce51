"""Lifecycle of one socket's conversation, in any protocol: time limits, draining, the end.

A conversation lasts until the client leaves or an error ends it. An error that `run` raises is reported, and the
socket closed, by its caller.
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


class _Completed(BaseException):
    """Outcome of a conversation that has said all there is to say."""


class SessionLimits(msgspec.Struct, frozen=True):
    idle_s: float
    """Longest time without a message."""
    session_s: float
    """Longest session, in seconds of audio and of time."""
    frame_bytes: int


class Conversation(Protocol):
    """Protocol-specific part of a connection."""

    @property
    def active(self) -> bool:
        """Returns whether a session is running. Call `ConnectionLifecycle.session_done` once it is sent and
        released."""

    @property
    def started_s(self) -> float | None:
        """Time from which the session limit counts, on the event loop's clock; None: no limit."""

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        """Handles a message of the client. Raises what ends the conversation."""

    def send_error(self, error: AsrServeError) -> None:
        """Sends the error to the client."""

    def finish(self) -> None:
        """Ends the input of the running session. Raises what ends the conversation."""

    def on_disconnect(self, code: int | None) -> None:
        """Records that the client closed, with that code; 1005 when it sent none."""

    def fail(self, error: AsrServeError) -> None:
        """Reports results that will not come, for the conversation ends with `error`."""

    async def close(self) -> None:
        """Releases everything; at any time, idempotent."""


class ConnectionLifecycle:
    """Reads one connection, and ends it by limits, errors and draining. Belongs to the event loop's thread."""

    def __init__(self, receive: Receive, outbox: Outbox, limits: SessionLimits, conversation: Conversation) -> None:
        self._receive, self._outbox, self._limits, self._conversation = receive, outbox, limits, conversation
        self._loop = asyncio.get_running_loop()
        self._last_activity_s = self._loop.time()
        self._blocked = False
        self._session_task: asyncio.Task[None] | None = None
        self.finishing = False
        """Whether the running session takes no more input."""
        self.completed = False
        """Whether the protocol, and not the client, ended the conversation."""
        self.end_reason: BaseException | None = None
        """Reason for ending the conversation once the running session is done."""
        self._outcome: BaseException | None = None
        self._drain_error: Draining | None = None
        self._over = False
        self._main: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> Draining | None:
        """Runs until the end. Returns None when the client has left or all was said, Draining when the server drains.
        Raises what else ends it, once all earlier events are sent: AtCapacity, IdleTimeout, ClientGone and others."""
        self._main = asyncio.current_task()
        writer = self._start(self._outbox.run())
        self._check_timeouts()
        if self.end_reason is not None:
            self.end(self.end_reason)  # drained before it began
        try:
            outcome = await self._until_over()
            if isinstance(outcome, AsrServeError):
                self._conversation.fail(outcome)
            if outcome is not None:
                await self._flush(writer)
        finally:
            try:
                await cancel_and_wait(*self._tasks)
            finally:  # also when cancelled once more
                await self._conversation.close()
        if isinstance(outcome, _Completed):
            return None
        if outcome is not None and outcome is not self._drain_error:
            raise outcome
        return self._drain_error if outcome is not None else None

    def drain(self) -> None:
        """Ends the conversation because the server goes down: sends the error, then the remaining results."""
        if self.end_reason is None:
            self._drain_error = Draining("the server is going down", "it ends every session", DRAIN_RETRY_MS)
            self._conversation.send_error(self._drain_error)
            self.end(self._drain_error)

    # --- sessions -------------------------------------------------------------------------------------

    def start_session(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a session as a task of `work`; an error of the task ends the conversation."""
        self.finishing = False
        task = self._session_task = self._start(work)
        self._check_timeouts()
        if self.end_reason is not None:  # set since the session before was cancelled
            self.end(self.end_reason)
        return task

    async def wait_finished(self) -> None:
        """Waits, with reading paused, for the end of a session that is finishing."""
        if self.finishing and self._session_task is not None:
            await self.pause_reading(asyncio.wait({self._session_task}))

    def check_audio_limit(self, samples: int) -> None:
        """Ends the conversation when `samples` are longer than the session limit."""
        if samples_to_s(samples) > self._limits.session_s:
            self.end(self._too_long())

    async def pause_reading(self, awaitable: Awaitable[object]) -> None:
        """Awaits `awaitable` with reading paused; the time does not count as idle."""
        self._blocked = True
        try:
            await awaitable
        finally:
            self._blocked = False
            self._last_activity_s = self._loop.time()

    def reset_idle(self) -> None:
        """Restarts the idle time, as a message from the client does."""
        self._last_activity_s = self._loop.time()

    def finish(self) -> None:
        """Ends the input of the running session; an error of that ends the conversation."""
        if self.finishing:
            return
        self.finishing = self._conversation.active
        try:
            self._conversation.finish()
        except AsrServeError as error:  # timers and `drain` cannot handle it
            self._stop(error)

    def session_done(self) -> None:
        """Marks the running session as done: sent and released."""
        self.finishing = False
        self._last_activity_s = self._loop.time()
        if self.end_reason is not None:
            self.end(self.end_reason)

    def end(self, reason: BaseException) -> None:
        """Ends the conversation once the running session is done."""
        if self.end_reason is None:
            self.end_reason = reason
        self.finish()
        if not self._conversation.active:
            self._stop(self.end_reason)

    def complete(self) -> None:
        """Ends the conversation at once, and well: what has been sent reaches the client before the end."""
        self.completed = True
        if asyncio.current_task() is self._main:  # it reads no more
            self._outcome = self._outcome or _Completed()
        else:
            self._stop(_Completed())

    # --- reading and time limits ----------------------------------------------------------------------

    async def _until_over(self) -> BaseException | None:
        """Reads until the end and returns its cause; None when the client has left."""
        assert self._main is not None
        try:
            await self._read()
            return self._outcome
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
            if self._outcome is not None:
                return
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
        """Ends the conversation at once: nothing more is read."""
        if not self._over and self._outcome is None and self._main is not None:
            self._outcome = outcome
            self._main.cancel()

    def _check_timeouts(self) -> None:
        """Checks idle time and session length, and schedules the next check."""
        if self._timer is not None:
            self._timer.cancel()
        now_s, started_s = self._loop.time(), self._conversation.started_s
        if self.finishing or self._blocked:
            self._last_activity_s = now_s  # the client waits for the server
        idle_due_s = self._last_activity_s + self._limits.idle_s
        session_due_s = math.inf if started_s is None else started_s + self._limits.session_s
        if now_s >= idle_due_s:
            self.end(IdleTimeout(f"nothing came for {self._limits.idle_s:g} s", "a silent microphone sends, too"))
        elif now_s >= session_due_s:
            self.end(self._too_long())
        due_s = idle_due_s if self.end_reason is not None else min(idle_due_s, session_due_s)
        self._timer = self._loop.call_at(max(due_s, now_s + 1e-3), self._check_timeouts)

    def _too_long(self) -> AudioTooLong:
        return AudioTooLong(
            "the session has become too long",
            f"up to {self._limits.session_s:g} s, of audio and of time",
            "connect again for another",
        )


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits until they are done."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
