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
from asr_serve.protocols.fields import Fields
from asr_serve.protocols.speech import live, openai
from asr_serve.protocols.speech.live import Start, Started
from asr_serve.protocols.speech.openai import PCM_RATE_HZ, Ask, VoiceList
from asr_serve.server import documents
from asr_serve.server.engines import Engine, Engines
from asr_serve.server.jobs import Jobs
from asr_serve.server.layers.gate import Gate
from asr_serve.server.layers.replies import JSON, told_in_stream, told_live
from asr_serve.server.layers.visits import Visit, visit_of
from asr_serve.server.live.life import Limits
from asr_serve.server.live.outbox import SEND_S, Outbox
from asr_serve.server.sockets import part
from asr_serve.server.speaking.dialogue import Dialogue
from asr_serve.server.speaking.saying import Inbox, Piece, Saying
from asr_serve.server.speaking.speech import Speech
from asr_serve.server.speaking.voices import Voices
from asr_serve.voices.voice_store import VoiceStore

QUERY = ("api_key",)
HEADERS = ("x-model", "x-voice", "x-sample-rate", "x-ignored")
"""Of an answer: who speaks, at which rate, and which members of the request changed nothing."""


class Desk(NamedTuple):
    """What these routes work with."""

    config: ServeConfig
    voices: Voices
    gate: Gate
    jobs: Jobs

    @classmethod
    def of(cls, config: ServeConfig, engines: Engines, gate: Gate, jobs: Jobs) -> Desk:
        cloned = VoiceStore(voices_dir(config.engine.voices_dir))
        return cls(config, Voices(engines, cloned, config.aliases, config.voice_aliases), gate, jobs)


class Speaker(NamedTuple):
    """Who is to speak, in which way, and to which bytes."""

    engine: Engine
    options: SpeakOptions
    lexicon: dict[str, str]
    most_characters: int
    encoder: AudioEncoder

    @classmethod
    def of(cls, desk: Desk, asked: Ask | Start) -> Speaker:
        """Raises UnknownModel, ModelNotLoaded, WrongModel, EngineClosed, UnknownVoice, UnsupportedOption."""
        voices, most_characters = desk.voices, desk.config.max_characters
        engine = voices.engine(asked.model)
        card, manner = engine.voice_card, msgspec.structs.asdict(asked.manner)
        usual_hz = PCM_RATE_HZ if asked.format == "pcm" else card.rate_hz
        rate_hz = supported_rate_hz(asked.format, asked.rate_hz or usual_hz)
        lexicon = manner.pop("lexicon")
        voice = voices.voice(card, asked.voice)
        options = SpeakOptions(voice=voice, rate_hz=rate_hz, **manner)
        return cls(engine, options, lexicon, most_characters, AudioEncoder(asked.format, rate_hz))

    @property
    def voice(self) -> str:
        return self.options.voice or ""

    def begin(self, text: str | None, wake: Callable[[], None]) -> TtsSession:
        """On a thread: reading takes time. Raises what Speaking does."""
        card = self.engine.voice_card
        front = frontend_for(card, self.voice, lexicon=self.lexicon, max_characters=self.most_characters)
        return TtsSession(self.engine.client, front, self.options, wake, text)

    def headers(self, ignored: tuple[str, ...]) -> dict[str, str]:
        values = (self.engine.name, self.voice, str(self.encoder.to_hz), ", ".join(ignored))
        return {name: value for name, value in zip(HEADERS, values, strict=True) if value}


class Sound(Response):
    """Bytes of sound, or events that hold them. Takes over what `held` holds, the saying among it."""

    def __init__(self, asked: Ask, speaker: Speaker, saying: Saying, held: contextlib.AsyncExitStack) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.media_type = "text/event-stream" if asked.sse else speaker.encoder.content_type
        self._asked, self._saying, self._held = asked, saying, held
        self.init_headers(
            {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **speaker.headers(asked.ignored)}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        async with self._held, contextlib.aclosing(self._rendered(visit)) as pieces:
            first = await anext(pieces)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in told_in_stream(pieces, scope) if self._asked.sse else pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rendered(self, visit: Visit) -> AsyncGenerator[bytes, None]:
        saying = self._saying
        try:
            async for piece in saying:
                if found := self._events(piece) if self._asked.sse else piece.audio:
                    yield found
            if self._asked.sse:
                yield openai.done(len(self._asked.text), saying.said_samples, saying.rate_hz)
        finally:
            visit.said_s = saying.seconds

    def _events(self, piece: Piece) -> bytes:
        told = openai.words(piece.sentence) if self._asked.words and piece.sentence else b""
        return told + (openai.delta(piece.audio) if piece.audio else b"")


class Line:
    """ASGI: the WebSockets of this route, accepted already."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        config = desk.config
        self._limits = Limits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, desk = visit_of(scope), self._desk
        Fields(parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True), QUERY)
        talk = Dialogue(
            receive,
            Outbox(send, SEND_S),
            partial(self._begin, visit),
            self._limits,
            desk.config.max_characters,
            partial(told_live, request_id=visit.request_id, path=live.PATH),
        )
        try:
            with desk.gate.warned(talk.drain):
                told = await talk.run()
        finally:
            visit.said_s = talk.said_s
        await part(talk, told, visit, receive, send)

    def _begin(self, visit: Visit, start: Start) -> Speech:
        """Raises what `Speaker.of` does, AtCapacity."""
        desk = self._desk
        speaker = Speaker.of(desk, start)
        visit.model = speaker.engine.name
        with contextlib.ExitStack() as held:
            held.enter_context(desk.gate.work())
            held.enter_context(speaker.engine.used())
            inbox = Inbox()
            saying = Saying(desk.jobs.threads, partial(speaker.begin, None), speaker.encoder, inbox)
            started = Started(
                model=speaker.engine.name,
                voice=speaker.voice,
                format=start.format,
                sample_rate=speaker.encoder.to_hz,
                ignored=start.ignored,
            )
            return Speech(start, started, inbox, saying, held.pop_all())


async def _body(request: Request, config: ServeConfig) -> bytes:
    """Raises TextTooLong, RequestTimeout, ClientGone."""
    most, body = openai.most_bytes(config.max_characters), bytearray()
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


def routes(desk: Desk) -> APIRouter:
    router = APIRouter(tags=["Speech"])

    @router.post(openai.PATH, summary="Have a text spoken", **documents.speech(desk.config.max_characters))
    async def speech(request: Request) -> Response:
        """OpenAI's route. The first bytes leave with the first sound; who reads slowly is paced."""
        asked = openai.ask(await _body(request, desk.config), desk.config.max_characters)
        visit = visit_of(request.scope)
        async with contextlib.AsyncExitStack() as held:
            speaker = Speaker.of(desk, asked)
            visit.model = speaker.engine.name
            held.enter_context(speaker.engine.used())
            saying = Saying(desk.jobs.threads, partial(speaker.begin, asked.text), speaker.encoder)
            held.push_async_callback(saying.close)
            await saying.begin()
            return Sound(asked, speaker, saying, held.pop_all())

    @router.get("/v1/audio/voices", summary="List voices", **documents.VOICES)
    async def voices() -> Response:
        """Of the models that are loaded, the server's own first."""
        return Response(msgspec.json.encode(VoiceList(desk.voices.every())), media_type=JSON)

    return router


def route(desk: Desk) -> WebSocketRoute:
    return WebSocketRoute(live.PATH, Line(desk))
