"""Conversation of one socket in Deepgram's `/v1/speak`: text arrives as it is written, audio is sent as it is made.

A speech goes from the first Speak to a Flush, Clear or Close; what comes while its rest is spoken waits. An invalid
message is answered with an Error and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import Receive

from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    EngineClosed,
    MalformedRequest,
    ModelError,
    OptionError,
    TextTooLong,
)
from asr_serve.protocols.deepgram.speak import (
    SpeakClear,
    SpeakCleared,
    SpeakClose,
    SpeakFlush,
    SpeakFlushed,
    SpeakText,
    parse_speak_command,
)
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits, cancel_and_wait
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.server.tts.speech_session import SpeechSession

MAX_WAITING_MESSAGES = 1_024
"""Messages that wait while the rest of a speech is spoken."""
FLUSH_RETRY_MS = 1_000


class DeepgramSpeakConversation:
    """Speech over one WebSocket. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        begin: Callable[[], SpeechSession],
        limits: SessionLimits,
        most_characters: int,
        format_error: Callable[[Exception], str],
    ) -> None:
        """`begin` starts a speech, and raises what prevents it. `most_characters`: limit of text that waits for
        synthesis. `format_error`: error to message."""
        self._outbox, self._begin, self._most, self._format_error = outbox, begin, most_characters, format_error
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._speech: SpeechSession | None = None
        self._speech_task: asyncio.Task[None] | None = None
        self._flushes = self._clears = 0
        """Numbers of the next Flushed and Cleared."""
        self._waiting = deque[SpeakText | SpeakFlush]()
        """Messages for after the speech whose rest is spoken."""
        self._flushing = self._closing = False
        """Whether Flushed follows the speech; whether the connection ends behind it."""
        self.started_s: float | None = asyncio.get_running_loop().time()
        self.disconnected_in_session = False
        """Whether the client left before all its audio was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""
        self.synthesized_s = 0.0
        """Seconds of audio of all closed speeches."""

    @property
    def completed(self) -> bool:
        """Returns whether the conversation has ended as the client asked, and its socket is open."""
        return self._lifecycle.completed

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._speech is not None

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
        command = parse_speak_command(message)
        if self._closing:
            return
        match command:
            case SpeakText() | SpeakFlush():
                self._check_room(command)
                if self._lifecycle.finishing:
                    self._waiting.append(command)
                else:
                    self._speak(command)
            case SpeakClear():
                await self._clear()
            case SpeakClose():
                self._closing = True
                self._close_when_spoken()

    def _check_room(self, command: SpeakText | SpeakFlush) -> None:
        """Raises TextTooLong, AtCapacity."""
        if isinstance(command, SpeakFlush):
            if len(self._waiting) >= MAX_WAITING_MESSAGES:
                raise AtCapacity(f"{MAX_WAITING_MESSAGES} messages wait", "no more at once", FLUSH_RETRY_MS)
            return
        waiting = sum(len(each.text) for each in self._waiting if isinstance(each, SpeakText))
        waiting += 0 if self._speech is None else self._speech.waiting_characters
        if waiting + len(command.text) > self._most or len(self._waiting) >= MAX_WAITING_MESSAGES:
            raise TextTooLong(
                f"{waiting + len(command.text)} characters would wait for synthesis",
                f"up to {self._most} in {MAX_WAITING_MESSAGES} messages; this text is dropped",
                "send text at the speed of the audio, or have max_characters raised",
                param="text",
            )

    def _speak(self, command: SpeakText | SpeakFlush) -> None:
        """Appends text to the speech, or ends it for its Flushed. Raises what prevents a speech."""
        if isinstance(command, SpeakFlush):
            if self._speech is None:
                self._send_flushed()
            else:
                self._flushing = True
                self._lifecycle.finish()
        elif command.text:
            if self._speech is None:
                self._speech, self._flushing = self._begin(), False
                self._speech_task = self._lifecycle.start_session(self._run_speech(self._speech))
            self._speech.append_text(command.text)

    def _close_when_spoken(self) -> None:
        if self._speech is not None:
            self._lifecycle.finish()
        elif self._lifecycle.end_reason is None:
            self._lifecycle.complete()

    async def _clear(self) -> None:
        self._waiting.clear()
        if self._speech_task is not None:
            await cancel_and_wait(self._speech_task)
            await self.close()
            self._lifecycle.session_done()
        self._outbox.send(SpeakCleared(sequence_id=self._clears).to_json())
        self._clears += 1

    # --- audio ----------------------------------------------------------------------------------------

    async def _run_speech(self, speech: SpeechSession) -> None:
        try:
            async for event in speech:
                match event:
                    case OptionError():
                        self.send_error(event)
                    case bytes():
                        self._outbox.send(event)
                        self._lifecycle.reset_idle()  # a client that receives audio need not send anything
                        await self._outbox.wait_empty()  # no more is made than is received
        except AsrServeError as error:
            self.send_error(error)
        await self.close()
        if self._flushing:
            self._send_flushed()
        self._lifecycle.session_done()
        while self._waiting and not self._lifecycle.finishing and self._lifecycle.end_reason is None:
            try:
                self._speak(self._waiting.popleft())
            except (OptionError, ModelError, AtCapacity, EngineClosed) as error:
                self.send_error(error)
        if self._closing and not self._lifecycle.finishing:
            self._close_when_spoken()

    def _send_flushed(self) -> None:
        self._outbox.send(SpeakFlushed(sequence_id=self._flushes).to_json())
        self._flushes += 1
