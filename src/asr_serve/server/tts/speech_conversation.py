"""Conversation of one socket for synthesis: text arrives as it is written, audio is sent as it is made.

idle --start--> speaking --end--> finishing --(all audio is sent)--> idle
                 \\-----------cancel, or a failure------------------/

An invalid message is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

from starlette.types import Receive

from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    EngineClosed,
    MalformedRequest,
    ModelError,
    OptionError,
    OutOfTurn,
    TextTooLong,
)
from asr_serve.protocols.stream import speech_messages
from asr_serve.protocols.stream.speech_messages import (
    AppendText,
    CancelSpeech,
    EndSpeech,
    FlushSpeech,
    SpeechFinished,
    SpeechFlushed,
    SpeechSentence,
    StartSpeech,
)
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits, cancel_and_wait
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.server.tts.speech_session import SpeechSession

MAX_SPEECH_FLUSHES = 64
"""Pending flushes of one speech."""
FLUSH_RETRY_MS = 1_000

Reason = Literal["end", "cancelled", "failed"]


class SpeechConversation:
    """Speeches over one WebSocket, one at a time. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        begin: Callable[[StartSpeech], SpeechSession],
        limits: SessionLimits,
        most_characters: int,
        format_error: Callable[[Exception], str],
    ) -> None:
        """`begin` raises what prevents a speech. `most_characters`: limit of text that waits for synthesis.
        `format_error`: error to event."""
        self._outbox, self._begin, self._most, self._format_error = outbox, begin, most_characters, format_error
        self._loop = asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._speech: SpeechSession | None = None
        self._speech_task: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self.disconnected_in_session = False
        """Whether the client left before all its audio was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""
        self.synthesized_s = 0.0
        """Seconds of audio of all closed speeches."""

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._speech is not None

    @property
    def started_s(self) -> float | None:
        return None if self._speech is None or self._lifecycle.finishing else self._began_s

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        try:
            if message.get("bytes") is not None:
                raise MalformedRequest("a binary message came", "text goes in, as JSON; sound comes out")
            await self._command(message.get("text") or "")
        except (MalformedRequest, OptionError, ModelError, AtCapacity, EngineClosed) as error:
            self.send_error(error)

    def send_error(self, error: AsrServeError) -> None:
        self._outbox.send(self._format_error(error))

    def finish(self) -> None:
        if self._speech is not None:
            self._speech.end()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: no result is pending but the error itself."""

    async def close(self) -> None:
        if (speech := self._speech) is not None:
            await speech.close()
            self.synthesized_s += speech.seconds
            self._speech = None

    # --- messages -------------------------------------------------------------------------------------

    async def _command(self, message: str) -> None:
        match speech_messages.parse_speech_command(message):
            case StartSpeech() as start:
                self._start(start)
            case AppendText(text):
                self._append_text(text)
            case FlushSpeech(name):
                speech = self._require_open_speech("flush")
                if speech.pending_flushes >= MAX_SPEECH_FLUSHES:
                    raise AtCapacity(
                        f"{speech.pending_flushes} flushes are under way",
                        f"up to {MAX_SPEECH_FLUSHES} at once",
                        FLUSH_RETRY_MS,
                    )
                speech.flush(name)
            case EndSpeech():
                self._require_open_speech("end")
                self._lifecycle.finish()
            case CancelSpeech():
                await self._cancel()

    def _require_open_speech(self, command: str) -> SpeechSession:
        """Speech that still takes text. Raises OutOfTurn if there is none."""
        if self._speech is None or self._lifecycle.finishing:
            raise OutOfTurn(f"{command} came while no speech is open", "it belongs to one", "send start")
        return self._speech

    def _start(self, start: StartSpeech) -> None:
        if self._speech is not None:
            raise OutOfTurn("start came again", "a speech goes on", "wait for done, or send cancel")
        self._speech = self._begin(start)
        self._began_s = self._loop.time()
        self._outbox.send(self._speech.started.to_json())
        self._speech_task = self._lifecycle.start_session(self._run_speech(self._speech))

    def _append_text(self, text: str) -> None:
        speech = self._require_open_speech("text")
        if speech.waiting_characters + len(text) > self._most:
            raise TextTooLong(
                f"{speech.waiting_characters + len(text)} characters would wait for synthesis",
                f"up to {self._most}; this text is dropped",
                "send text at the speed of the audio, or have max_characters raised",
                param="text",
            )
        speech.append_text(text)

    async def _cancel(self) -> None:
        speech = self._speech
        if speech is None or self._speech_task is None:
            return  # it has ended already, which an interrupting client cannot know
        await cancel_and_wait(self._speech_task)
        if self._speech is speech:  # it may have ended meanwhile
            await self._finish_speech(speech, "cancelled")

    # --- audio and events -----------------------------------------------------------------------------

    async def _run_speech(self, speech: SpeechSession) -> None:
        reason: Reason = "end"
        try:
            async for event in speech:
                match event:
                    case SpeechSentence() | SpeechFlushed():
                        self._outbox.send(event.to_json())
                    case OptionError():
                        self.send_error(event)
                    case bytes():
                        self._outbox.send(event)
                        self._lifecycle.reset_idle()  # a client that receives audio need not send anything
                        await self._outbox.wait_empty()  # no more is made than is received
        except AsrServeError as error:
            self.send_error(error)
            reason = "failed"
        await self._finish_speech(speech, reason)

    async def _finish_speech(self, speech: SpeechSession, reason: Reason) -> None:
        with contextlib.suppress(AsrServeError):
            await self.close()
        self._outbox.send(
            SpeechFinished(
                reason=reason, seconds=speech.seconds, sentences=speech.sentences, characters=speech.characters
            ).to_json()
        )
        self._lifecycle.session_done()
