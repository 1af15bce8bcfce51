"""Conversation of one socket in FunASR's runtime protocol: sessions in modes offline, online and 2pass.

    idle --audio, by the options of the last message--> listening --{"is_speaking": false}--> finishing --> idle

An invalid message is answered with an error and changes nothing in a session. Audio behind options that are refused is
dropped, until others come: it would be recognized as the client did not ask, or a file as samples. Only hotwords are
left out where the model refuses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from asr_serve.errors import AsrServeError, AudioTooLarge, MalformedRequest, OptionError, OutOfTurn
from asr_serve.protocols.funasr.runtime import RuntimeAnswers, RuntimeMessage, RuntimeOptions, parse_runtime_message
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox


class RuntimeSession(Protocol):
    """Session from its options until its text is sent."""

    @property
    def received_samples(self) -> int: ...
    @property
    def slice_bytes(self) -> int:
        """Bytes of a large frame that are written before `full` is checked again."""

    @property
    def full(self) -> bool:
        """Returns whether to write no more before `wait_writable` has returned."""

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes of the audio, cut anywhere."""

    async def wait_writable(self) -> None:
        """Waits for a change, after which `full` may be false."""

    def finish(self) -> None:
        """Ends the audio."""

    async def complete(self) -> None:
        """Runs until the text is final. Raises what ends the conversation."""

    def last_answer(self, *, is_end: bool) -> str:
        """Returns the last answer, once complete. `is_end`: whether the client waits for `is_end`."""

    async def close(self) -> None:
        """Releases everything; at any time, idempotent."""


class RuntimeSessionFactory(Protocol):
    """Factory of sessions."""

    def validate(self, options: RuntimeOptions) -> None:
        """Raises OptionError for options that the model does not support, and as `start` does."""

    def start(self, options: RuntimeOptions, outbox: Outbox) -> RuntimeSession:
        """Starts a session. Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class FunAsrRuntimeConversation:
    """Sessions over one WebSocket, one at a time. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        factory: RuntimeSessionFactory,
        limits: SessionLimits,
        format_error: Callable[[Exception], str],
    ) -> None:
        """`format_error`: error to answer."""
        self._outbox, self._factory, self._limits, self._format_error = outbox, factory, limits, format_error
        self._loop = asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._session: RuntimeSession | None = None
        self._options = RuntimeOptions()
        """Options requested last."""
        self._options_refused = False
        """Whether others came after them, and were refused."""
        self._began_s = 0.0
        self._awaits_end = False
        """Whether the client waits for `is_end`."""
        self._closed_samples = 0
        """Samples of all closed sessions."""
        self.disconnected_in_session = False
        """Whether the client left before all its text was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""

    @property
    def received_samples(self) -> int:
        return self._closed_samples + (0 if self._session is None else self._session.received_samples)

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._session is not None

    @property
    def started_s(self) -> float | None:
        return None if self._session is None or self._lifecycle.finishing else self._began_s

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        try:
            if (frame := message.get("bytes")) is not None:
                await self._on_audio(frame)
            else:
                await self._on_text(message.get("text") or "")
        except (MalformedRequest, OptionError, AudioTooLarge) as error:
            self.send_error(error)

    def send_error(self, error: AsrServeError) -> None:
        self._outbox.send(self._format_error(error))

    def finish(self) -> None:
        if self._session is not None:
            self._session.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Answers a client that knows no other error than this one."""
        self.send_error(error)

    async def close(self) -> None:
        if (session := self._session) is not None:
            await session.close()
            self._closed_samples += session.received_samples
            self._session = None

    # --- messages -------------------------------------------------------------------------------------

    async def _on_text(self, text: str) -> None:
        try:
            message = parse_runtime_message(text, self._options)
            if message.is_speaking is False:
                self._end(message)
                return
            await self._lifecycle.wait_finished()
            options = self._without_refused_hotwords(message.options)
        except OptionError:
            await self._lifecycle.wait_finished()
            self._options_refused = self._session is None
            raise
        if self._session is not None and options != self._options:
            raise OutOfTurn(
                "other options came after audio",
                "a session goes on as it began",
                'send {"is_speaking": false}, and then them',
            )
        self._options, self._options_refused = options, False

    def _without_refused_hotwords(self, options: RuntimeOptions) -> RuntimeOptions:
        """Options that the model supports: FunASR's page sends Chinese hotwords unless its user takes them out, which
        is no reason to hear nothing. Raises OptionError for what else is not supported."""
        try:
            self._factory.validate(options)
        except OptionError as error:
            if error.param != "hotwords":
                raise
            self.send_error(error)
            return msgspec.structs.replace(options, hotwords=())
        return options

    async def _on_audio(self, frame: bytes) -> None:
        await self._lifecycle.wait_finished()
        if self._lifecycle.end_reason is not None or self._options_refused or not frame:
            return
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 60 ms",
            )
        session = self._session or self._start()
        rest = memoryview(frame)
        while rest and not self._lifecycle.finishing:
            if session.full:
                await self._lifecycle.pause_reading(session.wait_writable())
            else:
                session.write(rest[: session.slice_bytes])
                rest = rest[session.slice_bytes :]
        self._lifecycle.check_audio_limit(session.received_samples)

    def _end(self, message: RuntimeMessage) -> None:
        self._awaits_end = message.is_end
        if self._session is None:  # nothing was sent: nothing was said
            self._options = self._without_refused_hotwords(message.options)
            self._outbox.send(RuntimeAnswers(message.options).end(is_end=message.is_end))
        else:
            self._lifecycle.finish()

    # --- sessions -------------------------------------------------------------------------------------

    def _start(self) -> RuntimeSession:
        """Starts a session with the options requested last, which stand for the recordings that follow."""
        session = self._session = self._factory.start(self._options, self._outbox)
        self._awaits_end = False
        self._began_s = self._loop.time()
        self._lifecycle.start_session(self._run_session(session))
        return session

    async def _run_session(self, session: RuntimeSession) -> None:
        await session.complete()
        await self.close()
        self._outbox.send(session.last_answer(is_end=self._awaits_end))
        self._lifecycle.session_done()
