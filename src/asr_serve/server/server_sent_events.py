"""Responses sent while they are made; server-sent events: comments that keep a quiet connection open, errors after
the status was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from asr_serve.edge.event_log import EdgeEventLog, EventPosition, parse_event_id
from asr_serve.errors import ClientGone
from asr_serve.protocols.openai.events import server_sent_event
from asr_serve.server.middleware.error_handlers import live_error_event, record_error
from asr_serve.server.middleware.request_context import RequestContext, request_context

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 15.0
"""Longest time without a byte: proxies close quiet connections."""
KEEP_ALIVE = b": still listening\n\n"


class StreamedResponse(Response):
    """Response whose pieces are made while it is sent. An error before the first piece is answered with its own
    status, a later one by an event where the pieces are events. Closes `resources`."""

    def __init__(self, media_type: str, headers: Mapping[str, str], resources: contextlib.AsyncExitStack) -> None:
        self.status_code, self.media_type = 200, media_type
        self.background: BackgroundTask | None = None
        self._resources = resources
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})

    def pieces(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Bytes of the response as they are made; one piece at least."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources, contextlib.aclosing(self.pieces(request_context(scope))) as pieces:
            first = await anext(pieces)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in with_error_event(pieces, scope) if self.media_type == EVENT_STREAM else pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_keep_alive(
    pieces: AsyncGenerator[bytes, None], allowed: Callable[[], bool] = lambda: True
) -> AsyncGenerator[bytes, None]:
    """Yields `pieces`, and a comment whenever none came for KEEP_ALIVE_S, while `allowed`."""
    async with contextlib.aclosing(pieces):
        while True:
            pending = asyncio.ensure_future(anext(pieces, None))
            try:
                while not (await asyncio.wait({pending}, timeout=KEEP_ALIVE_S))[0]:
                    if allowed():
                        yield KEEP_ALIVE
            finally:
                pending.cancel()
                await asyncio.wait({pending})
            if (piece := pending.result()) is None:
                return
            yield piece


async def with_error_event(
    events: AsyncGenerator[bytes, None], scope: Scope, live: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yields `events`, then one error event for an exception: the response's status has been sent by then. Closes
    `events` when it ends. `live`: in the format of the live protocol at that path, instead of OpenAI's."""
    async with contextlib.aclosing(events):
        try:
            async for piece in events:
                yield piece
        except ClientGone:
            raise
        except Exception as error:
            problem = record_error(error, scope)
            event = live_error_event(error, request_context(scope).request_id, scope["path"]).encode()
            yield b"event: error\n" + (
                b"data: %s\n\n" % event if live else server_sent_event({"type": "error", "error": problem})
            )


def stream_log(request: Request, log: EdgeEventLog, about: str) -> StreamingResponse:
    """Responds with the events of a log, from the one after `Last-Event-ID` or `after` on. `about`: comment that comes
    first. Raises MalformedRequest, AtCapacity."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    position = parse_event_id(request.headers.get("last-event-id") or request.query_params.get("after", "0"))
    place = contextlib.ExitStack()
    place.enter_context(log.place())  # now: of a burst of requests none gets a place that another has
    return StreamingResponse(_logged_events(log, position, about, place), media_type=EVENT_STREAM, headers=headers)


async def _logged_events(
    log: EdgeEventLog, position: EventPosition, about: str, place: contextlib.ExitStack
) -> AsyncIterator[bytes]:
    # A response that is never sent gives its place back too: the generator inside is closed when nobody has it.
    with place:
        yield f": {about}\n\n".encode()
        async with contextlib.aclosing(log.listen(position, KEEP_ALIVE_S)) as events:
            async for event in events:
                yield KEEP_ALIVE if event is None else event.sse
