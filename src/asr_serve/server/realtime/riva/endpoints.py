"""Riva's methods behind the middleware of all routes: keys, limits, logs and metrics are those of HTTP and WebSockets.

A call of StreamingRecognize comes as a WebSocket, others as a POST whose body is a message. Messages of a POST, which
may be large, are parsed and made on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from asr_serve.audio.pcm import wav_header
from asr_serve.errors import (
    AudioTooLong,
    ClientGone,
    IdleTimeout,
    MalformedRequest,
    MissingOption,
    NoSuchRoute,
    RequestTimeout,
    UnknownModel,
    UnsupportedOption,
)
from asr_serve.models.registry import TtsCard
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.prompting import hotword_bias
from asr_serve.pipelines.segments import check_diarization, resolve_language
from asr_serve.protocols.form_fields import errors_named_by_field
from asr_serve.protocols.openai.speech import SpeechWord
from asr_serve.protocols.riva import recognition, synthesis
from asr_serve.protocols.riva.methods import (
    MESSAGE_TYPE,
    RECOGNITION_CONFIG,
    RECOGNIZE,
    STREAMING_RECOGNIZE,
    SYNTHESIS_CONFIG,
    SYNTHESIZE,
    SYNTHESIZE_ONLINE,
)
from asr_serve.protocols.riva.recognition import OPTION_FIELDS, RivaRecognitionOptions, RivaRecognizeRequest, RivaUpload
from asr_serve.protocols.riva.synthesis import RivaSpeechRequest, RivaVoices
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import NORMAL_CLOSURE, close_websocket
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import LiveDependencies, run_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.realtime.riva.conversation import RivaConversation
from asr_serve.server.routes.speech import SpeechDependencies, SpeechSynthesizer
from asr_serve.server.routes.transcriptions import TranscriptionDependencies, UploadForm, UploadTranscription
from asr_serve.server.server_sent_events import StreamedResponse
from asr_serve.server.tts.audio_stream import SpeechStream
from asr_serve.server.tts.voice_catalog import VoiceCatalog, speaks
from asr_serve.server.uploads.raw_body import RawBody
from asr_serve.server.uploads.thread_work import finished_on_thread

EXTENSION = "asr_serve.grpc"
"""Extension of the scopes that the gRPC server makes: nobody else comes in by these routes."""
RECORDING_S = 300.0
"""Longest time in which a recording arrives, where `upload_idle_s` is less: gRPC tells nothing of its parts."""
WAV_FORMATS = {"s16le": (1, 2), "alaw": (6, 1), "mulaw": (7, 1)}
"""Encoding -> format tag of a WAV header, and bytes of a sample."""

SPEECH_FIELDS = {"voice": "voice_name", "language": "language_code", "input": "text", "lexicon": "custom_dictionary"}
"""Options of speech -> the fields that set them."""

Endpoint = Callable[[Request, bytes], Awaitable[Response]]
"""Answers a call with its message."""


def routes(live: LiveDependencies, uploads: TranscriptionDependencies, speech: SpeechDependencies) -> list[BaseRoute]:
    """Routes of all methods."""
    models, voices = RivaModels(live.engines), RivaVoiceList(live.engines, speech.voices)
    synthesizer = RivaSynthesizer(speech)
    message_s = live.config.upload_idle_s
    recording_s = max(message_s, RECORDING_S)
    return [
        _route(RECOGNIZE, AdmissionClass.WORK, RivaRecognizer(uploads).recognize, recording_s),
        _route(RECOGNITION_CONFIG, AdmissionClass.KEY, models.describe, message_s),
        _route(SYNTHESIZE, AdmissionClass.WORK, synthesizer.synthesize, message_s),
        _streamed_route(SYNTHESIZE_ONLINE, synthesizer.synthesize_online),
        _route(SYNTHESIS_CONFIG, AdmissionClass.KEY, voices.describe, message_s),
        WebSocketRoute(STREAMING_RECOGNIZE, RivaStreamingEndpoint(live)),
    ]


def _route(path: str, kind: AdmissionClass, endpoint: Endpoint, message_s: float) -> Route:
    """`message_s`: longest time in which the message arrives."""

    @admitted_as(kind)
    async def call(request: Request) -> Response:
        _check_grpc(request.scope)
        return await endpoint(request, await _read_message(request, message_s))

    return Route(path, call, methods=["POST"], include_in_schema=False)


def _streamed_route(path: str, endpoint: Callable[[Request], Response]) -> Route:
    @admitted_as(AdmissionClass.WORK)
    async def call(request: Request) -> Response:
        _check_grpc(request.scope)
        return endpoint(request)

    return Route(path, call, methods=["POST"], include_in_schema=False)


def _check_grpc(scope: Scope) -> None:
    """Raises NoSuchRoute for a request that did not come by gRPC."""
    if EXTENSION not in scope.get("extensions", {}):
        raise NoSuchRoute(
            f"{scope['path']} is served by gRPC alone", "a call to the port of the setting riva_port", "connect there"
        )


async def _read_message(request: Request, message_s: float) -> bytes:
    """Message of a call. Raises RequestTimeout, ClientGone, MalformedRequest."""
    try:
        async with asyncio.timeout(message_s):
            first = end = await request.receive()
            if first.get("more_body"):
                end = await request.receive()
    except TimeoutError:
        raise RequestTimeout(
            f"no whole message came for {message_s:g} s", "one message, sent at once", "send it again"
        ) from None
    if "http.disconnect" in (first["type"], end["type"]):
        raise ClientGone("the client left while it sent its request")
    if not first["more_body"]:
        raise MalformedRequest("the call ended without a message", "one message", "send it")
    if end["more_body"]:
        raise MalformedRequest("a second message came", f"one message for {request.url.path}", "start another call")
    return bytes(first["body"])


# --- recognition ------------------------------------------------------------------------------------------


class RivaRecognizer:
    """The method Recognize."""

    def __init__(self, dependencies: TranscriptionDependencies) -> None:
        self._dependencies = dependencies

    async def recognize(self, request: Request, message: bytes) -> Response:
        context, dependencies = request_context(request.scope), self._dependencies
        sent = await finished_on_thread(partial(recognition.parse_recognize, message, dependencies.max_beam))
        models = CallerModels(dependencies.engines, context)
        card = models.get_for_files(sent.options.model).card
        with errors_named_by_field(OPTION_FIELDS):
            parsed = RivaUpload(sent.options, sent.options.transcribe_options(card))
        header = _wav_header(sent)
        create_body = partial(RawBody, header=lambda _: header, on_bytes=lambda _: None)
        form = UploadForm(partial(_already_parsed, parsed), (), has_query_fields=True)
        upload = Request(request.scope, _AudioBody(sent.audio, request.receive).receive)
        async with UploadTranscription.open(dependencies, upload, form, create_body=create_body, models=models) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            context.mark_first_text()
            answer = partial(recognition.encode_recognize, transcript, sent.options, sent.id or context.request_id)
            return Response(await finished_on_thread(answer), media_type=MESSAGE_TYPE)


class _AudioBody:
    """Audio of a message, as the body of a request."""

    def __init__(self, audio: bytes, receive: Receive) -> None:
        """`receive`: what tells that the client has left."""
        self._audio: bytes | None = audio
        self._receive = receive

    async def receive(self) -> Message:
        if self._audio is None:
            return await self._receive()
        audio, self._audio = self._audio, None
        return {"type": "http.request", "body": audio, "more_body": False}


def _already_parsed(parsed: RivaUpload, sent: object, *, complete: bool) -> RivaUpload:
    """Request of a message, whatever the audio."""
    return parsed


def _wav_header(request: RivaRecognizeRequest) -> bytes:
    """Header of a recording of samples; empty for one that has its own. Raises MissingOption."""
    options = request.options
    if (encoding := options.raw_encoding(request.audio)) is None:
        return b""
    assert options.rate_hz is not None, "raw_encoding has checked it"
    tag, size = WAV_FORMATS[encoding]
    return wav_header(options.rate_hz, format_tag=tag, sample_bytes=size, channels=options.channels)


@admitted_as(AdmissionClass.LIVE)
class RivaStreamingEndpoint:
    """ASGI app of the method StreamingRecognize."""

    def __init__(self, dependencies: LiveDependencies) -> None:
        self._dependencies, self._meter = dependencies, dependencies.metrics.live_route(STREAMING_RECOGNIZE)
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_grpc(scope)
        context = request_context(scope)
        conversation = RivaConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            self._limits,
            partial(self._open_listener, CallerModels(self._dependencies.engines, context), context),
            self._meter,
            context.request_id,
        )
        await run_conversation(conversation, self._dependencies.admission, context, receive, send)
        if conversation.completed:
            await close_websocket(receive, send, NORMAL_CLOSURE)

    def _open_listener(
        self,
        models: CallerModels,
        context: RequestContext,
        requested: RivaRecognitionOptions,
        on_events: Callable[[list[LiveEvent]], None],
    ) -> AsyncListener:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed, NotAllowed, OptionError, WeightsMissing."""
        engine = models.get(requested.model)
        client = engine.client
        context.model = engine.name
        with errors_named_by_field(OPTION_FIELDS):
            resolve_language(client, requested.language)
            hotword_bias(client, engine.tokenizer, requested.hotwords)
            if requested.speakers:
                check_diarization(client)
            return AsyncListener(
                client,
                engine.tokenizer,
                requested.listen_options(client.card),
                self._meter,
                engine.in_use(),
                on_events,
                api_client=context.client.name if context.client else None,
                watch=models.watch(requested.model, "live"),
            )


class RivaModels:
    """The method GetRivaSpeechRecognitionConfig."""

    def __init__(self, engines: EngineRegistry) -> None:
        self._engines = engines

    async def describe(self, request: Request, message: bytes) -> Response:
        name = await finished_on_thread(partial(recognition.parse_config_request, message))
        cards = [engine.card for engine in self._engines if not engine.is_tts]
        found = [card for card in cards if name in (None, card.name)]
        if not found and name is not None:
            raise UnknownModel(
                f"no model {name[:100]!r} is loaded", f"models: {', '.join(card.name for card in cards)}"
            )
        return Response(recognition.encode_models(found), media_type=MESSAGE_TYPE)


# --- synthesis --------------------------------------------------------------------------------------------


class RivaSynthesizer:
    """The methods Synthesize and SynthesizeOnline."""

    def __init__(self, dependencies: SpeechDependencies) -> None:
        self._dependencies = dependencies

    async def synthesize(self, request: Request, message: bytes) -> Response:
        """Answers with all the audio in one message."""
        context = request_context(request.scope)
        async with contextlib.AsyncExitStack() as resources:
            sent, stream = await self._start(context, message, resources)
            audio, words = list[bytes](), list[SpeechWord]()
            try:
                async for piece in stream:
                    audio.append(piece.audio)
                    words += piece.sentence or () if sent.word_times else ()
            finally:
                context.synthesized_s = stream.seconds
            answer = partial(_encode_speech, audio, sent.id or context.request_id, words)
            return Response(await finished_on_thread(answer), media_type=MESSAGE_TYPE)

    def synthesize_online(self, request: Request) -> Response:
        """Answers with a message for each piece of audio; synthesis waits for slow clients."""
        return _SpeechMessages(self._online(request))

    async def _online(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yields responses for the texts of a call, one after another, until the client half-closes or the call has
        lasted for `max_session_s`, of audio or of time."""
        config, context, done_s = self._dependencies.config, request_context(request.scope), 0.0
        clock = asyncio.get_running_loop().time
        due_s, idle_s = clock() + config.max_session_s, config.upload_idle_s
        while (message := await self._next_message(request, idle_s, due_s)) is not None:
            idle_s = config.session_idle_s
            async with contextlib.AsyncExitStack() as resources:
                sent, stream = await self._start(context, message, resources)
                try:
                    async for piece in stream:
                        if clock() >= due_s or done_s + stream.seconds > config.max_session_s:
                            raise self._too_long()
                        words = piece.sentence or () if sent.word_times else ()
                        if piece.audio or words:
                            yield synthesis.encode_audio(piece.audio, sent.id or context.request_id, words, done_s)
                finally:
                    done_s += stream.seconds
                    context.synthesized_s = done_s
        if not done_s:
            raise MissingOption("no text came", "a SynthesizeSpeechRequest, or several", "send one", param="text")

    async def _next_message(self, request: Request, idle_s: float, due_s: float) -> bytes | None:
        """Next text of a call; None where there is none any more. Raises IdleTimeout, AudioTooLong, ClientGone."""
        idle_due_s = asyncio.get_running_loop().time() + idle_s
        try:
            async with asyncio.timeout_at(min(idle_due_s, due_s)):
                message = await request.receive()
        except TimeoutError:
            if due_s <= idle_due_s:
                raise self._too_long() from None
            raise IdleTimeout(f"no text came for {idle_s:g} s", "the next one, or the end of the call") from None
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its texts")
        return message["body"] if message["more_body"] else None

    def _too_long(self) -> AudioTooLong:
        most_s = self._dependencies.config.max_session_s
        return AudioTooLong(
            "the call has become too long", f"up to {most_s:g} s, of audio and of time", "start another one"
        )

    async def _start(
        self, context: RequestContext, message: bytes, resources: contextlib.AsyncExitStack
    ) -> tuple[RivaSpeechRequest, SpeechStream]:
        """Starts the speech of a text. Raises what prevents it."""
        dependencies = self._dependencies
        most = dependencies.config.max_characters
        sent = await finished_on_thread(partial(synthesis.parse_synthesize, message, most))
        with errors_named_by_field(SPEECH_FIELDS):
            speaker = SpeechSynthesizer.resolve(dependencies, sent.speech(*_model_and_voice(dependencies.voices, sent)))
            _check_language(speaker.engine.tts_card, speaker.voice, sent.language)
            context.model = speaker.engine.name
            resources.enter_context(speaker.engine.in_use())
            stream = SpeechStream(
                dependencies.executor.threads, partial(speaker.start_session, sent.text), speaker.encoder
            )
            resources.push_async_callback(stream.close)
            await stream.start()
        return sent, stream


def _encode_speech(audio: list[bytes], request_id: str, words: list[SpeechWord]) -> bytes:
    return synthesis.encode_audio(b"".join(audio), request_id, words)


class _SpeechMessages(StreamedResponse):
    """Response of messages with audio."""

    def __init__(self, messages: AsyncGenerator[bytes, None]) -> None:
        super().__init__(MESSAGE_TYPE, {}, contextlib.AsyncExitStack())
        self._messages = messages

    def pieces(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        return self._messages


def _model_and_voice(voices: VoiceCatalog, request: RivaSpeechRequest) -> tuple[str | None, str | None]:
    """Model and voice of a request, by the name of a voice, of a model, or of both with a dot between, as voices are
    listed; without the name of a voice, by the language. Raises UnsupportedOption for a language that nobody speaks."""
    name, language = request.voice, request.language
    if name is None:
        return (None, None) if language is None else voices.voice_speaking(language)
    model, _, subvoice = name.partition(".")
    if subvoice and voices.model_of(subvoice) is not None and voices.model_of(name) is None:
        return model, subvoice
    model_named, voice = voices.model_and_voice(name)
    if voice is not None:
        return voices.model_of(voice), voice
    return (model_named, None) if language is None else voices.voice_speaking(language, model_named)


def _check_language(card: TtsCard, voice: str, language: str | None) -> None:
    """Raises UnsupportedOption for a language that the voice does not speak."""
    if language is not None and not speaks(card, voice, language):
        raise UnsupportedOption(
            f"language_code={language[:40]!r} with the voice {voice} of {card.name}",
            f"its language: {card.language(voice)}",
            "name that one, or another voice",
            param="language_code",
        )


class RivaVoiceList:
    """The method GetRivaSynthesisConfig."""

    def __init__(self, engines: EngineRegistry, voices: VoiceCatalog) -> None:
        self._engines, self._voices = engines, voices

    async def describe(self, request: Request, message: bytes) -> Response:
        name = await finished_on_thread(partial(synthesis.parse_config_request, message))
        cards = [engine.tts_card for engine in self._engines if engine.is_tts]
        if name is not None and name not in [card.name for card in cards]:
            names = ", ".join(card.name for card in cards) or "none"
            raise UnknownModel(f"no voice model {name[:100]!r} is loaded", f"voice models: {names}")
        listed = self._voices.list_voices()
        found = [
            RivaVoices(card.name, voices, {voice: card.language(voice) for voice in voices}, card.rate_hz)
            for card in cards
            if name in (None, card.name)
            for voices in [[each.name for each in listed if each.model == card.name]]
        ]
        return Response(synthesis.encode_voices(found), media_type=MESSAGE_TYPE)
