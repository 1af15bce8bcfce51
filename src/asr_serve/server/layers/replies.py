"""Errors to the wire: the one place where a failure, whatever it is, becomes an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_serve import errors
from asr_serve.errors import AsrServeError, ClientGone, NoSuchRoute, OptionError
from asr_serve.protocols import funasr_live, openai_realtime, stream, stream_events
from asr_serve.protocols.openai import ErrorAnswer, Problem, event
from asr_serve.protocols.openai_realtime_items import Voice
from asr_serve.protocols.speech import live as speech_live
from asr_serve.server.layers.visits import CLIENT_GONE, SWITCHING, read_left, visit_of

JSON = "application/json"
POLICY, TOO_BIG, INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1_008, 1_009, 1_011, 1_012, 1_013
"""WebSocket's close codes."""
LAST_WORDS_S = 2.0
"""How long a WebSocket's client may take to be told why it is closed."""
LEFT_OF_SOCKET_S = 0.5
"""For what a WebSocket's client sends that has just been told to go."""
RESTART_MS = 2_000
"""When to try again while an engine starts or starts anew."""

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """How a class of errors is told. `code` None: the error's own."""

    error: type[AsrServeError]
    status: int
    type: str = "invalid_request_error"
    code: str | None = None


KINDS = (
    Kind(errors.AudioTooLarge, 413),
    Kind(errors.AudioError, 400),
    Kind(errors.NoSuchVoice, 404),
    Kind(errors.OptionError, 400),
    Kind(errors.RequestTimeout, 408),
    Kind(errors.InvalidKey, 401, code="invalid_api_key"),
    Kind(errors.NotAllowed, 403, "permission_error"),
    Kind(errors.NoSuchRoute, 404),
    Kind(errors.UnknownJob, 404),
    Kind(errors.SessionExpired, 410),
    Kind(errors.EventsExpired, 410),
    Kind(errors.TakenOver, 409),
    Kind(errors.ClientGone, CLIENT_GONE),
    Kind(errors.RequestError, 400),
    Kind(errors.UnknownModel, 404, code="model_not_found"),
    Kind(errors.ModelNotLoaded, 404),
    Kind(errors.WeightsMissing, 404),
    Kind(errors.ProgramMissing, 404),
    Kind(errors.WrongModel, 400),
    Kind(errors.Draining, 503, "server_error"),
    Kind(errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    Kind(errors.AtCapacity, 429, "rate_limit_error"),
    Kind(errors.EngineClosed, 503, "server_error"),
    Kind(errors.EngineCrashed, 500, "server_error"),
    Kind(errors.AsrServeError, 500, "server_error"),
)
"""The first that fits. Where OpenAI's clients look for a code of OpenAI's, they find it."""


def kind_of(error: AsrServeError) -> Kind:
    return next(kind for kind in KINDS if isinstance(error, kind.error))


def code_of(error: AsrServeError) -> str:
    """The error's name on the wire and among the metrics' reasons."""
    return kind_of(error).code or error.code


def problem(error: Exception, request_id: str) -> Problem:
    """What a client is told. Of failures that are ours it learns the request's id, and nothing from inside."""
    if isinstance(error, AsrServeError) and ((kind := kind_of(error)).status != 500 or _final(error)):
        param = error.param if isinstance(error, OptionError) else None
        return Problem(str(error), kind.type, param, code_of(error))
    code = code_of(error) if isinstance(error, AsrServeError) else "internal_error"
    return Problem(
        f"The server failed on this request. Try again; if it stays, report it with request id {request_id}.",
        "server_error",
        None,
        code,
    )


def reply(error: Exception, request_id: str) -> Response:
    status = kind_of(error).status if isinstance(error, AsrServeError) else 500
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        retry_ms = getattr(error, "retry_after_ms", RESTART_MS)
        headers["Retry-After"] = str(max(1, math.ceil(retry_ms / 1_000)))
        headers["retry-after-ms"] = str(retry_ms)
    if _final(error):
        headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again unless told not to
    return told(status, problem(error, request_id), headers)


def _final(error: Exception) -> bool:
    """Sent again, it would do the same harm again."""
    return isinstance(error, errors.EngineCrashed)


def told(status: int, what: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(ErrorAnswer(what)), status, headers, JSON)


def note(error: Exception, scope: Scope) -> Problem:
    """Count the failure and, where it is ours, log it; returns what a client is told."""
    visit = visit_of(scope)
    visit.reason = code_of(error) if isinstance(error, AsrServeError) else "internal_error"
    if not isinstance(error, AsrServeError) or kind_of(error).status == 500:
        log.error("a request failed inside", exc_info=error)
    return problem(error, visit.request_id)


def retry_ms(error: Exception) -> int | None:
    """When a WebSocket's client may try again."""
    usual = RESTART_MS if close_code(error) == TRY_AGAIN_LATER else None
    return getattr(error, "retry_after_ms", usual)


def told_live(error: Exception, request_id: str, path: str = "/") -> str:
    """The event that the live client at that path gets."""
    if path == openai_realtime.PATH:
        return Voice(beta=False).error(*problem_in_realtime(error, request_id))
    what = problem(error, request_id)
    if path == stream.PATH:
        return stream_events.error(what.code or what.type, what.message, retry_ms(error), what.param)
    if path == speech_live.PATH:
        return speech_live.error(what.code or what.type, what.message, retry_ms(error), what.param)
    return funasr_live.error(what.code or what.type, what.message, retry_ms(error))


def problem_in_realtime(error: Exception, request_id: str) -> tuple[Problem, int | None]:
    """With OpenAI's names for what goes wrong there, and when to try again."""
    what = problem(error, request_id)
    known = openai_realtime.CODES.get(type(error))
    return msgspec.structs.replace(what, code=known or what.code), retry_ms(error)


def close_code(error: Exception) -> int:
    """What a WebSocket is closed with."""
    if isinstance(error, errors.Draining):
        return SERVICE_RESTART
    status = kind_of(error).status if isinstance(error, AsrServeError) else 500
    return {413: TOO_BIG, 429: TRY_AGAIN_LATER, 503: TRY_AGAIN_LATER, 500: INTERNAL_ERROR}.get(status, POLICY)


async def hang_up(receive: Receive, send: Send, code: int, last_words: str | None = None) -> None:
    """Close a WebSocket, whether or not its client still listens."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            if last_words is not None:
                await send({"type": "websocket.send", "text": last_words})
                await read_left(receive, LEFT_OF_SOCKET_S)
            await send({"type": "websocket.close", "code": code})


class Replies:
    """ASGI: what the routes raise is answered here. Once an answer has begun it can only be cut off.

    WebSockets are accepted here, whatever becomes of them: a browser shows its page nothing of a refused
    handshake. Those that are refused get one error event, and are closed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientGone as error:
            what = note(error, scope)
            if not begun:
                # It may still listen: a chunk that is none, and a sending half that is closed, look the same. To a
                # request without an answer granian says 500.
                await told(400, what)(scope, receive, watched)
            visit_of(scope).status = CLIENT_GONE
        except Exception as error:
            note(error, scope)
            if begun:
                if isinstance(error, errors.Draining):
                    return  # cut off as meant: what is raised here, granian logs as a failure
                raise
            await reply(error, visit_of(scope).request_id)(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        await receive()
        await send({"type": "websocket.accept", "subprotocol": _subprotocol(scope)})
        visit.status = SWITCHING
        try:
            await self.app(scope, receive, send)
        except ClientGone as error:
            note(error, scope)
            visit.status = CLIENT_GONE
            await hang_up(
                receive, send, POLICY
            )  # in vain; but granian keeps the connection of one it was not tried on
        except Exception as error:
            note(error, scope)
            visit.status = kind_of(error).status if isinstance(error, AsrServeError) else 500
            await hang_up(receive, send, close_code(error), told_live(error, visit.request_id, scope["path"]))


def _subprotocol(scope: Scope) -> str | None:
    """The one we know of those offered; a browser leaves when none is taken."""
    known = openai_realtime.SUBPROTOCOL
    return known if known in scope.get("subprotocols", ()) else None


async def told_in_stream(events: AsyncIterator[bytes], scope: Scope, live: bool = False) -> AsyncIterator[bytes]:
    """The same server-sent events, and one more for what they raise: the answer has begun as a good one.
    `live`: in the words of a live client's path, instead of OpenAI's."""
    try:
        async for piece in events:
            yield piece
    except ClientGone:
        raise
    except Exception as error:
        what = note(error, scope)
        told = told_live(error, visit_of(scope).request_id, scope["path"]).encode()
        yield b"event: error\n" + (b"data: %s\n\n" % told if live else event({"type": "error", "error": what}))


async def not_found(request: Request, error: HTTPException) -> Response:
    """For FastAPI: no such path, or not that method."""
    visit = visit_of(request.scope)
    where = f"{request.method} {request.url.path[:100]}"
    headers = error.headers
    if error.status_code == 405:
        allowed = _methods(request) or (error.headers or {}).get("Allow", "")
        headers = {**(error.headers or {}), "Allow": allowed}
        failure = NoSuchRoute(f"{where} is not allowed", f"methods there: {allowed}")
    else:
        failure = NoSuchRoute(f"{where} leads nowhere", "see /openapi.json for what there is")
    visit.reason = failure.code
    return told(error.status_code, problem(failure, visit.request_id), headers)


def _methods(request: Request) -> str:
    """Of all routes with this path: it is said once for each method, and FastAPI tells of the first."""
    routes = [route for route in getattr(request.app.state, "routes", ()) if isinstance(route, Route)]
    path = next((route.path for route in routes if route.path_regex.match(request.url.path)), None)
    return ", ".join(sorted({method for route in routes if route.path == path for method in route.methods or ()}))


async def invalid(request: Request, error: RequestValidationError) -> Response:
    """For FastAPI: a parameter it declares itself is no good."""
    first: dict[str, Any] = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    failure = OptionError(f"{place}: {first['msg']}", param=str(first["loc"][-1]))
    visit = visit_of(request.scope)
    visit.reason = failure.code
    return told(400, problem(failure, visit.request_id))
