"""/v1/stream over its two transports.

WebSocket   binary messages are audio, texts are commands and events
HTTP        the request's body is audio, its answer server-sent events, both at once. Raw ASGI: Starlette's
            StreamingResponse reads of the request, to see its client go, and keeps what it finds
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.errors import (
    AtCapacity,
    AudioTooLarge,
    ClientGone,
    MalformedRequest,
    OptionError,
    RequestTimeout,
)
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.protocols.stream.client_messages import (
    EXAMPLE,
    MAX_MESSAGE_CHARACTERS,
    PATH,
    FlushCommand,
    NewSessionRequest,
    expects_start_message,
    merge_start_message,
    parse_command,
    parse_flush_body,
    parse_query,
)
from asr_serve.server import openapi
from asr_serve.server.middleware.error_handlers import (
    JSON,
    TOO_BIG,
    close_code,
    close_websocket,
    error_code,
    live_error_event,
)
from asr_serve.server.middleware.request_context import ApiClient as Key
from asr_serve.server.middleware.request_context import drain_body, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import NO_CLOSE_CODE, LiveDependencies
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.session import StartListener, StreamSession
from asr_serve.server.realtime.stream.session_manager import SessionOwner, StreamSessionManager
from asr_serve.server.server_sent_events import KEEP_ALIVE, KEEP_ALIVE_S, with_error_event
from asr_serve.units import samples_to_s

NORMAL_CLOSURE = 1_000
"""What a client closes with that wants no more of its session."""
SSE_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
START_TIMEOUT_S = 10.0
"""How long a client may take to say what it wants."""
COMMAND_TIMEOUT_S = 10.0
"""How long the body of a command may take."""


def create_session_manager(desk: LiveDependencies) -> StreamSessionManager:
    """Those of a server."""
    config, meter = desk.config, desk.metrics.live_route(PATH)

    def begin(owner: SessionOwner, asked: NewSessionRequest) -> tuple[str, StartListener]:
        engine = desk.engines.get(asked.model)

        @contextmanager
        def held() -> Iterator[None]:
            with desk.admission.reserve_session(cast(Key, owner)), engine.in_use():
                yield

        def caller(hear: Callable[[list[LiveEvent]], None]) -> AsyncListener:
            return AsyncListener(engine.client, engine.tokenizer, asked.options, meter, held(), hear)

        return engine.name, caller

    limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)
    return StreamSessionManager(limits, config.resume_s, config.max_live_sessions, desk.metrics, begin)


@asynccontextmanager
async def _connected(
    sessions: StreamSessionManager,
    scope: Scope,
    read: Callable[[StreamSession, StreamConnection], Coroutine[Any, Any, int | None]],
    *,
    packets: bool,
    query: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[StreamSession, StreamConnection, asyncio.Task[int | None]]]:
    """The session that this connection asks for; `read` reads of its client meanwhile."""
    visit = request_context(scope)
    assert visit.client is not None
    query = _query(scope) if query is None else query
    tell = partial(live_error_event, request_id=visit.request_id, path=PATH)
    with sessions.connect(visit.client, parse_query(query, packets=packets), tell) as (session, connection):
        visit.model, before_samples = session.info.model, session.received_samples
        reader = asyncio.create_task(read(session, connection))
        reader.add_done_callback(connection.stop_if_failed)
        try:
            yield session, connection, reader
        finally:
            visit.audio_s = samples_to_s(session.received_samples - before_samples)
            reader.cancel()
            await asyncio.wait({reader})


async def _read_start_message(receive: Receive) -> str:
    """The first message, a text. Raises MalformedRequest, RequestTimeout, ClientGone."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            message = await receive()
    except TimeoutError:
        raise RequestTimeout(f"no start came within {START_TIMEOUT_S:g} s", "", "send it first") from None
    if message["type"] != "websocket.receive":
        raise ClientGone("the client left before it said what it wants")
    if (text := message.get("text")) is None:
        raise MalformedRequest(
            "audio came before the start", "with start=true the first message is a text, " + EXAMPLE
        )
    return cast(str, text)


def _query(scope: Scope) -> dict[str, Any]:
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


class StreamWebSocket:
    """ASGI: one connection, accepted already."""

    def __init__(self, sessions: StreamSessionManager, frame_bytes: int) -> None:
        self._sessions, self._frame_bytes = sessions, frame_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = request_context(scope)
        read = partial(self._read, receive)
        query = _query(scope)
        if expects_start_message(query):
            query = merge_start_message(query, await _read_start_message(receive))
        async with _connected(self._sessions, scope, read, packets=True, query=query) as (
            session,
            connection,
            reader,
        ):
            await _write(send, connection)
        left_code = None if reader.cancelled() or reader.exception() else reader.result()
        if session.ending is not None:
            visit.end_reason = error_code(session.ending)
            await close_websocket(receive, send, close_code(session.ending))
        elif session.closed or left_code is None:
            visit.end_reason = "done"
            await close_websocket(receive, send, NORMAL_CLOSURE)
        else:
            visit.end_reason = "client_gone"
            if left_code == NORMAL_CLOSURE:
                self._sessions.abort(session, "was ended by its client")
            if left_code == NO_CLOSE_CODE:
                # The only word that reaches a client whose frame granian refused.
                await close_websocket(receive, send, TOO_BIG)

    async def _read(self, receive: Receive, session: StreamSession, connection: StreamConnection) -> int | None:
        """What the client closes with, at last. Raises what ends the connection: AudioTooLarge."""
        while (message := await receive())["type"] == "websocket.receive":
            try:
                if (frame := message.get("bytes")) is not None:
                    await self._audio(frame, session, connection)
                else:
                    if connection.congested:
                        await connection.pause_reading(connection.wait_caught_up())
                    _command(message.get("text") or "", session, connection)
            except (MalformedRequest, OptionError, AtCapacity) as error:
                connection.send_error(error)
        connection.stop()
        return message.get("code")

    async def _audio(self, frame: bytes, session: StreamSession, connection: StreamConnection) -> None:
        if len(frame) > self._frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._frame_bytes} are allowed; nothing of this one was taken",
                "go on with the session, and send audio in smaller frames, like 100 ms",
            )
        await session.write(connection, frame)


def _command(text: str, session: StreamSession, connection: StreamConnection) -> None:
    asked = parse_command(text)
    if isinstance(asked, FlushCommand):
        session.flush(asked.id)
    else:
        session.end()


async def _write(send: Send, connection: StreamConnection) -> None:
    async for told in connection.events():
        assert told is not None
        try:
            async with asyncio.timeout(OUTBOX_SEND_TIMEOUT_S):
                await send({"type": "websocket.send", "text": told.json.decode()})
        except TimeoutError:
            raise ClientGone(f"the client took nothing for {OUTBOX_SEND_TIMEOUT_S:g} s") from None


class StreamHttpExchange:
    """ASGI: one request, which is one connection."""

    def __init__(self, sessions: StreamSessionManager) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = partial(_read, receive)
        async with _connected(self._sessions, scope, read, packets=False) as (session, connection, reader):
            # The body is asked for before the answer begins: a client that waits for that sends it at once.
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            async with aclosing(_sse_chunks(connection)) as pieces:
                async for piece in with_error_event(pieces, scope, live=True):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        if session.ending is not None:
            request_context(scope).end_reason = error_code(session.ending)
        if reader.cancelled():
            # Over HTTP/2 an answer that ends before its request resets the stream, and curl then throws away
            # what it has not printed yet.
            await drain_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(receive: Receive, session: StreamSession, connection: StreamConnection) -> None:
    """Until the body ends, which ends the audio. Raises ClientGone when it breaks off."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its audio")
        await session.write(connection, message.get("body", b""))
        if not message.get("more_body"):
            break
    if connection is session.connection:
        session.end()


async def _sse_chunks(connection: StreamConnection) -> AsyncGenerator[bytes, None]:
    async for told in connection.events(KEEP_ALIVE_S):
        yield KEEP_ALIVE if told is None else told.sse


class AcceptedCommand(msgspec.Struct):
    id: str


async def _body(request: Request) -> bytes:
    """Of a command. Raises MalformedRequest, RequestTimeout."""
    body = b""
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_MESSAGE_CHARACTERS:
                    raise MalformedRequest(
                        f"a command of more than {MAX_MESSAGE_CHARACTERS} bytes came",
                        'a command is like {"id":"1"}',
                    )
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not come within {COMMAND_TIMEOUT_S:g} s", "a command is a few bytes"
        ) from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent a command") from None
    return body


def routes(sessions: StreamSessionManager, frame_bytes: int) -> list[BaseRoute]:
    return [
        WebSocketRoute(PATH, StreamWebSocket(sessions, frame_bytes)),
        Route(PATH, StreamHttpExchange(sessions), methods=["POST"]),
    ]


def commands(sessions: StreamSessionManager) -> APIRouter:
    """Beside a body."""
    router = APIRouter(tags=["Live"])

    def of(request: Request, session_id: str) -> StreamSession:
        visit = request_context(request.scope)
        assert visit.client is not None
        return sessions.get(visit.client, session_id)

    @router.post(
        PATH + "/{session_id}/flush", status_code=202, summary="Make final what was said", **openapi.FLUSH
    )
    async def flush_session(request: Request, session_id: str) -> Response:
        """All audio that the session has taken: `flushed` comes among its events when its words are final."""
        asked = parse_flush_body(await _body(request))
        of(request, session_id).flush(asked.id)
        return Response(msgspec.json.encode(AcceptedCommand(asked.id)), 202, media_type=JSON)

    @router.post(PATH + "/{session_id}/end", status_code=202, summary="End a live session", **openapi.END)
    async def end_session(request: Request, session_id: str) -> Response:
        """No more audio will come: the rest of the text and `end` come among its events."""
        await _body(request)
        of(request, session_id).end()
        return Response(b"{}", 202, media_type=JSON)

    return router
