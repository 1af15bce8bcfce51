"""Transports of /v1/stream.

WebSocket   binary messages are audio, texts are commands and events
HTTP        the request's body is audio, or messages as those of the WebSocket, and its response server-sent events,
            both at once. Raw ASGI: Starlette's StreamingResponse reads the request, to detect a disconnect, and
            discards what it reads
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from asr_serve.config import ServeConfig
from asr_serve.errors import ClientGone, MalformedRequest, RequestTimeout
from asr_serve.metrics import ServerMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.live.session_state import SavedLiveSession
from asr_serve.protocols.stream.client_messages import (
    EXAMPLE,
    MAX_MESSAGE_CHARACTERS,
    MAX_START_CHARACTERS,
    PATH,
    NewSessionRequest,
    expects_start_message,
    merge_start_message,
    parse_flush_body,
    parse_query,
)
from asr_serve.protocols.stream.message_framing import MessageReader, is_messages_type
from asr_serve.server import openapi
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import (
    JSON,
    TOO_BIG,
    close_code,
    close_websocket,
    error_code,
    live_error_event,
)
from asr_serve.server.middleware.request_context import ApiClient as Key
from asr_serve.server.middleware.request_context import RequestContext, drain_body, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import NO_CLOSE_CODE, LiveDependencies
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S
from asr_serve.server.realtime.stream.connection import StreamConnection
from asr_serve.server.realtime.stream.message_intake import take_message
from asr_serve.server.realtime.stream.session import StartListener, StreamSession
from asr_serve.server.realtime.stream.session_manager import SessionOwner, SessionStorage, StreamSessionManager
from asr_serve.server.server_sent_events import KEEP_ALIVE, KEEP_ALIVE_S, with_error_event
from asr_serve.server.sessions.redis_store import create_store
from asr_serve.server.sessions.writer import SessionWriter
from asr_serve.server.uploads.request_body import read_body
from asr_serve.units import samples_to_s

NORMAL_CLOSURE = 1_000
"""Close code of a client that ends its session for good."""
SSE_HEADERS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
START_TIMEOUT_S = 10.0
"""Time limit for the start message."""
CONTINUE_TIMEOUT_S = 5.0
"""Longest wait for the body of a client that asks for `100 Continue`, before the response starts without it."""
MIN_TTL_S = 10.0
"""Least time limit of a session's keys in the store."""
COMMAND_TIMEOUT_S = 10.0
"""Time limit for the body of a command."""


def create_session_manager(dependencies: LiveDependencies) -> StreamSessionManager:
    """Creates the session manager of a server."""
    config, meter = dependencies.config, dependencies.metrics.live_route(PATH)

    def begin(
        owner: SessionOwner, request: NewSessionRequest, reserved: ExitStack, context: RequestContext | None
    ) -> tuple[str, StartListener]:
        watch = None
        if context is None:
            engine = dependencies.engines.get(request.model)
        else:
            models = CallerModels(dependencies.engines, context)
            engine = models.get(request.model)
            watch = models.watch(request.model, "live")
        reserved.enter_context(dependencies.admission.reserve_session(cast(Key, owner)))
        reserved.enter_context(engine.in_use())

        @contextmanager
        def lease() -> Iterator[None]:
            with reserved.pop_all():
                yield

        def start_listener(
            on_events: Callable[[list[LiveEvent]], None], saved: SavedLiveSession | None
        ) -> AsyncListener:
            return AsyncListener(
                engine.client,
                engine.tokenizer,
                request.options,
                meter,
                lease(),
                on_events,
                api_client=cast(Key, owner).name,
                saved=saved,
                watch=watch,
                identifies=config.sessions.redis_url is None,  # a stored session is continued by its first model
            )

        return engine.name, start_listener

    limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)
    return StreamSessionManager(
        limits,
        config.resume_s,
        config.max_live_sessions,
        dependencies.metrics,
        begin,
        _create_storage(config, dependencies.metrics),
    )


def _create_storage(config: ServeConfig, metrics: ServerMetrics) -> SessionStorage | None:
    """Creates what stores sessions outside the server. Raises OptionError, UnsupportedOption."""
    sessions = config.sessions
    if sessions.redis_url is None:
        return None
    ttl_ms = int(1_000 * max(MIN_TTL_S, 2 * config.resume_s))
    writer = SessionWriter(create_store(sessions), ttl_ms, metrics.session_store)
    return SessionStorage(writer, lambda owner: cast(Key, owner).name, sessions.checkpoint_ms)


@asynccontextmanager
async def _connected(
    sessions: StreamSessionManager,
    scope: Scope,
    read: Callable[[StreamSession, StreamConnection], Coroutine[Any, Any, int | None]],
    *,
    packets: bool,
    query: dict[str, Any],
) -> AsyncIterator[tuple[StreamSession, StreamConnection, asyncio.Task[int | None]]]:
    """Opens the session that this connection requests; meanwhile `read` reads from the client."""
    context = request_context(scope)
    assert context.client is not None
    to_event = partial(live_error_event, request_id=context.request_id, path=PATH)
    async with sessions.connect(context.client, parse_query(query, packets=packets), to_event, context) as (
        session,
        connection,
    ):
        context.model, before_samples = session.model, session.received_samples
        reader = asyncio.create_task(read(session, connection))
        reader.add_done_callback(connection.stop_if_failed)
        try:
            yield session, connection, reader
        finally:
            context.audio_s = samples_to_s(session.received_samples - before_samples)
            reader.cancel()
            await asyncio.wait({reader})


async def _query_with_start(scope: Scope, read: Callable[[], Awaitable[bytes | str | None]]) -> dict[str, Any]:
    """Query of a connection with messages, with the options of the first one where it announces them. Raises
    OptionError, MalformedRequest, RequestTimeout, ClientGone."""
    query = _query(scope)
    if not expects_start_message(query):
        return query
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            message = await read()
    except TimeoutError:
        raise RequestTimeout(f"no start came within {START_TIMEOUT_S:g} s", "", "send it first") from None
    if message is None:
        raise ClientGone("the client left before it said what it wants")
    if isinstance(message, bytes):
        raise MalformedRequest("audio came before the start", "with start=true the first message is a text, " + EXAMPLE)
    return merge_start_message(query, message)


def _query(scope: Scope) -> dict[str, Any]:
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


@admitted_as(AdmissionClass.RESERVES_ITSELF)
class StreamWebSocket:
    """ASGI app: one connection, accepted already."""

    def __init__(self, sessions: StreamSessionManager, frame_bytes: int) -> None:
        self._sessions, self._frame_bytes = sessions, frame_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        read = partial(self._read, receive)
        query = await _query_with_start(scope, partial(_first_message, receive))
        async with _connected(self._sessions, scope, read, packets=True, query=query) as (session, connection, reader):
            await _write(send, connection)
        client_code = None if reader.cancelled() or reader.exception() else reader.result()
        if session.ending is not None:
            context.end_reason = error_code(session.ending)
            await close_websocket(receive, send, close_code(session.ending))
        elif session.closed or client_code is None:
            context.end_reason = "done"
            await close_websocket(receive, send, NORMAL_CLOSURE)
        else:
            context.end_reason = "client_gone"
            if client_code == NORMAL_CLOSURE:
                self._sessions.abort(session, "was ended by its client")
            if client_code == NO_CLOSE_CODE:
                # Nothing but a close code reaches a client whose frame granian refused.
                await close_websocket(receive, send, TOO_BIG)

    async def _read(self, receive: Receive, session: StreamSession, connection: StreamConnection) -> int | None:
        """Reads until the client closes; returns its close code. Raises AudioTooLarge to end the connection."""
        while (message := await receive())["type"] == "websocket.receive":
            await take_message(_content(message), session, connection, self._frame_bytes)
        connection.stop()
        return message.get("code")


def _content(message: Message) -> bytes | str:
    frame: bytes | None = message.get("bytes")
    return frame if frame is not None else message.get("text") or ""


async def _first_message(receive: Receive) -> bytes | str | None:
    message = await receive()
    return _content(message) if message["type"] == "websocket.receive" else None


async def _write(send: Send, connection: StreamConnection) -> None:
    async for event in connection.events():
        assert event is not None
        try:
            async with asyncio.timeout(OUTBOX_SEND_TIMEOUT_S):
                await send({"type": "websocket.send", "text": event.json.decode()})
        except TimeoutError:
            raise ClientGone(f"the client took nothing for {OUTBOX_SEND_TIMEOUT_S:g} s") from None


class StreamHttpExchange:
    """ASGI app: one request is one connection."""

    def __init__(self, sessions: StreamSessionManager, frame_bytes: int) -> None:
        self._sessions, self._frame_bytes = sessions, frame_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, query = _Body(receive), _query(scope)
        read, packets = partial(_read, body), False
        if is_messages_type(Headers(scope=scope).get("content-type", "")):
            messages = _BodyMessages(body, self._frame_bytes)
            read, packets = partial(self._read_messages, messages), True
            query = await _query_with_start(scope, messages.next)
        async with _connected(self._sessions, scope, read, packets=packets, query=query) as (
            session,
            connection,
            reader,
        ):
            if Headers(scope=scope).get("expect", "").lower() == "100-continue":
                await _wait_started(body.started, reader)
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            async with aclosing(_sse_chunks(connection)) as chunks:
                async for chunk in with_error_event(chunks, scope, live=True):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if session.ending is not None:
            request_context(scope).end_reason = error_code(session.ending)
        if reader.cancelled():
            # Over HTTP/2 a response that ends before its request resets the stream, and curl then discards
            # what it has not printed yet.
            await drain_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read_messages(
        self, messages: _BodyMessages, session: StreamSession, connection: StreamConnection
    ) -> None:
        """Reads a body of messages, whose end ends the audio. Raises as `_BodyMessages` does, to end the
        connection."""
        while (message := await messages.next()) is not None:
            await take_message(message, session, connection, self._frame_bytes)
        if connection is session.connection:
            session.end()


async def _wait_started(body_started: asyncio.Event, reader: asyncio.Task[Any]) -> None:
    """Waits for the first byte of a body that its client sends only once it is told to continue. The HTTP server says
    so when the body is read, but no longer once the response has started; both are concurrent."""
    started: asyncio.Task[Any] = asyncio.create_task(body_started.wait())
    await asyncio.wait({started, reader}, timeout=CONTINUE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()


class _Body:
    """Body of a request."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.started, self.ended = receive, asyncio.Event(), False

    async def read(self) -> bytes:
        """Returns the next piece, perhaps an empty one; `ended` is set with the last. Raises ClientGone when the body
        breaks off."""
        message = await self._receive()
        self.started.set()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its audio")
        self.ended = not message.get("more_body")
        return cast(bytes, message.get("body", b""))


class _BodyMessages:
    """Messages in a body."""

    def __init__(self, body: _Body, frame_bytes: int) -> None:
        self._body, self._reader = body, MessageReader(frame_bytes, MAX_START_CHARACTERS)

    async def next(self) -> bytes | str | None:
        """Returns the next message; None: the body has ended. Raises ClientGone, MalformedRequest, AudioTooLarge."""
        while (message := self._reader.next()) is None:
            if self._body.ended:
                if self._reader.has_part:
                    raise MalformedRequest("the body ends in the middle of a message", "send all of it")
                return None
            self._reader.append(await self._body.read())
        return message


async def _read(body: _Body, session: StreamSession, connection: StreamConnection) -> None:
    """Reads a body of audio, whose end ends the audio. Raises ClientGone when it breaks off."""
    while not body.ended:
        await session.write(connection, await body.read())
    if connection is session.connection:
        session.end()


async def _sse_chunks(connection: StreamConnection) -> AsyncGenerator[bytes, None]:
    async for event in connection.events(KEEP_ALIVE_S):
        yield KEEP_ALIVE if event is None else event.sse


class AcceptedCommand(msgspec.Struct):
    id: str


def routes(sessions: StreamSessionManager, frame_bytes: int) -> list[BaseRoute]:
    return [
        WebSocketRoute(PATH, StreamWebSocket(sessions, frame_bytes)),
        Route(PATH, StreamHttpExchange(sessions, frame_bytes), methods=["POST"]),
    ]


def commands(sessions: StreamSessionManager) -> APIRouter:
    """Routes of the commands that a client sends beside the body of its session."""
    router = APIRouter(tags=["Live"])

    def get_session(request: Request, session_id: str) -> StreamSession:
        context = request_context(request.scope)
        assert context.client is not None
        return sessions.get(context.client, session_id)

    @router.post(PATH + "/{session_id}/flush", status_code=202, summary="Finish the text so far", **openapi.FLUSH)
    async def flush_session(request: Request, session_id: str) -> Response:
        """Finalizes all audio so far: `flushed` comes among the session's events when its words are final."""
        command = parse_flush_body(
            await read_body(request, "a command", max_bytes=MAX_MESSAGE_CHARACTERS, timeout_s=COMMAND_TIMEOUT_S)
        )
        get_session(request, session_id).flush(command.id)
        return Response(msgspec.json.encode(AcceptedCommand(command.id)), 202, media_type=JSON)

    @router.post(PATH + "/{session_id}/end", status_code=202, summary="End a live session", **openapi.END)
    async def end_session(request: Request, session_id: str) -> Response:
        """Ends the audio: the rest of the text and `end` come among the session's events."""
        await read_body(request, "a command", max_bytes=MAX_MESSAGE_CHARACTERS, timeout_s=COMMAND_TIMEOUT_S)
        get_session(request, session_id).end()
        return Response(b"{}", 202, media_type=JSON)

    return router
