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
from asr_serve.protocols.stream import (
    EXAMPLE,
    LONGEST_CHARACTERS,
    PATH,
    Ask,
    Flush,
    ask,
    command,
    flush,
    started,
    starts,
)
from asr_serve.server import documents
from asr_serve.server.layers.replies import (
    JSON,
    TOO_BIG,
    close_code,
    code_of,
    hang_up,
    told_in_stream,
    told_live,
)
from asr_serve.server.layers.visits import Caller as Key
from asr_serve.server.layers.visits import read_left, visit_of
from asr_serve.server.live.caller import Caller
from asr_serve.server.live.life import Limits
from asr_serve.server.live.outbox import SEND_S
from asr_serve.server.sockets import NO_CODE, Desk
from asr_serve.server.streams.connection import Connection
from asr_serve.server.streams.session import Begin, StreamSession
from asr_serve.server.streams.sessions import Owner, Sessions
from asr_serve.server.transcribe import KEEP_ALIVE, KEEP_ALIVE_S
from asr_serve.units import samples_to_s

HUNG_UP = 1_000
"""What a client closes with that wants no more of its session."""
HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
START_S = 10.0
"""How long a client may take to say what it wants."""
COMMAND_S = 10.0
"""How long the body of a command may take."""


def sessions(desk: Desk) -> Sessions:
    """Those of a server."""
    config, meter = desk.config, desk.metrics.live_route(PATH)

    def begin(owner: Owner, asked: Ask) -> tuple[str, Begin]:
        engine = desk.engines.get(asked.model)

        @contextmanager
        def held() -> Iterator[None]:
            with desk.gate.seat(cast(Key, owner)), engine.used():
                yield

        def caller(hear: Callable[[list[LiveEvent]], None]) -> Caller:
            return Caller(engine.client, engine.tokenizer, asked.options, meter, held(), hear)

        return engine.name, caller

    limits = Limits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)
    return Sessions(limits, config.resume_s, config.max_live_sessions, desk.metrics, begin)


@asynccontextmanager
async def _connected(
    sessions: Sessions,
    scope: Scope,
    read: Callable[[StreamSession, Connection], Coroutine[Any, Any, int | None]],
    *,
    packets: bool,
    query: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[StreamSession, Connection, asyncio.Task[int | None]]]:
    """The session that this connection asks for; `read` reads of its client meanwhile."""
    visit = visit_of(scope)
    assert visit.caller is not None
    query = _query(scope) if query is None else query
    tell = partial(told_live, request_id=visit.request_id, path=PATH)
    with sessions.connected(visit.caller, ask(query, packets=packets), tell) as (session, connection):
        visit.model, before_samples = session.facts.model, session.received_samples
        reader = asyncio.create_task(read(session, connection))
        reader.add_done_callback(connection.stop_if_failed)
        try:
            yield session, connection, reader
        finally:
            visit.audio_s = samples_to_s(session.received_samples - before_samples)
            reader.cancel()
            await asyncio.wait({reader})


async def _first(receive: Receive) -> str:
    """The first message, a text. Raises MalformedRequest, RequestTimeout, ClientGone."""
    try:
        async with asyncio.timeout(START_S):
            message = await receive()
    except TimeoutError:
        raise RequestTimeout(f"no start came within {START_S:g} s", "", "send it first") from None
    if message["type"] != "websocket.receive":
        raise ClientGone("the client left before it said what it wants")
    if (text := message.get("text")) is None:
        raise MalformedRequest(
            "audio came before the start", "with start=true the first message is a text, " + EXAMPLE
        )
    return cast(str, text)


def _query(scope: Scope) -> dict[str, Any]:
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


class StreamSocket:
    """ASGI: one connection, accepted already."""

    def __init__(self, sessions: Sessions, frame_bytes: int) -> None:
        self._sessions, self._frame_bytes = sessions, frame_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        read = partial(self._read, receive)
        query = _query(scope)
        if starts(query):
            query = started(query, await _first(receive))
        async with _connected(self._sessions, scope, read, packets=True, query=query) as (
            session,
            connection,
            reader,
        ):
            await _write(send, connection)
        left_code = None if reader.cancelled() or reader.exception() else reader.result()
        if session.ending is not None:
            visit.ended = code_of(session.ending)
            await hang_up(receive, send, close_code(session.ending))
        elif session.over or left_code is None:
            visit.ended = "done"
            await hang_up(receive, send, HUNG_UP)
        else:
            visit.ended = "client_gone"
            if left_code == HUNG_UP:
                self._sessions.drop(session, "was ended by its client")
            if left_code == NO_CODE:
                # The only word that reaches a client whose frame granian refused.
                await hang_up(receive, send, TOO_BIG)

    async def _read(self, receive: Receive, session: StreamSession, connection: Connection) -> int | None:
        """What the client closes with, at last. Raises what ends the connection: AudioTooLarge."""
        while (message := await receive())["type"] == "websocket.receive":
            try:
                if (frame := message.get("bytes")) is not None:
                    await self._audio(frame, session, connection)
                else:
                    if connection.crowded:
                        await connection.wait(connection.caught_up())
                    _command(message.get("text") or "", session, connection)
            except (MalformedRequest, OptionError, AtCapacity) as error:
                connection.refuse(error)
        connection.stop()
        return message.get("code")

    async def _audio(self, frame: bytes, session: StreamSession, connection: Connection) -> None:
        if len(frame) > self._frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._frame_bytes} are allowed; nothing of this one was taken",
                "go on with the session, and send audio in smaller frames, like 100 ms",
            )
        await session.write(connection, frame)


def _command(text: str, session: StreamSession, connection: Connection) -> None:
    asked = command(text)
    if isinstance(asked, Flush):
        session.flush(asked.id)
    else:
        session.end()


async def _write(send: Send, connection: Connection) -> None:
    async for told in connection.told():
        assert told is not None
        try:
            async with asyncio.timeout(SEND_S):
                await send({"type": "websocket.send", "text": told.json.decode()})
        except TimeoutError:
            raise ClientGone(f"the client took nothing for {SEND_S:g} s") from None


class StreamExchange:
    """ASGI: one request, which is one connection."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = partial(_read, receive)
        async with _connected(self._sessions, scope, read, packets=False) as (session, connection, reader):
            # The body is asked for before the answer begins: a client that waits for that sends it at once.
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            async with aclosing(_pieces(connection)) as pieces:
                async for piece in told_in_stream(pieces, scope, live=True):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        if session.ending is not None:
            visit_of(scope).ended = code_of(session.ending)
        if reader.cancelled():
            # Over HTTP/2 an answer that ends before its request resets the stream, and curl then throws away
            # what it has not printed yet.
            await read_left(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(receive: Receive, session: StreamSession, connection: Connection) -> None:
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


async def _pieces(connection: Connection) -> AsyncGenerator[bytes, None]:
    async for told in connection.told(KEEP_ALIVE_S):
        yield KEEP_ALIVE if told is None else told.sse


class Accepted(msgspec.Struct):
    id: str


async def _body(request: Request) -> bytes:
    """Of a command. Raises MalformedRequest, RequestTimeout."""
    body = b""
    try:
        async with asyncio.timeout(COMMAND_S):
            async for piece in request.stream():
                body += piece
                if len(body) > LONGEST_CHARACTERS:
                    raise MalformedRequest(
                        f"a command of more than {LONGEST_CHARACTERS} bytes came", 'a command is like {"id":"1"}'
                    )
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {COMMAND_S:g} s", "a command is a few bytes") from None
    except ClientDisconnect:
        raise ClientGone("the client left while it sent a command") from None
    return body


def routes(sessions: Sessions, frame_bytes: int) -> list[BaseRoute]:
    return [
        WebSocketRoute(PATH, StreamSocket(sessions, frame_bytes)),
        Route(PATH, StreamExchange(sessions), methods=["POST"]),
    ]


def commands(sessions: Sessions) -> APIRouter:
    """Beside a body."""
    router = APIRouter(tags=["Live"])

    def of(request: Request, session_id: str) -> StreamSession:
        visit = visit_of(request.scope)
        assert visit.caller is not None
        return sessions.of(visit.caller, session_id)

    @router.post(
        PATH + "/{session_id}/flush", status_code=202, summary="Make final what was said", **documents.FLUSH
    )
    async def flush_session(request: Request, session_id: str) -> Response:
        """All audio that the session has taken: `flushed` comes among its events when its words are final."""
        asked = flush(await _body(request))
        of(request, session_id).flush(asked.id)
        return Response(msgspec.json.encode(Accepted(asked.id)), 202, media_type=JSON)

    @router.post(PATH + "/{session_id}/end", status_code=202, summary="End a live session", **documents.END)
    async def end_session(request: Request, session_id: str) -> Response:
        """No more audio will come: the rest of the text and `end` come among its events."""
        await _body(request)
        of(request, session_id).end()
        return Response(b"{}", 202, media_type=JSON)

    return router
