"""Mapping of errors to responses: the one place where an exception becomes an answer in OpenAI's format."""

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
from asr_serve.protocols.deepgram import live_messages
from asr_serve.protocols.deepgram.listen_query import LISTEN_PATH
from asr_serve.protocols.deepgram.models import DeepgramProblem
from asr_serve.protocols.deepgram.speak import SPEAK_PATH
from asr_serve.protocols.funasr import runtime, websocket
from asr_serve.protocols.openai import realtime_client_events
from asr_serve.protocols.openai.events import ErrorAnswer, Problem
from asr_serve.protocols.openai.realtime_server_events import ServerEventEncoder
from asr_serve.protocols.riva import methods as riva
from asr_serve.protocols.stream import client_messages, server_events
from asr_serve.protocols.stream import speech_messages as speech_live
from asr_serve.protocols.wyoming import events as wyoming
from asr_serve.server.middleware.request_context import CLIENT_GONE, SWITCHING_PROTOCOLS, drain_body, request_context

JSON = "application/json"
NORMAL_CLOSURE = 1_000
POLICY, TOO_BIG, INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER = 1_008, 1_009, 1_011, 1_012, 1_013
"""WebSocket close codes."""
CLOSE_TIMEOUT_S = 2.0
"""Longest time to send a WebSocket's client its last event and the close code."""
DRAIN_WEBSOCKET_S = 0.5
"""Time to drain what a WebSocket's client still sends after its last event."""
RESTART_MS = 2_000
"""Retry time while an engine starts or restarts."""

DEEPGRAM_PATHS = (LISTEN_PATH, SPEAK_PATH)

log = logging.getLogger(__name__)


class ErrorMapping(NamedTuple):
    """Response to a class of errors. `code` None: the error's own."""

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
    ErrorMapping(errors.UnknownCall, 404),
    ErrorMapping(errors.UnknownFile, 404),
    ErrorMapping(errors.UnknownBatch, 404),
    ErrorMapping(errors.FileInUse, 409),
    ErrorMapping(errors.BatchEnded, 409),
    ErrorMapping(errors.QuotaExceeded, 413),
    ErrorMapping(errors.UnsupportedMediaType, 415),
    ErrorMapping(errors.PreconditionRequired, 428),
    ErrorMapping(errors.PreconditionFailed, 412),
    ErrorMapping(errors.Unprocessable, 422),
    ErrorMapping(errors.UnknownSession, 404),
    ErrorMapping(errors.SessionExpired, 410),
    ErrorMapping(errors.EventsExpired, 410),
    ErrorMapping(errors.TakenOver, 409),
    ErrorMapping(errors.ClientGone, CLIENT_GONE),
    ErrorMapping(errors.RequestError, 400),
    ErrorMapping(errors.UnknownModel, 404, code="model_not_found"),
    ErrorMapping(errors.ModelNotLoaded, 404),
    ErrorMapping(errors.WeightsMissing, 404),
    ErrorMapping(errors.ProgramMissing, 404),
    ErrorMapping(errors.CacheNotWritable, 503, "server_error"),
    ErrorMapping(errors.WrongModel, 400),
    ErrorMapping(errors.PromotionRefused, 409),
    ErrorMapping(errors.UnknownRoute, 404),
    ErrorMapping(errors.EvaluationsUnreadable, 503, "server_error"),
    ErrorMapping(errors.EvaluationError, 404),
    ErrorMapping(errors.Draining, 503, "server_error"),
    ErrorMapping(errors.StoreUnavailable, 503, "server_error"),
    ErrorMapping(errors.ModelUnavailable, 503, "server_error"),
    ErrorMapping(errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorMapping(errors.AtCapacity, 429, "rate_limit_error"),
    ErrorMapping(errors.EngineClosed, 503, "server_error"),
    ErrorMapping(errors.EngineCrashed, 500, "server_error"),
    ErrorMapping(errors.AsrServeError, 500, "server_error"),
)
"""Mappings in order: the first that fits applies. Codes are OpenAI's where its clients look for them."""


def error_mapping(error: AsrServeError) -> ErrorMapping:
    return next(mapping for mapping in ERROR_MAPPINGS if isinstance(error, mapping.error))


def error_status(error: Exception) -> int:
    """HTTP status of an error."""
    return error_mapping(error).status if isinstance(error, AsrServeError) else 500


def error_code(error: AsrServeError) -> str:
    """Code of the error in responses and metrics."""
    return error_mapping(error).code or error.code


def problem_for(error: Exception, request_id: str) -> Problem:
    """Problem that a client is sent. For an internal failure it holds the request's id, and no details."""
    if isinstance(error, AsrServeError) and ((kind := error_mapping(error)).status != 500 or _is_permanent(error)):
        return Problem(str(error), kind.type, error.param, error_code(error))
    code = error_code(error) if isinstance(error, AsrServeError) else "internal_error"
    return Problem(
        f"The server failed on this request. Try again; if it happens again, report it with request id {request_id}.",
        "server_error",
        None,
        code,
    )


def error_response(error: Exception, request_id: str, path: str = "") -> Response:
    """Response to an exception at that path."""
    status = error_status(error)
    if path in riva.PATHS:
        return Response(riva_status(error, request_id), status, media_type=JSON)
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        retry_ms = getattr(error, "retry_after_ms", RESTART_MS)
        headers["Retry-After"] = str(max(1, math.ceil(retry_ms / 1_000)))
        headers["retry-after-ms"] = str(retry_ms)
    if _is_permanent(error):
        headers["x-should-retry"] = "false"  # OpenAI's clients retry a 409 or a 500 otherwise
    problem = problem_for(error, request_id)
    if path in DEEPGRAM_PATHS:
        body = DeepgramProblem(problem, problem.code or problem.type, problem.message, request_id)
        return Response(msgspec.json.encode(body), status, headers, JSON)
    return json_error_response(status, problem, headers)


def _is_permanent(error: Exception) -> bool:
    """Returns whether the same request would fail again, and do the same harm."""
    return isinstance(error, errors.EngineCrashed | errors.FileInUse | errors.BatchEnded)


def json_error_response(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(ErrorAnswer(problem)), status, headers, JSON)


def record_error(error: Exception, scope: Scope) -> Problem:
    """Counts the error and, if it is internal, logs it; returns the problem that the client is sent."""
    context = request_context(scope)
    context.rejection_reason = error_code(error) if isinstance(error, AsrServeError) else "internal_error"
    if not isinstance(error, AsrServeError) or error_mapping(error).status == 500:
        log.error("a request failed inside", exc_info=error)
    return problem_for(error, context.request_id)


def retry_after_ms(error: Exception) -> int | None:
    """Retry time for a WebSocket's client; None where there is none."""
    default_ms = RESTART_MS if close_code(error) == TRY_AGAIN_LATER else None
    return getattr(error, "retry_after_ms", default_ms)


def live_error_event(error: Exception, request_id: str, path: str = "/") -> str:
    """Error event in the format of the live protocol at that path."""
    if path == realtime_client_events.PATH:
        return ServerEventEncoder(beta=False).error(*realtime_problem(error, request_id))
    problem = problem_for(error, request_id)
    if path in DEEPGRAM_PATHS:
        return live_messages.deepgram_error(problem.code or problem.type, problem.message, retry_after_ms(error))
    if path == client_messages.PATH:
        return server_events.stream_error(
            problem.code or problem.type, problem.message, retry_after_ms(error), problem.param
        )
    if path == speech_live.PATH:
        return speech_live.speech_error(
            problem.code or problem.type, problem.message, retry_after_ms(error), problem.param
        )
    if path in riva.PATHS:
        return riva_status(error, request_id).decode()
    if path == wyoming.PATH:
        return wyoming.encode_error(problem.code or problem.type, problem.message)
    return websocket.error_answer(problem.code or problem.type, problem.message, retry_after_ms(error))


def riva_status(error: Exception, request_id: str) -> bytes:
    """Status of an error for the gRPC server."""
    return riva.encode_status(error_status(error), problem_for(error, request_id).message, retry_after_ms(error))


def runtime_error_event(error: Exception, request_id: str) -> str:
    """Error event of FunASR's runtime protocol, which is told from FunASR's other one by its first message."""
    problem = problem_for(error, request_id)
    return runtime.runtime_error(problem.code or problem.type, problem.message, retry_after_ms(error))


def realtime_problem(error: Exception, request_id: str) -> tuple[Problem, int | None]:
    """Problem with the code of OpenAI's realtime protocol, and the retry time in ms."""
    problem = problem_for(error, request_id)
    code = realtime_client_events.REALTIME_ERROR_CODES.get(type(error))
    return msgspec.structs.replace(problem, code=code or problem.code), retry_after_ms(error)


def close_code(error: Exception) -> int:
    """WebSocket close code of an error."""
    if isinstance(error, errors.Draining):
        return SERVICE_RESTART
    status = error_status(error)
    return {413: TOO_BIG, 429: TRY_AGAIN_LATER, 503: TRY_AGAIN_LATER, 500: INTERNAL_ERROR}.get(status, POLICY)


async def close_websocket(receive: Receive, send: Send, code: int, last_event: str | None = None) -> None:
    """Closes a WebSocket, whether or not its client is still connected."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            if last_event is not None:
                await send({"type": "websocket.send", "text": last_event})
                await drain_body(receive, DRAIN_WEBSOCKET_S)
            await send({"type": "websocket.close", "code": code})


class ErrorMiddleware:
    """ASGI middleware: answers exceptions of the routes. Once a response has begun it can only be cut off.

    All WebSockets are accepted here: a browser tells its page nothing about a refused handshake. Refused ones get
    one error event, and are closed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, tracked_send)
        except ClientGone as error:
            problem = record_error(error, scope)
            if not started:
                # It may still be connected: an invalid chunk and a half-closed connection look the same. Granian
                # answers 500 where the app does not answer.
                riva_call = scope["path"] in riva.PATHS
                response = error_response(error, "", scope["path"]) if riva_call else json_error_response(400, problem)
                await response(scope, receive, tracked_send)
            request_context(scope).status = CLIENT_GONE
        except Exception as error:
            record_error(error, scope)
            if started:
                if isinstance(error, errors.Draining):
                    return  # cut off on purpose; granian would log an exception as a failure
                raise
            await error_response(error, request_context(scope).request_id, scope["path"])(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        await receive()
        await send({"type": "websocket.accept", "subprotocol": _subprotocol(scope)})
        context.status = SWITCHING_PROTOCOLS
        try:
            await self.app(scope, receive, send)
        except ClientGone as error:
            record_error(error, scope)
            context.status = CLIENT_GONE
            # Has no effect on the client, but without it granian keeps the connection.
            await close_websocket(receive, send, POLICY)
        except Exception as error:
            record_error(error, scope)
            context.status = error_status(error)
            await close_websocket(
                receive, send, close_code(error), live_error_event(error, context.request_id, scope["path"])
            )


SUBPROTOCOLS = (realtime_client_events.SUBPROTOCOL, "token", "bearer", "binary")
"""Subprotocols that are accepted: OpenAI's; Deepgram's, which a key follows; FunASR's."""


def _subprotocol(scope: Scope) -> str | None:
    """Known subprotocol among those offered; a browser disconnects if none is accepted."""
    offered = scope.get("subprotocols", ())
    return next((known for known in SUBPROTOCOLS if known in offered), None)


async def handle_http_exception(request: Request, error: HTTPException) -> Response:
    """FastAPI handler of unknown paths and of methods that are not allowed."""
    context = request_context(request.scope)
    target = f"{request.method} {request.url.path[:100]}"
    headers = error.headers
    if error.status_code == 405:
        allowed = _methods(request) or (error.headers or {}).get("Allow", "")
        headers = {**(error.headers or {}), "Allow": allowed}
        failure = NoSuchRoute(f"{target} is not allowed", f"methods there: {allowed}")
    else:
        failure = NoSuchRoute(f"there is no route {target}", "/openapi.json lists the routes")
    context.rejection_reason = failure.code
    return json_error_response(error.status_code, problem_for(failure, context.request_id), headers)


def _methods(request: Request) -> str:
    """Methods of all routes with the request's path: each method has its own route, FastAPI lists the first's."""
    routes = [route for route in getattr(request.app.state, "routes", ()) if isinstance(route, Route)]
    path = next((route.path for route in routes if route.path_regex.match(request.url.path)), None)
    return ", ".join(sorted({method for route in routes if route.path == path for method in route.methods or ()}))


async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
    """FastAPI handler of invalid values of parameters that it parses itself."""
    first: dict[str, Any] = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    failure = OptionError(f"{place}: {first['msg']}", param=str(first["loc"][-1]))
    context = request_context(request.scope)
    context.rejection_reason = failure.code
    return json_error_response(400, problem_for(failure, context.request_id))
