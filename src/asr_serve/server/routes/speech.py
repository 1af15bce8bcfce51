"""POST /v1/audio/speech and its WebSocket: a text in, its sound out, while it is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.audio.encode.stream_encoder import AudioEncoder, supported_rate_hz
from asr_serve.config import ServeConfig, voices_dir
from asr_serve.errors import ClientGone, RequestTimeout, TextTooLong
from asr_serve.pipelines.options import SpeakOptions
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.pipelines.tts.speak import TtsSession
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.openai.speech import (
    PATH,
    PCM_RATE_HZ,
    SpeechRequest,
    VoiceList,
    encode_audio_delta,
    encode_done,
    encode_words,
    max_body_bytes,
    parse_speech_request,
)
from asr_serve.protocols.stream import speech_messages
from asr_serve.protocols.stream.speech_messages import SpeechStarted, StartSpeech
from asr_serve.server import openapi
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.middleware.error_handlers import JSON, live_error_event
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.endpoint import close_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.server_sent_events import with_error_event
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.tts.audio_stream import SpeechChunk, SpeechStream, TextQueue
from asr_serve.server.tts.speech_conversation import SpeechConversation
from asr_serve.server.tts.speech_session import SpeechSession
from asr_serve.server.tts.voice_catalog import VoiceCatalog
from asr_serve.voices.voice_store import VoiceStore

QUERY = ("api_key",)
SPEECH_HEADERS = ("x-model", "x-voice", "x-sample-rate", "x-ignored")
"""Of an answer: who speaks, at which rate, and which members of the request changed nothing."""


class SpeechDependencies(NamedTuple):
    """What these routes work with."""

    config: ServeConfig
    voices: VoiceCatalog
    admission: AdmissionController
    executor: TranscriptionExecutor

    @classmethod
    def create(
        cls, config: ServeConfig, engines: EngineRegistry, gate: AdmissionController, jobs: TranscriptionExecutor
    ) -> SpeechDependencies:
        cloned = VoiceStore(voices_dir(config.engine.voices_dir))
        return cls(config, VoiceCatalog(engines, cloned, config.aliases, config.voice_aliases), gate, jobs)


class SpeechSynthesizer(NamedTuple):
    """Who is to speak, in which way, and to which bytes."""

    engine: ModelEngine
    options: SpeakOptions
    lexicon: dict[str, str]
    most_characters: int
    encoder: AudioEncoder

    @classmethod
    def resolve(cls, desk: SpeechDependencies, asked: SpeechRequest | StartSpeech) -> SpeechSynthesizer:
        """Raises UnknownModel, ModelNotLoaded, WrongModel, EngineClosed, UnknownVoice, UnsupportedOption."""
        voices, most_characters = desk.voices, desk.config.max_characters
        engine = voices.engine(asked.model)
        card, manner = engine.tts_card, msgspec.structs.asdict(asked.style)
        usual_hz = PCM_RATE_HZ if asked.format == "pcm" else card.rate_hz
        rate_hz = supported_rate_hz(asked.format, asked.rate_hz or usual_hz)
        lexicon = manner.pop("lexicon")
        voice = voices.voice(card, asked.voice)
        options = SpeakOptions(voice=voice, rate_hz=rate_hz, **manner)
        return cls(engine, options, lexicon, most_characters, AudioEncoder(asked.format, rate_hz))

    @property
    def voice(self) -> str:
        return self.options.voice or ""

    def start_session(self, text: str | None, wake: Callable[[], None]) -> TtsSession:
        """On a thread: reading takes time. Raises what Speaking does."""
        card = self.engine.tts_card
        front = frontend_for(card, self.voice, lexicon=self.lexicon, max_characters=self.most_characters)
        return TtsSession(self.engine.client, front, self.options, wake, text)

    def headers(self, ignored: tuple[str, ...]) -> dict[str, str]:
        values = (self.engine.name, self.voice, str(self.encoder.to_hz), ", ".join(ignored))
        return {name: value for name, value in zip(SPEECH_HEADERS, values, strict=True) if value}


class SpeechResponse(Response):
    """Bytes of sound, or events that hold them. Takes over what `held` holds, the saying among it."""

    def __init__(
        self,
        asked: SpeechRequest,
        speaker: SpeechSynthesizer,
        saying: SpeechStream,
        held: contextlib.AsyncExitStack,
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.media_type = "text/event-stream" if asked.sse else speaker.encoder.content_type
        self._request, self._stream, self._resources = asked, saying, held
        self.init_headers(
            {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **speaker.headers(asked.ignored)}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = request_context(scope)
        async with self._resources, contextlib.aclosing(self._rendered(visit)) as pieces:
            first = await anext(pieces)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in with_error_event(pieces, scope) if self._request.sse else pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rendered(self, visit: RequestContext) -> AsyncGenerator[bytes, None]:
        saying = self._stream
        try:
            async for piece in saying:
                if found := self._events(piece) if self._request.sse else piece.audio:
                    yield found
            if self._request.sse:
                yield encode_done(len(self._request.text), saying.synthesized_samples, saying.rate_hz)
        finally:
            visit.synthesized_s = saying.seconds

    def _events(self, piece: SpeechChunk) -> bytes:
        told = encode_words(piece.sentence) if self._request.words and piece.sentence else b""
        return told + (encode_audio_delta(piece.audio) if piece.audio else b"")


class SpeechEndpoint:
    """ASGI: the WebSockets of this route, accepted already."""

    def __init__(self, desk: SpeechDependencies) -> None:
        self._dependencies = desk
        config = desk.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, desk = request_context(scope), self._dependencies
        FormFields(parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True), QUERY)
        talk = SpeechConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            partial(self._begin, visit),
            self._limits,
            desk.config.max_characters,
            partial(live_error_event, request_id=visit.request_id, path=speech_messages.PATH),
        )
        try:
            with desk.admission.on_drain(talk.drain):
                told = await talk.run()
        finally:
            visit.synthesized_s = talk.synthesized_s
        await close_conversation(talk, told, visit, receive, send)

    def _begin(self, visit: RequestContext, start: StartSpeech) -> SpeechSession:
        """Raises what `Speaker.of` does, AtCapacity."""
        desk = self._dependencies
        speaker = SpeechSynthesizer.resolve(desk, start)
        visit.model = speaker.engine.name
        with contextlib.ExitStack() as held:
            held.enter_context(desk.admission.reserve_work())
            held.enter_context(speaker.engine.in_use())
            inbox = TextQueue()
            saying = SpeechStream(
                desk.executor.threads, partial(speaker.start_session, None), speaker.encoder, inbox
            )
            started = SpeechStarted(
                model=speaker.engine.name,
                voice=speaker.voice,
                format=start.format,
                sample_rate=speaker.encoder.to_hz,
                ignored=start.ignored,
            )
            return SpeechSession(start, started, inbox, saying, held.pop_all())


async def _read_body(request: Request, config: ServeConfig) -> bytes:
    """Raises TextTooLong, RequestTimeout, ClientGone."""
    most, body = max_body_bytes(config.max_characters), bytearray()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(int(length), config.max_characters)
    clock = asyncio.get_running_loop().time
    slowest = config.upload_min_bytes_per_s
    late_s = clock() + config.upload_idle_s
    stream = request.stream()
    try:
        while True:
            due_s = clock() + config.upload_idle_s
            async with asyncio.timeout_at(min(due_s, late_s + len(body) / slowest) if slowest else due_s):
                piece = await anext(stream, None)
            if piece is None:
                return bytes(body)
            body += piece
            if len(body) > most:
                raise _too_large(len(body), config.max_characters)
    except TimeoutError:
        raise RequestTimeout(
            f"the body stood still, or came too slowly, after {len(body)} bytes",
            f"up to {config.upload_idle_s:g} s without any, and {slowest} bytes a second",
            "send all of it at once",
        ) from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent its request") from None


def _too_large(size: int, most_characters: int) -> TextTooLong:
    return TextTooLong(
        f"a body of {size} bytes or more came",
        f"the text may have up to {most_characters} characters",
        "send it in parts, or have max_characters raised",
        param="input",
    )


def routes(desk: SpeechDependencies) -> APIRouter:
    router = APIRouter(tags=["Speech"])

    @router.post(PATH, summary="Have a text spoken", **openapi.speech_operation(desk.config.max_characters))
    async def speech(request: Request) -> Response:
        """OpenAI's route. The first bytes leave with the first sound; who reads slowly is paced."""
        asked = parse_speech_request(await _read_body(request, desk.config), desk.config.max_characters)
        visit = request_context(request.scope)
        async with contextlib.AsyncExitStack() as held:
            speaker = SpeechSynthesizer.resolve(desk, asked)
            visit.model = speaker.engine.name
            held.enter_context(speaker.engine.in_use())
            saying = SpeechStream(
                desk.executor.threads, partial(speaker.start_session, asked.text), speaker.encoder
            )
            held.push_async_callback(saying.close)
            await saying.start()
            return SpeechResponse(asked, speaker, saying, held.pop_all())

    @router.get("/v1/audio/voices", summary="List voices", **openapi.VOICES)
    async def voices() -> Response:
        """Of the models that are loaded, the server's own first."""
        return Response(msgspec.json.encode(VoiceList(desk.voices.list_voices())), media_type=JSON)

    return router


def route(desk: SpeechDependencies) -> WebSocketRoute:
    return WebSocketRoute(speech_messages.PATH, SpeechEndpoint(desk))
