"""Events of a log over a WebSocket: the messages of those who listen to the edge without server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from asr_serve.edge.event_log import EdgeEventLog, EventPosition
from asr_serve.errors import AsrServeError, MalformedRequest, NotAllowed, RequestTimeout
from asr_serve.server.middleware.admission import origin_host
from asr_serve.server.middleware.error_handlers import close_code, close_websocket, problem_for, retry_after_ms
from asr_serve.server.server_sent_events import KEEP_ALIVE_S

SEND_TIMEOUT_S = 30.0
"""Longest time that a listener may take for one message."""
NORMAL = 1_000
KEEP_ALIVE = '{"type":"keep_alive"}'


def check_origin(websocket: WebSocket) -> None:
    """Refuses pages of other origins, which browsers let open WebSockets anywhere. Raises NotAllowed."""
    origin = websocket.headers.get("origin")
    if origin is not None and origin_host(origin) != websocket.headers.get("host"):
        raise NotAllowed(f"a page of {origin[:100]} called", "pages of this edge's own address, and other clients")


async def send_events(websocket: WebSocket, log: EdgeEventLog, position: EventPosition) -> None:
    """Sends the events behind a position, and closes after the last one of the log. Raises MalformedRequest when
    anything is sent here, RequestTimeout for a listener that does not read."""
    sending = asyncio.ensure_future(_send(websocket, log, position))
    reading = asyncio.ensure_future(_read(websocket))
    try:
        await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, reading):
            task.cancel()
        results = await asyncio.gather(sending, reading, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            raise result
    await close_websocket(websocket.receive, websocket.send, NORMAL)


async def refuse(websocket: WebSocket, error: AsrServeError) -> None:
    """Sends an error as the last event, and closes."""
    problem = problem_for(error, secrets.token_hex(8))
    fields: dict[str, str | int] = {"type": "error", "code": problem.code or problem.type, "message": problem.message}
    if (retry_ms := retry_after_ms(error)) is not None:
        fields["retry_after_ms"] = retry_ms
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it has left
        await close_websocket(
            websocket.receive, websocket.send, close_code(error), msgspec.json.encode(fields).decode()
        )


async def _send(websocket: WebSocket, log: EdgeEventLog, position: EventPosition) -> None:
    async with contextlib.aclosing(log.listen(position, KEEP_ALIVE_S)) as events:
        async for event in events:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await websocket.send_text(KEEP_ALIVE if event is None else event.message)
            except TimeoutError:
                raise RequestTimeout(
                    f"a message was not read within {SEND_TIMEOUT_S:g} s",
                    "a listener that reads",
                    "go on from the last id with ?after=",
                ) from None


async def _read(websocket: WebSocket) -> None:
    """Waits until the listener leaves."""
    if (await websocket.receive())["type"] != "websocket.disconnect":
        raise MalformedRequest("a message came", "nothing: this connection tells events")
