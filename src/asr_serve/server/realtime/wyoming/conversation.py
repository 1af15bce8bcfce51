"""Conversation of one Wyoming connection: one transcription or one speech at a time.

idle --transcribe, audio-start--> listening --audio-stop--> finishing --(transcript)--> idle
idle --synthesize or synthesize-start--> speaking --(audio-stop)--> idle

A request behind one that is finishing waits for its answer. An error ends the connection, after the event `error`:
clients wait for nothing but an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import Receive

from asr_serve.audio.stream_decoder import LiveAudioDecoder
from asr_serve.errors import AsrServeError, OutOfTurn, TextTooLong
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone
from asr_serve.protocols.wyoming import events
from asr_serve.protocols.wyoming.events import (
    WyomingAudioChunk,
    WyomingAudioFormat,
    WyomingAudioStart,
    WyomingAudioStop,
    WyomingDescribe,
    WyomingPing,
    WyomingRequest,
    WyomingSynthesize,
    WyomingSynthesizeChunk,
    WyomingSynthesizeStart,
    WyomingSynthesizeStop,
    WyomingTranscribe,
    WyomingVoice,
)
from asr_serve.protocols.wyoming.framing import EventDecoder
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.server.tts.speech_session import SpeechSession

OpenListener = Callable[[WyomingTranscribe, Callable[[list[LiveEvent]], None]], AsyncListener]
"""Opens a live session for these options. Raises what prevents it."""
OpenDecoder = Callable[[int], LiveAudioDecoder]
"""Opens a decoder of s16le at that rate."""
OpenSpeech = Callable[[WyomingVoice | None, bool], SpeechSession]
"""Opens a speech by that voice; whether its text is SSML. Raises what prevents it."""


class WyomingConversation:
    """Requests of one connection. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        limits: SessionLimits,
        *,
        describe: Callable[[], bytes],
        open_listener: OpenListener,
        open_decoder: OpenDecoder,
        open_speech: OpenSpeech,
        max_characters: int,
    ) -> None:
        """`describe`: the event `info`. `max_characters`: limit of text that waits for synthesis."""
        self._outbox, self._describe, self._most = outbox, describe, max_characters
        self._open_listener, self._open_decoder, self._open_speech = open_listener, open_decoder, open_speech
        self._decoder = EventDecoder()
        self._loop = asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._requested = WyomingTranscribe()
        self._listening: _Transcription | None = None
        self._speech: SpeechSession | None = None
        self._streamed_text = False
        """Whether the text of the speech comes in chunks."""
        self._began_s = 0.0
        self.received_samples = 0
        """Samples of all transcriptions."""
        self.synthesized_s = 0.0
        self.disconnected_in_session = False
        self.disconnect_code: int | None = None

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._listening is not None or self._speech is not None

    @property
    def started_s(self) -> float | None:
        return self._began_s if self.active and not self._lifecycle.finishing else None

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        for event in self._decoder.feed(message.get("bytes") or b""):
            request = events.parse_event(event)
            if request is not None:
                await self._handle(request)
            if self._outbox.congested:
                await self._lifecycle.pause_reading(self._outbox.wait_empty())

    def send_error(self, error: AsrServeError) -> None:
        """Sends nothing: the error ends the connection, and is sent then."""

    def finish(self) -> None:
        if self._listening is not None:
            self._listening.finish()
        if self._speech is not None:
            self._speech.end()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: no result is pending but the error itself."""

    async def close(self) -> None:
        if (listening := self._listening) is not None:
            self._listening = None
            self.received_samples += listening.listener.received_samples
            await listening.listener.close()
        if (speech := self._speech) is not None:
            self._speech = None
            await speech.close()
            self.synthesized_s += speech.seconds

    # --- requests -------------------------------------------------------------------------------------

    async def _handle(self, request: WyomingRequest) -> None:
        if not isinstance(request, WyomingDescribe | WyomingPing):
            await self._lifecycle.wait_finished()
        match request:
            case WyomingDescribe():
                self._outbox.send(self._describe())
            case WyomingPing(text):
                self._outbox.send(events.encode_pong(text))
            case WyomingTranscribe():
                self._expect_idle("transcribe")
                self._requested = request
            case WyomingAudioStart():
                self._start_audio(request)
            case WyomingAudioChunk(form, audio):
                await self._take_audio(form, audio)
            case WyomingAudioStop():
                if self._listening is None:
                    self._start_audio(WyomingAudioFormat(16_000, 2, 1))  # no audio came: an empty text follows
                self._lifecycle.finish()
            case WyomingSynthesize(text, voice, form):
                if self._speech is not None and self._streamed_text:
                    return  # the whole text once more, for servers that read no stream
                speech = self._start_speech(voice, form == "ssml", streamed=False)
                self._append_text(speech, text)
                self._lifecycle.finish()
            case WyomingSynthesizeStart(voice, form):
                self._start_speech(voice, form == "ssml", streamed=True)
            case WyomingSynthesizeChunk(text):
                self._append_text(self._open_text("synthesize-chunk"), text)
            case WyomingSynthesizeStop():
                self._open_text("synthesize-stop")
                self._lifecycle.finish()

    def _expect_idle(self, event: str) -> None:
        """Raises OutOfTurn."""
        if self.active:
            raise OutOfTurn(
                f"{event} came while a request is answered", "one at a time", "wait for its answer, or connect again"
            )

    # --- recognition ----------------------------------------------------------------------------------

    def _start_audio(self, form: WyomingAudioFormat) -> None:
        self._expect_idle("audio-start")
        transcription = _Transcription(self._outbox, form, self._open_decoder(form.rate))
        transcription.listener = self._open_listener(self._requested, transcription.on_events)
        self._requested = WyomingTranscribe()
        self._listening, self._began_s = transcription, self._loop.time()
        self._outbox.send(events.encode_transcript_start(transcription.listener.language))
        self._lifecycle.start_session(self._transcribe(transcription))

    async def _take_audio(self, form: WyomingAudioFormat, audio: bytes) -> None:
        if self._listening is None:
            self._start_audio(form)
        listening = self._listening
        assert listening is not None
        listening.write(form, audio)
        while listening.listener.full and self._listening is listening:
            await self._lifecycle.pause_reading(listening.listener.wait_writable())
        self._lifecycle.check_audio_limit(listening.listener.received_samples)

    async def _transcribe(self, transcription: _Transcription) -> None:
        await transcription.listener.run()
        self._outbox.send(transcription.encode_end())
        await self.close()
        self._lifecycle.session_done()

    # --- synthesis ------------------------------------------------------------------------------------

    def _start_speech(self, voice: WyomingVoice | None, ssml: bool, *, streamed: bool) -> SpeechSession:
        self._expect_idle("synthesize")
        self._speech = speech = self._open_speech(voice, ssml)
        self._streamed_text, self._began_s = streamed, self._loop.time()
        self._lifecycle.start_session(self._speak(speech, streamed))
        return speech

    def _open_text(self, event: str) -> SpeechSession:
        if self._speech is None or not self._streamed_text or self._lifecycle.finishing:
            raise OutOfTurn(f"{event} came while no text is open", "it belongs to one", "send synthesize-start first")
        return self._speech

    def _append_text(self, speech: SpeechSession, text: str) -> None:
        if speech.waiting_characters + len(text) > self._most:
            raise TextTooLong(
                f"{speech.waiting_characters + len(text)} characters would wait for synthesis",
                f"up to {self._most}",
                "send text in parts, or have max_characters raised",
                param="text",
            )
        speech.append_text(text)

    async def _speak(self, speech: SpeechSession, streamed: bool) -> None:
        rate_hz = speech.started.sample_rate
        self._outbox.send(events.encode_audio_start(rate_hz))
        async for piece in speech:
            if isinstance(piece, AsrServeError):
                raise piece
            if isinstance(piece, bytes):
                self._outbox.send(events.encode_audio_chunk(piece, rate_hz))
                self._lifecycle.reset_idle()  # a client that receives audio need not send anything
                await self._outbox.wait_empty()  # no more is made than is received
        self._outbox.send(events.encode_audio_stop())
        if streamed:
            self._outbox.send(events.encode_synthesize_stopped())
        await self.close()
        self._lifecycle.session_done()


class _Transcription:
    """Text of one transcription, streamed as its words become final."""

    listener: AsyncListener

    def __init__(self, outbox: Outbox, form: WyomingAudioFormat, decoder: LiveAudioDecoder) -> None:
        self._outbox, self._rate_hz, self._pcm = outbox, form.rate, decoder
        self._texts: list[str] = []
        self._sent = ""
        """Text of the open segment that was sent."""
        self._language = ""
        self._finished = False

    def write(self, form: WyomingAudioFormat, audio: bytes) -> None:
        """Raises OutOfTurn for another rate than at the start; what ends the session."""
        if form.rate != self._rate_hz:
            raise OutOfTurn(
                f"audio at {form.rate} Hz came after audio at {self._rate_hz} Hz",
                "one rate in a transcription",
                "end it with audio-stop first",
            )
        self.listener.write(self._pcm.decode(audio))

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            if len(rest := self._pcm.finish()):
                self.listener.write(rest)
            self.listener.finish()

    def on_events(self, found: list[LiveEvent]) -> None:
        for event in found:
            match event:
                case LivePartial(locked_text=locked) if locked.startswith(self._sent):
                    self._send(locked)
                case LiveSegmentDone(segment):
                    self._language = event.language or self._language
                    if segment.text:
                        self._send(segment.text if segment.text.startswith(self._sent) else self._sent)
                        self._texts.append(segment.text)
                    self._sent = ""

    def _send(self, text: str) -> None:
        """Sends what is new in the text of the open segment."""
        new = text[len(self._sent) :]
        if new:
            before = " " if self._texts and not self._sent else ""
            self._outbox.send(events.encode_transcript_chunk(before + new))
            self._sent = text

    def encode_end(self) -> bytes:
        return events.encode_transcript_end(" ".join(self._texts), self._language or self.listener.language)
