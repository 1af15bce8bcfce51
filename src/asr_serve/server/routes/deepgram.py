"""Deepgram's routes: POST /v1/listen, POST /v1/speak, and the WebSocket /v1/speak."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve import __version__
from asr_serve.audio.pcm import wav_header
from asr_serve.errors import UnsupportedMediaType, UnsupportedOption
from asr_serve.protocols.deepgram.listen_query import LISTEN_PATH, ListenQuery, ListenRequest, parse_listen_query
from asr_serve.protocols.deepgram.listen_response import render_listen_answer
from asr_serve.protocols.deepgram.models import model_uuid
from asr_serve.protocols.deepgram.speak import (
    SPEAK_PATH,
    SpeakQuery,
    parse_speak_body,
    parse_speak_query,
    speak_metadata,
)
from asr_serve.server import openapi
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import JSON, NORMAL_CLOSURE, close_websocket, live_error_event
from asr_serve.server.middleware.request_context import request_context
from asr_serve.server.realtime.endpoint import close_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.routes.speech import (
    SpeechDependencies,
    SpeechResponse,
    SpeechSynthesizer,
    begin_speech,
    read_speech_body,
)
from asr_serve.server.routes.transcriptions import TranscriptionDependencies, UploadForm, UploadTranscription
from asr_serve.server.tts.audio_stream import SpeechStream
from asr_serve.server.tts.deepgram_conversation import DeepgramSpeakConversation
from asr_serve.server.uploads.raw_body import RawBody
from asr_serve.units import RATE_HZ

WAV_FORMATS = {"linear16": (1, 2), "alaw": (6, 1), "mulaw": (7, 1)}
"""Encoding -> format tag of a WAV header, and bytes of a sample."""


def listen_routes(dependencies: TranscriptionDependencies) -> APIRouter:
    router = APIRouter(tags=["Transcription"])

    @router.post(LISTEN_PATH, summary="Transcribe audio, as Deepgram does", **openapi.LISTEN)
    @admitted_as(AdmissionClass.WORK)
    async def listen(request: Request) -> Response:
        """Deepgram's route: the body is the audio. Nothing is fetched from addresses."""
        created, context = datetime.now(UTC), request_context(request.scope)
        _check_media_type(request.headers.get("content-type", ""))
        query = parse_listen_query(request.url.query, live=False)
        models = CallerModels(dependencies.engines, context)
        itn, without_effect = query.formatting(models.get_for_files(query.model).card)
        context.ignored.add((*query.ignored, *without_effect))
        parsed = ListenRequest(query, query.transcribe_options(itn))
        digest = hashlib.sha256()
        body = partial(RawBody, header=partial(_wav_header, query), on_bytes=digest.update)
        form = UploadForm(partial(_already_parsed, parsed), (), has_query_fields=True)
        async with UploadTranscription.open(dependencies, request, form, create_body=body, models=models) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            context.mark_first_text()
            sha256 = digest.hexdigest()
            answer = await asyncio.to_thread(
                render_listen_answer, transcript, query, context.request_id, sha256, created
            )
            return Response(answer, media_type=JSON, headers={"dg-request-id": context.request_id})

    return router


def _already_parsed(parsed: ListenRequest, sent: object, *, complete: bool) -> ListenRequest:
    """Request of a query, whatever the body."""
    return parsed


def _check_media_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/json":
        raise UnsupportedOption(
            "a body of JSON came, like one with a url",
            "the body is the audio itself: nothing is fetched from addresses",
            "send the audio, as curl --data-binary @audio.wav does",
            param="url",
        )
    if media_type.startswith("multipart/"):
        raise UnsupportedMediaType(
            "a form came", "the body is the audio itself", "send forms to POST /v1/audio/transcriptions"
        )


def _wav_header(query: ListenQuery, first: bytes) -> bytes:
    """Header of a recording of raw samples; empty for one that has its own."""
    if query.encoding is None or first[:4] == b"RIFF":
        return b""
    tag, size = WAV_FORMATS[query.encoding]
    rate_hz = query.sample_rate_hz or (RATE_HZ if query.encoding == "linear16" else RATE_HZ // 2)
    return wav_header(rate_hz, format_tag=tag, sample_bytes=size)


def speak_routes(dependencies: SpeechDependencies) -> APIRouter:
    router = APIRouter(tags=["Speech"])

    @router.post(SPEAK_PATH, summary="Have a text spoken, as Deepgram does", **openapi.SPEAK)
    @admitted_as(AdmissionClass.WORK)
    async def speak(request: Request) -> Response:
        """Deepgram's route. The first bytes are sent with the first audio; synthesis waits for slow clients."""
        query = parse_speak_query(request.url.query, live=False)
        most, context = dependencies.config.max_characters, request_context(request.scope)
        body = await read_speech_body(request, dependencies.config)
        text = parse_speak_body(body, request.headers.get("content-type", ""), most)
        parsed = query.request(text, *_model_and_voice(dependencies, query))
        async with contextlib.AsyncExitStack() as resources:
            speaker = SpeechSynthesizer.resolve(dependencies, parsed)
            context.model = speaker.engine.name
            context.ignored.add(parsed.ignored)
            resources.enter_context(speaker.engine.in_use())
            stream = SpeechStream(dependencies.executor.threads, partial(speaker.start_session, text), speaker.encoder)
            resources.push_async_callback(stream.close)
            await stream.start()
            response = SpeechResponse(parsed, speaker, stream, resources.pop_all())
            response.headers["dg-request-id"] = context.request_id
            response.headers["dg-model-name"] = speaker.engine.name
            response.headers["dg-model-uuid"] = model_uuid(speaker.engine.name)
            response.headers["dg-char-count"] = str(len(text))
            return response

    return router


def _model_and_voice(dependencies: SpeechDependencies, query: SpeakQuery) -> tuple[str | None, str | None]:
    model, voice = dependencies.voices.model_and_voice(query.name)
    return model, query.voice or voice


@admitted_as(AdmissionClass.LIVE)
class DeepgramSpeakEndpoint:
    """ASGI app of this route's WebSockets, which are accepted already."""

    def __init__(self, dependencies: SpeechDependencies) -> None:
        self._dependencies = dependencies
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, dependencies = request_context(scope), self._dependencies
        query = parse_speak_query(scope["query_string"].decode("latin-1"), live=True)
        context.ignored.add(query.ignored)
        start = query.start(*_model_and_voice(dependencies, query))
        speaker = SpeechSynthesizer.resolve(dependencies, start)
        context.model = speaker.engine.name
        outbox = Outbox(send, OUTBOX_SEND_TIMEOUT_S)
        outbox.send(speak_metadata(context.request_id, speaker.engine.name, speaker.voice, __version__))
        conversation = DeepgramSpeakConversation(
            receive,
            outbox,
            partial(begin_speech, dependencies, context, start),
            self._limits,
            dependencies.config.max_characters,
            partial(live_error_event, request_id=context.request_id, path=SPEAK_PATH),
        )
        try:
            with dependencies.admission.on_drain(conversation.drain):
                error = await conversation.run()
        finally:
            context.synthesized_s = conversation.synthesized_s
        await close_conversation(conversation, error, context, receive, send)
        if conversation.completed:
            await close_websocket(receive, send, NORMAL_CLOSURE)


def speak_route(dependencies: SpeechDependencies) -> WebSocketRoute:
    return WebSocketRoute(SPEAK_PATH, DeepgramSpeakEndpoint(dependencies))
