"""POST /v1/audio/speech and its WebSocket: text in, audio out while it is synthesized."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.audio.encode.companded_encoder import create_audio_encoder
from asr_serve.audio.encode.stream_encoder import AudioEncoder, supported_rate_hz
from asr_serve.config import ServeConfig, voices_dir
from asr_serve.errors import ClientGone, RequestTimeout, TextTooLong, UnsupportedOption
from asr_serve.pipelines.options import SpeakOptions
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.pipelines.tts.speak import TtsSession
from asr_serve.protocols.form_fields import FormFields, reject_query_fields
from asr_serve.protocols.openai.speech import (
    PATH,
    PCM_RATE_HZ,
    SPEECH_MEMBERS,
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
from asr_serve.server.middleware.admission import AdmissionClass, AdmissionController, admitted_as
from asr_serve.server.middleware.error_handlers import JSON, live_error_event
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.endpoint import close_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.server_sent_events import EVENT_STREAM, StreamedResponse
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.tts.audio_stream import SpeechChunk, SpeechStream, TextQueue
from asr_serve.server.tts.speech_conversation import SpeechConversation
from asr_serve.server.tts.speech_session import SpeechSession
from asr_serve.server.tts.voice_catalog import VoiceCatalog
from asr_serve.voices.voice_store import VoiceStore

QUERY = ("api_key",)
SPEECH_HEADERS = ("x-model", "x-voice", "x-sample-rate")
"""Headers of a response: model, voice, sample rate, and members of the request that had no effect."""


class SpeechDependencies(NamedTuple):
    """Dependencies of these routes."""

    config: ServeConfig
    voices: VoiceCatalog
    admission: AdmissionController
    executor: TranscriptionExecutor

    @classmethod
    def create(
        cls, config: ServeConfig, engines: EngineRegistry, gate: AdmissionController, jobs: TranscriptionExecutor
    ) -> SpeechDependencies:
        cloned = VoiceStore(voices_dir(config.engine.voices_dir))
        return cls(config, VoiceCatalog(engines, cloned, config.voice_aliases), gate, jobs)


class SpeechSynthesizer(NamedTuple):
    """Engine, options and encoder of one speech request."""

    engine: ModelEngine
    options: SpeakOptions
    lexicon: dict[str, str]
    most_characters: int
    encoder: AudioEncoder

    @classmethod
    def resolve(cls, dependencies: SpeechDependencies, request: SpeechRequest | StartSpeech) -> SpeechSynthesizer:
        """Resolves model, voice and audio format of a request. Raises UnknownModel, ModelNotLoaded, WrongModel,
        EngineClosed, UnknownVoice, UnsupportedOption."""
        voices, most_characters = dependencies.voices, dependencies.config.max_characters
        engine = voices.engine(request.model)
        card, style = engine.tts_card, msgspec.structs.asdict(request.style)
        default_hz = PCM_RATE_HZ if request.format == "pcm" else card.rate_hz
        rate_hz = supported_rate_hz(request.format, request.rate_hz or default_hz)
        lexicon = style.pop("lexicon")
        voice = voices.voice(card, request.voice)
        options = SpeakOptions(voice=voice, rate_hz=rate_hz, **style)
        return cls(engine, options, lexicon, most_characters, create_audio_encoder(request.format, rate_hz))

    @property
    def voice(self) -> str:
        return self.options.voice or ""

    def start_session(self, text: str | None, wake: Callable[[], None]) -> TtsSession:
        """Starts the session; blocks while it reads the text. Raises what TtsSession does."""
        card = self.engine.tts_card
        frontend = frontend_for(card, self.voice, lexicon=self.lexicon, max_characters=self.most_characters)
        return TtsSession(self.engine.client, frontend, self.options, wake, text)

    @property
    def headers(self) -> dict[str, str]:
        values = (self.engine.name, self.voice, str(self.encoder.to_hz))
        return {name: value for name, value in zip(SPEECH_HEADERS, values, strict=True) if value}


class SpeechResponse(StreamedResponse):
    """Response of audio bytes, or of events that hold them. Closes `resources`, the stream included."""

    def __init__(
        self,
        request: SpeechRequest,
        speaker: SpeechSynthesizer,
        stream: SpeechStream,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        media_type = EVENT_STREAM if request.sse else speaker.encoder.content_type
        super().__init__(media_type, speaker.headers, resources)
        self._request, self._stream = request, stream

    async def pieces(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        stream = self._stream
        try:
            async for piece in stream:
                if data := self._events(piece) if self._request.sse else piece.audio:
                    yield data
            if self._request.sse:
                yield encode_done(len(self._request.text), stream.synthesized_samples, stream.rate_hz)
        finally:
            context.synthesized_s = stream.seconds

    def _events(self, piece: SpeechChunk) -> bytes:
        words = encode_words(piece.sentence) if self._request.words and piece.sentence else b""
        return words + (encode_audio_delta(piece.audio) if piece.audio else b"")


@admitted_as(AdmissionClass.LIVE)
class SpeechEndpoint:
    """ASGI app of this route's WebSockets, which are accepted already."""

    def __init__(self, dependencies: SpeechDependencies) -> None:
        self._dependencies = dependencies
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, dependencies = request_context(scope), self._dependencies
        FormFields(parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True), QUERY)
        conversation = self._conversation(receive, send, context, partial(begin_speech, self._dependencies))
        try:
            with dependencies.admission.on_drain(conversation.drain):
                error = await conversation.run()
        finally:
            context.synthesized_s = conversation.synthesized_s
        await close_conversation(conversation, error, context, receive, send)

    def call_conversation(self, receive: Receive, send: Send, context: RequestContext) -> SpeechConversation:
        """Makes the conversation of a call, whose sound is s16le at 24 kHz, for its track."""
        return self._conversation(receive, send, context, self._begin_for_track)

    def _conversation(
        self,
        receive: Receive,
        send: Send,
        context: RequestContext,
        begin: Callable[[RequestContext, StartSpeech], SpeechSession],
    ) -> SpeechConversation:
        return SpeechConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            partial(begin, context),
            self._limits,
            self._dependencies.config.max_characters,
            partial(live_error_event, request_id=context.request_id, path=speech_messages.PATH),
        )

    def _begin_for_track(self, context: RequestContext, start: StartSpeech) -> SpeechSession:
        if start.format != "pcm" or start.rate_hz not in (None, PCM_RATE_HZ):
            raise UnsupportedOption(
                f"the format {start.format} at {start.rate_hz or PCM_RATE_HZ} Hz for a call",
                "its track has the one that the offer and the answer agree on",
                "leave the members out",
                param="format",
            )
        model = context.model
        try:
            return begin_speech(self._dependencies, context, start)
        finally:
            context.model = model  # the call's own is the one that hears


def begin_speech(dependencies: SpeechDependencies, context: RequestContext, start: StartSpeech) -> SpeechSession:
    """Creates the session of a speech. Raises AtCapacity, and what `SpeechSynthesizer.resolve` does."""
    speaker = SpeechSynthesizer.resolve(dependencies, start)
    context.model = speaker.engine.name
    with contextlib.ExitStack() as resources:
        resources.enter_context(dependencies.admission.reserve_work())
        resources.enter_context(speaker.engine.in_use())
        texts = TextQueue()
        stream = SpeechStream(
            dependencies.executor.threads, partial(speaker.start_session, None), speaker.encoder, texts
        )
        started = SpeechStarted(
            model=speaker.engine.name,
            voice=speaker.voice,
            format=start.format,
            sample_rate=speaker.encoder.to_hz,
            ignored=start.ignored,
        )
        return SpeechSession(start, started, texts, stream, resources.pop_all())


async def read_speech_body(request: Request, config: ServeConfig) -> bytes:
    """Reads the body of a request for speech. Raises TextTooLong, RequestTimeout, ClientGone."""
    max_bytes, body = max_body_bytes(config.max_characters), bytearray()
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(int(length), config.max_characters)
    clock = asyncio.get_running_loop().time
    min_rate = config.upload_min_bytes_per_s
    deadline_s = clock() + config.upload_idle_s
    stream = request.stream()
    try:
        while True:
            due_s = clock() + config.upload_idle_s
            async with asyncio.timeout_at(min(due_s, deadline_s + len(body) / min_rate) if min_rate else due_s):
                piece = await anext(stream, None)
            if piece is None:
                return bytes(body)
            body += piece
            if len(body) > max_bytes:
                raise _too_large(len(body), config.max_characters)
    except TimeoutError:
        raise RequestTimeout(
            f"the body stood still, or came too slowly, after {len(body)} bytes",
            f"up to {config.upload_idle_s:g} s without any, and {min_rate} bytes a second",
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


def routes(dependencies: SpeechDependencies) -> APIRouter:
    router = APIRouter(tags=["Speech"])

    @router.post(PATH, summary="Have a text spoken", **openapi.speech_operation(dependencies.config.max_characters))
    @admitted_as(AdmissionClass.WORK)
    async def speech(request: Request) -> Response:
        """OpenAI's route. The first bytes are sent with the first audio; synthesis waits for slow clients."""
        reject_query_fields(request.url.query, SPEECH_MEMBERS, "the JSON body")
        parsed = parse_speech_request(
            await read_speech_body(request, dependencies.config), dependencies.config.max_characters
        )
        context = request_context(request.scope)
        async with contextlib.AsyncExitStack() as resources:
            speaker = SpeechSynthesizer.resolve(dependencies, parsed)
            context.model = speaker.engine.name
            context.ignored.add(parsed.ignored)
            resources.enter_context(speaker.engine.in_use())
            stream = SpeechStream(
                dependencies.executor.threads, partial(speaker.start_session, parsed.text), speaker.encoder
            )
            resources.push_async_callback(stream.close)
            await stream.start()
            return SpeechResponse(parsed, speaker, stream, resources.pop_all())

    @router.get("/v1/audio/voices", summary="List voices", **openapi.VOICES)
    async def voices() -> Response:
        """Lists the voices of the loaded models, the default model's first."""
        return Response(msgspec.json.encode(VoiceList(dependencies.voices.list_voices())), media_type=JSON)

    return router


def route(dependencies: SpeechDependencies) -> WebSocketRoute:
    return WebSocketRoute(speech_messages.PATH, SpeechEndpoint(dependencies))
