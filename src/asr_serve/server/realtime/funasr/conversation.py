"""Conversation of one socket in FunASR's protocol: which command is valid in which state.

    idle --START--> listening --STOP--> finishing --(all text is sent)--> idle

An invalid message is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, Protocol

import msgspec
from starlette.types import Receive

from asr_serve import units
from asr_serve.audio.pcm import SAMPLE_BYTES, Pcm16Assembler
from asr_serve.errors import AsrServeError, AudioTooLarge, MalformedRequest, OptionError, OutOfTurn
from asr_serve.protocols.funasr import websocket
from asr_serve.protocols.funasr.runtime import is_runtime_message
from asr_serve.protocols.funasr.websocket import (
    FlagCommand,
    FunAsrOptions,
    HotwordsCommand,
    LanguageCommand,
    StartCommand,
    StopCommand,
)
from asr_serve.protocols.sherpa_onnx.messages import SAMPLE_BYTES as FLOAT_BYTES
from asr_serve.protocols.sherpa_onnx.messages import guess_protocol
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits, cancel_and_wait
from asr_serve.server.realtime.outbox import Outbox

OtherProtocol = Literal["runtime", "sherpa_online", "sherpa_offline"]
MAX_SILENCE_BYTES = 1 << 22
"""Zeros before anything else that the conversation goes on with: a minute of floating point samples. Earlier ones are
dropped."""
SLICE_BYTES = units.RATE_HZ * SAMPLE_BYTES
"""Bytes of a large frame that are written before `full` is checked again."""


class FunAsrSession(Protocol):
    """Session from START until its text is sent."""

    @property
    def language(self) -> str: ...
    @property
    def received_samples(self) -> int: ...
    @property
    def full(self) -> bool:
        """Returns whether to write no more before `wait_writable` has returned."""

    def write(self, pcm: bytes | memoryview) -> None:
        """Writes whole samples: 16 bits, 16 kHz."""

    async def wait_writable(self) -> None:
        """Waits for a change, after which `full` may be false."""

    def finish(self) -> None:
        """Ends the audio."""

    async def run(self) -> str:
        """Runs until the text is final; returns the last answer. Raises what ends the conversation."""

    async def close(self) -> None:
        """Releases everything; at any time, idempotent."""


class FunAsrSessionFactory(Protocol):
    """Factory of sessions."""

    def resolve_language(self, code: str | None) -> str:
        """Language that a session would recognize. Raises OptionError if there is none, and as `start` does."""

    def validate(self, options: FunAsrOptions) -> None:
        """Raises OptionError for options that the model or server does not support, and as `start` does."""

    def start(self, options: FunAsrOptions, outbox: Outbox) -> FunAsrSession:
        """Starts a session in a resolved `options.language`. Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class FunAsrConversation:
    """Sessions over one WebSocket, one at a time. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        factory: FunAsrSessionFactory,
        limits: SessionLimits,
        format_error: Callable[[Exception], str],
        options: FunAsrOptions,
    ) -> None:
        """`format_error`: error to event. `options`: those of the query. Raises as `factory.validate` does."""
        factory.validate(options)
        self._outbox, self._session_factory = outbox, factory
        self._limits, self._format_error = limits, format_error
        self._loop = asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._session: FunAsrSession | None = None
        self._session_task: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._silence_bytes = 0
        """Zeros before anything else: their number says all, however many frames they came in."""
        self._started = False
        """Whether a session has ever begun."""
        self.other_protocol: OtherProtocol | None = None
        """Protocol of the first message, where it is another: the conversation has ended, and one of that goes on."""
        self._first_message: MutableMapping[str, Any] | None = None
        """Message that the conversation that goes on begins with, after the zeros."""
        self._reported_not_started = False
        self._options = self._session_options = options
        """Options requested last, and those requested when the session started."""
        self._pcm = Pcm16Assembler()
        self.received_samples = 0
        """Samples of all closed sessions."""
        self.disconnected_in_session = False
        """Whether the client left before all its text was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""

    def receive_again(self, receive: Receive) -> Receive:
        """Returns a `receive` for the conversation that goes on: it begins with what came first."""
        zeros, first = self._silence_bytes, self._first_message
        most = self._limits.frame_bytes // FLOAT_BYTES * FLOAT_BYTES

        async def receive_next() -> MutableMapping[str, Any]:
            nonlocal zeros, first
            if zeros:
                count = min(zeros, most)
                zeros -= count
                return {"type": "websocket.receive", "bytes": bytes(count)}
            if first is not None:
                message, first = first, None
                return message
            return await receive()

        return receive_next

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
                await self._audio(frame)
            else:
                await self._text(message.get("text") or "")
        except (MalformedRequest, OptionError, AudioTooLarge) as error:
            self.send_error(error)

    def send_error(self, error: AsrServeError) -> None:
        self._outbox.send(self._format_error(error))

    def finish(self) -> None:
        if self._session is None:
            return
        if self._pcm.has_pending_byte:
            error = MalformedRequest(
                "the audio ends in the middle of a sample",
                "samples are 16 bits, two bytes",
                "the last byte is dropped: check how frames are cut",
            )
            self.send_error(error)
        self._session.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: the protocol has no event for text that will not come."""

    async def close(self) -> None:
        if (session := self._session) is not None:
            await session.close()
            self.received_samples += session.received_samples
            self._session = None

    # --- messages -------------------------------------------------------------------------------------

    def _hand_over(self, protocol: OtherProtocol, message: MutableMapping[str, Any]) -> None:
        """Ends the conversation for one of another protocol, which begins with that message."""
        self.other_protocol, self._first_message = protocol, message
        if protocol == "runtime":
            self._silence_bytes = 0  # no session was open
        self._lifecycle.complete()

    def _is_handed_over(self, frame: bytes) -> bool:
        """Returns whether audio before any command is of a client of sherpa-onnx, or may be: zeros wait for what
        follows."""
        found = None if self._started or self._reported_not_started else guess_protocol(frame)
        if found == "silence":
            self._silence_bytes = min(self._silence_bytes + len(frame), MAX_SILENCE_BYTES)
            return True
        if found is None:
            self._silence_bytes = 0
            return False
        self._hand_over(found, {"type": "websocket.receive", "bytes": frame})
        return True

    async def _audio(self, frame: bytes) -> None:
        session = self._session
        if session is None and self._is_handed_over(frame):
            return
        if session is None or self._lifecycle.finishing:
            if not self._reported_not_started and self._lifecycle.end_reason is None:
                self._reported_not_started = True
                raise OutOfTurn(
                    "audio came while no session is open",
                    "it is dropped until START; this is said once",
                    "send START first",
                )
            return
        # Also of a frame that is dropped: it may end in half a sample.
        pcm = memoryview(self._pcm.take_whole_samples(frame))
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 100 ms",
            )
        while pcm and not self._lifecycle.finishing:
            if session.full:
                await self._lifecycle.pause_reading(session.wait_writable())
            else:
                session.write(pcm[:SLICE_BYTES])
                pcm = pcm[SLICE_BYTES:]
        self._lifecycle.check_audio_limit(session.received_samples)

    async def _text(self, text: str) -> None:
        if not self._started and is_runtime_message(text):
            self._hand_over("runtime", {"type": "websocket.receive", "text": text})
            return
        match websocket.parse_command(text):
            case StartCommand():
                await self._start()
            case StopCommand():
                if self._session is None or self._lifecycle.finishing:
                    raise OutOfTurn("STOP came while no session is open", "it ends what START began", "send START")
                self._lifecycle.finish()
            case LanguageCommand(name, code):
                await self._set_language(code)
                self._outbox.send(websocket.language_answer(name))
            case HotwordsCommand(words):
                note = await self._set_options(msgspec.structs.replace(self._options, hotwords=words))
                self._outbox.send(websocket.hotwords_answer(words, note))
            case FlagCommand(name, on) as flag:
                note = await self._set_options(msgspec.structs.replace(self._options, **{name: on}))
                self._outbox.send(websocket.flag_answer(flag, note))

    async def _start(self) -> None:
        await self._lifecycle.wait_finished()
        if self._session is not None:
            raise OutOfTurn("START came again", "a session is open, and goes on", "send STOP to end it")
        self._start_session(self._options)
        self._outbox.send(websocket.STARTED)

    async def _set_language(self, code: str | None) -> None:
        """Sets the language of this session, before any audio, and of later ones. Raises OutOfTurn after audio."""
        language = self._session_factory.resolve_language(code)
        options = msgspec.structs.replace(self._options, language=language)
        self._session_factory.validate(options)
        session = self._session
        if session is not None and not self._lifecycle.finishing and language != session.language:
            if session.received_samples:
                raise OutOfTurn(
                    f"LANGUAGE:{code} came after audio",
                    f"the language of this session is {session.language}",
                    "send STOP, then LANGUAGE and START",
                )
            await self._restart_session(options)
        self._options = options

    async def _set_options(self, options: FunAsrOptions) -> str:
        """Sets options of this session, before any audio, and of later ones; a note if only of those."""
        self._session_factory.validate(options)
        session, self._options = self._session, options
        # `_set_language` has applied the language.
        before = msgspec.structs.replace(self._session_options, language=options.language)
        if session is None or self._lifecycle.finishing or options == before:
            return ""
        if session.received_samples:
            return websocket.NOT_STARTED
        await self._restart_session(options)
        return ""

    # --- sessions -------------------------------------------------------------------------------------

    async def _restart_session(self, options: FunAsrOptions) -> None:
        """Replaces the session by another, before any audio."""
        assert self._session_task is not None, "the session runs in it"
        await cancel_and_wait(self._session_task)
        await self.close()
        self._start_session(options)

    def _start_session(self, options: FunAsrOptions) -> None:
        language = self._session_factory.resolve_language(options.language)
        session = self._session_factory.start(msgspec.structs.replace(options, language=language), self._outbox)
        self._session, self._reported_not_started, self._started = session, False, True
        self._silence_bytes = 0
        self._session_options = options
        self._pcm = Pcm16Assembler()
        self._began_s = self._loop.time()
        self._session_task = self._lifecycle.start_session(self._run_session(session))

    async def _run_session(self, session: FunAsrSession) -> None:
        final = await session.run()
        await self.close()
        self._reported_not_started = False
        self._outbox.send_replacing_state(final)
        self._outbox.send(websocket.STOPPED)
        self._lifecycle.session_done()
