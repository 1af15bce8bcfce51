"""Errors to the wire: the one place where a failure, whatever it is, becomes an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
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
from asr_serve.protocols.funasr import websocket
from asr_serve.protocols.openai import realtime_client_events
from asr_serve.protocols.openai.events import ErrorAnswer, Problem
from asr_serve.protocols.openai.realtime_server_events import ServerEventEncoder
from asr_serve.protocols.stream import client_messages, server_events
from asr_serve.protocols.stream import speech_messages as speech_live
from asr_serve.server.middleware.request_context import (
    CLIENT_GONE,
    SWITCHING_PROTOCOLS,
    drain_body,
    request_context,
)

JSON = "application/json"
POLICY, TOO_BIG, INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1_008, 1_009, 1_011, 1_012, 1_013
"""WebSocket's close codes."""
CLOSE_TIMEOUT_S = 2.0
"""How long a WebSocket's client may take to be told why it is closed."""
DRAIN_WEBSOCKET_S = 0.5
"""For what a WebSocket's client sends that has just been told to go."""
RESTART_MS = 2_000
"""When to try again while an engine starts or starts anew."""

log = logging.getLogger(__name__)


class ErrorMapping(NamedTuple):
    """How a class of errors is told. `code` None: the error's own."""

    error: type[AsrServeError]
    status: int
    type: str = "invalid_request_error"
    code: str | None = None


ERROR_MAPPINGS = (
    ErrorMapping(errors.AudioTooLarge, 413),
    ErrorMapping(errors.AudioError, 400),
    ErrorMapping(errors.NoSuchVoice, 404),
    ErrorMapping(errors.OptionError, 400),
    ErrorMapping(errors.RequestTimeout, 408),
    ErrorMapping(errors.InvalidKey, 401, code="invalid_api_key"),
    ErrorMapping(errors.NotAllowed, 403, "permission_error"),
    ErrorMapping(errors.NoSuchRoute, 404),
    ErrorMapping(errors.UnknownJob, 404),
    ErrorMapping(errors.SessionExpired, 410),
    ErrorMapping(errors.EventsExpired, 410),
    ErrorMapping(errors.TakenOver, 409),
    ErrorMapping(errors.ClientGone, CLIENT_GONE),
    ErrorMapping(errors.RequestError, 400),
    ErrorMapping(errors.UnknownModel, 404, code="model_not_found"),
    ErrorMapping(errors.ModelNotLoaded, 404),
    ErrorMapping(errors.WeightsMissing, 404),
    ErrorMapping(errors.ProgramMissing, 404),
    ErrorMapping(errors.WrongModel, 400),
    ErrorMapping(errors.Draining, 503, "server_error"),
    ErrorMapping(errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorMapping(errors.AtCapacity, 429, "rate_limit_error"),
    ErrorMapping(errors.EngineClosed, 503, "server_error"),
    ErrorMapping(errors.EngineCrashed, 500, "server_error"),
    ErrorMapping(errors.AsrServeError, 500, "server_error"),
)
"""The first that fits. Where OpenAI's clients look for a code of OpenAI's, they find it."""


def error_mapping(error: AsrServeError) -> ErrorMapping:
    return next(kind for kind in ERROR_MAPPINGS if isinstance(error, kind.error))


def error_code(error: AsrServeError) -> str:
    """The error's name on the wire and among the metrics' reasons."""
    return error_mapping(error).code or error.code


def problem_for(error: Exception, request_id: str) -> Problem:
    """What a client is told. Of failures that are ours it learns the request's id, and nothing from inside."""
    if isinstance(error, AsrServeError) and ((kind := error_mapping(error)).status != 500 or _is_permanent(error)):
        param = error.param if isinstance(error, OptionError) else None
        return Problem(str(error), kind.type, param, error_code(error))
    code = error_code(error) if isinstance(error, AsrServeError) else "internal_error"
    return Problem(
        f"The server failed on this request. Try again; if it stays, report it with request id {request_id}.",
        "server_error",
        None,
        code,
    )


def error_response(error: Exception, request_id: str) -> Response:
    status = error_mapping(error).status if isinstance(error, AsrServeError) else 500
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        retry_ms = getattr(error, "retry_after_ms", RESTART_MS)
        headers["Retry-After"] = str(max(1, math.ceil(retry_ms / 1_000)))
        headers["retry-after-ms"] = str(retry_ms)
    if _is_permanent(error):
        headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again unless told not to
    return json_error_response(status, problem_for(error, request_id), headers)


def _is_permanent(error: Exception) -> bool:
    """Sent again, it would do the same harm again."""
    return isinstance(error, errors.EngineCrashed)


def json_error_response(status: int, what: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(ErrorAnswer(what)), status, headers, JSON)


def record_error(error: Exception, scope: Scope) -> Problem:
    """Count the failure and, where it is ours, log it; returns what a client is told."""
    visit = request_context(scope)
    visit.rejection_reason = error_code(error) if isinstance(error, AsrServeError) else "internal_error"
    if not isinstance(error, AsrServeError) or error_mapping(error).status == 500:
        log.error("a request failed inside", exc_info=error)
    return problem_for(error, visit.request_id)


def retry_after_ms(error: Exception) -> int | None:
    """When a WebSocket's client may try again."""
    usual = RESTART_MS if close_code(error) == TRY_AGAIN_LATER else None
    return getattr(error, "retry_after_ms", usual)


def live_error_event(error: Exception, request_id: str, path: str = "/") -> str:
    """The event that the live client at that path gets."""
    if path == realtime_client_events.PATH:
        return ServerEventEncoder(beta=False).error(*realtime_problem(error, request_id))
    what = problem_for(error, request_id)
    if path == client_messages.PATH:
        return server_events.stream_error(what.code or what.type, what.message, retry_after_ms(error), what.param)
    if path == speech_live.PATH:
        return speech_live.speech_error(what.code or what.type, what.message, retry_after_ms(error), what.param)
    return websocket.error_answer(what.code or what.type, what.message, retry_after_ms(error))


def realtime_problem(error: Exception, request_id: str) -> tuple[Problem, int | None]:
    """With OpenAI's names for what goes wrong there, and when to try again."""
    what = problem_for(error, request_id)
    known = realtime_client_events.REALTIME_ERROR_CODES.get(type(error))
    return msgspec.structs.replace(what, code=known or what.code), retry_after_ms(error)


def close_code(error: Exception) -> int:
    """What a WebSocket is closed with."""
    if isinstance(error, errors.Draining):
        return SERVICE_RESTART
    status = error_mapping(error).status if isinstance(error, AsrServeError) else 500
    return {413: TOO_BIG, 429: TRY_AGAIN_LATER, 503: TRY_AGAIN_LATER, 500: INTERNAL_ERROR}.get(status, POLICY)


async def close_websocket(receive: Receive, send: Send, code: int, last_words: str | None = None) -> None:
    """Close a WebSocket, whether or not its client still listens."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            if last_words is not None:
                await send({"type": "websocket.send", "text": last_words})
                await drain_body(receive, DRAIN_WEBSOCKET_S)
            await send({"type": "websocket.close", "code": code})


class ErrorMiddleware:
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
            what = record_error(error, scope)
            if not begun:
                # It may still listen: a chunk that is none, and a sending half that is closed, look the same. To a
                # request without an answer granian says 500.
                await json_error_response(400, what)(scope, receive, watched)
            request_context(scope).status = CLIENT_GONE
        except Exception as error:
            record_error(error, scope)
            if begun:
                if isinstance(error, errors.Draining):
                    return  # cut off as meant: what is raised here, granian logs as a failure
                raise
            await error_response(error, request_context(scope).request_id)(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = request_context(scope)
        await receive()
        await send({"type": "websocket.accept", "subprotocol": _subprotocol(scope)})
        visit.status = SWITCHING_PROTOCOLS
        try:
            await self.app(scope, receive, send)
        except ClientGone as error:
            record_error(error, scope)
            visit.status = CLIENT_GONE
            await close_websocket(
                receive, send, POLICY
            )  # in vain; but granian keeps the connection of one it was not tried on
        except Exception as error:
            record_error(error, scope)
            visit.status = error_mapping(error).status if isinstance(error, AsrServeError) else 500
            await close_websocket(
                receive, send, close_code(error), live_error_event(error, visit.request_id, scope["path"])
            )


def _subprotocol(scope: Scope) -> str | None:
    """The one we know of those offered; a browser leaves when none is taken."""
    known = realtime_client_events.SUBPROTOCOL
    return known if known in scope.get("subprotocols", ()) else None


async def handle_http_exception(request: Request, error: HTTPException) -> Response:
    """For FastAPI: no such path, or not that method."""
    visit = request_context(request.scope)
    where = f"{request.method} {request.url.path[:100]}"
    headers = error.headers
    if error.status_code == 405:
        allowed = _methods(request) or (error.headers or {}).get("Allow", "")
        headers = {**(error.headers or {}), "Allow": allowed}
        failure = NoSuchRoute(f"{where} is not allowed", f"methods there: {allowed}")
    else:
        failure = NoSuchRoute(f"{where} leads nowhere", "see /openapi.json for what there is")
    visit.rejection_reason = failure.code
    return json_error_response(error.status_code, problem_for(failure, visit.request_id), headers)


def _methods(request: Request) -> str:
    """Of all routes with this path: it is said once for each method, and FastAPI tells of the first."""
    routes = [route for route in getattr(request.app.state, "routes", ()) if isinstance(route, Route)]
    path = next((route.path for route in routes if route.path_regex.match(request.url.path)), None)
    return ", ".join(sorted({method for route in routes if route.path == path for method in route.methods or ()}))


async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
    """For FastAPI: a parameter it declares itself is no good."""
    first: dict[str, Any] = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    failure = OptionError(f"{place}: {first['msg']}", param=str(first["loc"][-1]))
    visit = request_context(request.scope)
    visit.rejection_reason = failure.code
    return json_error_response(400, problem_for(failure, visit.request_id))
