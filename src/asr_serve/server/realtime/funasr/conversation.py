"""One socket's conversation in FunASR's words: which command may come when.

    idle --START--> hearing --STOP--> finishing --(all text is out)--> idle

A mistake of the client's is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from asr_serve import units
from asr_serve.audio.pcm import SAMPLE_BYTES, Pcm16Assembler
from asr_serve.errors import AsrServeError, AudioTooLarge, MalformedRequest, OptionError, OutOfTurn
from asr_serve.protocols.funasr import websocket
from asr_serve.protocols.funasr.websocket import (
    FlagCommand,
    FunAsrOptions,
    HotwordsCommand,
    LanguageCommand,
    StartCommand,
    StopCommand,
)
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits, cancel_and_wait
from asr_serve.server.realtime.outbox import Outbox

SLICE_BYTES = units.RATE_HZ * SAMPLE_BYTES
"""How much of a large frame is taken before looking whether there is room for more."""


class FunAsrSession(Protocol):
    """One session, from START until its text is out."""

    @property
    def language(self) -> str: ...
    @property
    def received_samples(self) -> int: ...
    @property
    def full(self) -> bool:
        """Put no more before `room` has come back."""

    def write(self, pcm: bytes | memoryview) -> None:
        """Whole samples."""

    async def wait_writable(self) -> None:
        """Wait for a change: `full` may have ended."""

    def finish(self) -> None:
        """No more audio will come."""

    async def run(self) -> str:
        """Work until the text is final; returns the last answer. Raises what ends the conversation."""

    async def close(self) -> None:
        """At any time, idempotent: give everything back."""


class FunAsrSessionFactory(Protocol):
    """Where sessions come from."""

    def resolve_language(self, code: str | None) -> str:
        """The one that would be heard. Raises OptionError for one that cannot be, and as `begin` does."""

    def validate(self, wants: FunAsrOptions) -> None:
        """Raises OptionError for what this model or server cannot tell or take, and as `begin` does."""

    def start(self, wants: FunAsrOptions, outbox: Outbox) -> FunAsrSession:
        """`wants.language` is one that `language` told. Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class FunAsrConversation:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        ears: FunAsrSessionFactory,
        limits: SessionLimits,
        tell: Callable[[Exception], str],
        wants: FunAsrOptions,
    ) -> None:
        """`tell`: an error to the event that the client gets. `wants`: what it asked for as it came. Raises what
        `ears.expect` does."""
        ears.validate(wants)
        self._outbox, self._session_factory, self._limits, self._format_error = outbox, ears, limits, tell
        self._loop = asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._session_running: FunAsrSession | None = None
        self._session: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._reported_not_started = False
        self._options = self._session_options = wants
        """As the client said last; and as it had said when the session began."""
        self._pcm = Pcm16Assembler()
        self.received_samples = 0
        """Of all sessions that are over."""
        self.disconnected_in_session = False
        """The client left before it had all its words."""
        self.disconnect_code: int | None = None
        """What the client closed with; 1005 for nothing."""

    # --- for its life ---------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._session_running is not None

    @property
    def started_s(self) -> float | None:
        return None if self._session_running is None or self._lifecycle.finishing else self._began_s

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
        if self._session_running is None:
            return
        if self._pcm.has_pending_byte:
            left = MalformedRequest(
                "the audio ends in the middle of a sample",
                "samples are 16 bits, two bytes",
                "the last byte is dropped: check how frames are cut",
            )
            self.send_error(left)
        self._session_running.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """These words have none for text that will not come."""

    async def close(self) -> None:
        if (hearing := self._session_running) is not None:
            await hearing.close()
            self.received_samples += hearing.received_samples
            self._session_running = None

    # --- what comes -----------------------------------------------------------------------------------

    async def _audio(self, frame: bytes) -> None:
        hearing = self._session_running
        if hearing is None or self._lifecycle.finishing:
            if not self._reported_not_started and self._lifecycle.end_reason is None:
                self._reported_not_started = True
                raise OutOfTurn(
                    "audio came while no session is open",
                    "it is dropped until START; this is said once",
                    "send START first",
                )
            return
        pcm = memoryview(
            self._pcm.take_whole_samples(frame)
        )  # of one that is dropped, too: it may end in half a sample
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 100 ms",
            )
        while pcm and not self._lifecycle.finishing:
            if hearing.full:
                await self._lifecycle.pause_reading(hearing.wait_writable())
            else:
                hearing.write(pcm[:SLICE_BYTES])
                pcm = pcm[SLICE_BYTES:]
        self._lifecycle.check_audio_limit(hearing.received_samples)

    async def _text(self, text: str) -> None:
        match websocket.parse_command(text):
            case StartCommand():
                await self._start()
            case StopCommand():
                if self._session_running is None or self._lifecycle.finishing:
                    raise OutOfTurn("STOP came while no session is open", "it ends what START began", "send START")
                self._lifecycle.finish()
            case LanguageCommand(name, code):
                await self._set_language(code)
                self._outbox.send(websocket.language_answer(name))
            case HotwordsCommand(words):
                why = await self._set_options(msgspec.structs.replace(self._options, hotwords=words))
                self._outbox.send(websocket.hotwords_answer(words, why))
            case FlagCommand(name, on) as flag:
                why = await self._set_options(msgspec.structs.replace(self._options, **{name: on}))
                self._outbox.send(websocket.flag_answer(flag, why))

    async def _start(self) -> None:
        if self._lifecycle.finishing and self._session is not None:
            await self._lifecycle.pause_reading(asyncio.wait({self._session}))
        if self._session_running is not None:
            raise OutOfTurn("START came again", "a session is open, and goes on", "send STOP to end it")
        self._start_session(self._options)
        self._outbox.send(websocket.STARTED)

    async def _set_language(self, code: str | None) -> None:
        """Hear that language from now on, or from the next START."""
        language = self._session_factory.resolve_language(code)
        wants = msgspec.structs.replace(self._options, language=language)
        self._session_factory.validate(wants)
        hearing = self._session_running
        if hearing is not None and not self._lifecycle.finishing and language != hearing.language:
            if hearing.received_samples:
                raise OutOfTurn(
                    f"LANGUAGE:{code} came after audio",
                    f"this session is heard as {hearing.language}",
                    "send STOP, then LANGUAGE and START",
                )
            await self._restart_session(wants)
        self._options = wants

    async def _set_options(self, wants: FunAsrOptions) -> str:
        """That from now on, or, which is then said, from the next START."""
        self._session_factory.validate(wants)
        hearing, self._options = self._session_running, wants
        before = msgspec.structs.replace(self._session_options, language=wants.language)  # that was seen to
        if hearing is None or self._lifecycle.finishing or wants == before:
            return ""
        if hearing.received_samples:
            return websocket.NOT_STARTED
        await self._restart_session(wants)
        return ""

    # --- sessions -------------------------------------------------------------------------------------

    async def _restart_session(self, wants: FunAsrOptions) -> None:
        """Before any audio."""
        assert self._session is not None, "it came with the hearing"
        await cancel_and_wait(self._session)
        await self.close()
        self._start_session(wants)

    def _start_session(self, wants: FunAsrOptions) -> None:
        language = self._session_factory.resolve_language(wants.language)
        hearing = self._session_factory.start(msgspec.structs.replace(wants, language=language), self._outbox)
        self._session_running, self._reported_not_started = hearing, False
        self._session_options = wants
        self._pcm = Pcm16Assembler()
        self._began_s = self._loop.time()
        self._session = self._lifecycle.start_session(self._run_session(hearing))

    async def _run_session(self, hearing: FunAsrSession) -> None:
        final = await hearing.run()
        await self.close()
        self._reported_not_started = False
        self._outbox.send_replacing_state(final)
        self._outbox.send(websocket.STOPPED)
        self._lifecycle.session_done()
