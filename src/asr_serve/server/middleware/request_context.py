"""Outermost middleware: follows a request to the last byte of its response, for its id, log line, metrics and
trace, and watches the client's connection."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_serve.errors import ClientGone, InvalidKey, NotAllowed
from asr_serve.metrics import ServerMetrics
from asr_serve.protocols.ignored_fields import IgnoredFields, collect_ignored_fields
from asr_serve.server.telemetry import logs
from asr_serve.server.telemetry.tracing import RequestTrace, Tracer

CLIENT_GONE = 499
"""Nginx's status for a client that did not wait. Logged and counted, never sent."""
SEND_TIMEOUT_S = 60.0
"""Longest time in which a client may accept nothing of its response."""
DRAIN_BODY_BYTES, DRAIN_BODY_S = 64 << 20, 2.0
"""Limits of what is still read from a client after its response."""
IGNORED_HEADER = "x-ignored"
"""Header of a response: fields of the request that had no effect."""
LANGUAGE_HEADER = "x-identified-language"
"""Header of a response: the result of the identification of its language."""
WEBSOCKET = "WEBSOCKET"
"""Method label of WebSockets; SWITCHING_PROTOCOLS is the status of one that was not refused."""
SWITCHING_PROTOCOLS = 101
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", WEBSOCKET)
_SANE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_KEY = "asr_serve.visit"


class ApiClient(msgspec.Struct, frozen=True):
    """Client of a request: `name` is safe to log. `admin` may load and unload models."""

    name: str
    admin: bool = False
    owner: str = ""
    """Hash of its key, by which what it stores is told from that of others: names follow the order of the keys."""


class RequestContext(msgspec.Struct, kw_only=True):
    """Facts about one request, which routes fill in as they become known."""

    request_id: str
    route: str
    """Template that the path matches."""
    method: str
    trace: RequestTrace
    started_s: float = msgspec.field(default_factory=time.perf_counter)
    client: ApiClient | None = None
    caller: str = ""
    """Identity by which a caller of a route keeps its model. Private: it is hashed, and never logged."""
    status: int = 0
    """0 until it is known."""
    rejection_reason: str = ""
    """Code of the error that it was refused with or failed by."""
    model: str | None = None
    identified_language: str = ""
    """Result of the identification of its language, as in the header; empty: there was none."""
    audio_s: float | None = None
    """Duration of the transcribed audio."""
    synthesized_s: float | None = None
    """Duration of the synthesized audio."""
    first_text_s: float | None = None
    """Time from the head of the request to the first text of its response."""
    upload_bytes: int = 0
    ignored: IgnoredFields = msgspec.field(default_factory=IgnoredFields)
    end_reason: str = ""
    """Outcome of a WebSocket: done, client_gone in the middle of a session, or the code of an error."""

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def mark_first_text(self) -> None:
        if self.first_text_s is None:
            self.first_text_s = self.elapsed_s()


def request_context(scope: Scope) -> RequestContext:
    return cast(RequestContext, scope[_KEY])


def batch_owner(client: ApiClient | None) -> str:
    """Owner of the files and batches that a client sees."""
    return (client.owner if client is not None else "") or "anonymous"


def expect_admin(request: Request, what: str, *, admins: bool) -> str:
    """Name of the administrator who sends a request. `what`: what only those do. `admins`: whether any admin keys are
    configured. Raises NotAllowed, InvalidKey."""
    client = request_context(request.scope).client
    if client is not None and client.admin:
        return client.name
    todo = "send one" if admins else "set admin_keys or admin_keys_file on the server first"
    kind = NotAllowed if "authorization" in request.headers else InvalidKey
    raise kind(f"only administrators {what}", "an admin key, as `Bearer KEY`", todo)


class RequestContextMiddleware:
    """ASGI middleware: creates each request's and WebSocket's RequestContext, and logs and counts it at the end.
    A request is cancelled when its client disconnects; a WebSocket receives that as a message."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        tracer: Tracer,
        template: Callable[[Scope], str],
        *,
        strict_fields: bool = False,
    ) -> None:
        """`template`: returns the route that a scope matches, one of a bounded set. `strict_fields`: no unknown field
        is ignored."""
        self.app, self.metrics, self.tracer, self.template = app, metrics, tracer, template
        self.strict_fields = strict_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        method = scope.get("method", WEBSOCKET)
        method = method if method in METHODS else "other"
        with self.tracer.start_request(method, headers) as trace:
            context = RequestContext(
                request_id=sent_id if _SANE_ID.fullmatch(sent_id) else f"req_{uuid.uuid4().hex}",
                route=self.template(scope),
                method=method,
                trace=trace,
                ignored=IgnoredFields(strict=self.strict_fields),
            )
            scope[_KEY] = context
            token = logs.request_id.set(context.request_id)
            try:
                with collect_ignored_fields(context.ignored):
                    if method == WEBSOCKET:
                        await self._socket(scope, receive, send, context)
                    else:
                        await self._request(scope, receive, send, context)
            finally:
                logs.request_id.reset(token)

    async def _request(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        in_flight = self.metrics.requests_in_flight.labels(context.route)
        in_flight.inc()
        connection = ClientConnection(receive, send, context)
        try:
            await connection.run(self.app, scope)
        finally:
            in_flight.dec()
            self._observe_metrics(context)
            self._log_access(context)
        await connection.drain_request_body()

    async def _socket(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        is_open = self.metrics.live_open.labels(context.route)
        is_open.inc()
        try:
            await self.app(scope, receive, send)
        finally:
            is_open.dec()
            context.end_reason = context.end_reason or context.rejection_reason or "internal_error"
            self.metrics.live_ended.labels(context.route, context.end_reason).inc()
            if context.rejection_reason:
                self.metrics.rejections.labels(context.rejection_reason).inc()
            self._log_access(context)

    def _observe_metrics(self, context: RequestContext) -> None:
        duration_s, route = context.elapsed_s(), context.route
        metrics = self.metrics
        metrics.requests.labels(route, context.method, context.status or 500).inc()
        metrics.request_seconds.labels(route).observe(duration_s)
        if context.rejection_reason:
            metrics.rejections.labels(context.rejection_reason).inc()
        if context.upload_bytes:
            metrics.upload_bytes.labels(route).inc(context.upload_bytes)
        if context.first_text_s is not None:
            metrics.first_text_seconds.labels(route).observe(context.first_text_s)
        if context.audio_s:
            metrics.upload_audio_seconds.labels(route).inc(context.audio_s)
            metrics.real_time_factor.labels(route).observe(duration_s / context.audio_s)

    def _log_access(self, context: RequestContext) -> None:
        """Writes the log line, and the attributes of the trace."""
        route, status, ended = context.route, context.status or 500, context.end_reason or None
        audio_s = context.audio_s or context.synthesized_s
        audio_ms = round(1_000 * audio_s) if audio_s else None
        facts: dict[str, Any] = {
            "request_id": context.request_id,
            "model": context.model,
            "audio_ms": audio_ms,
            "ended": ended,
            "ignored": str(context.ignored) or None,
        }
        context.trace.set_attributes(**{name: value for name, value in facts.items() if value is not None})
        context.trace.set_response(route, status)
        logs.log_access(
            method=context.method,
            route=route,
            status=status,
            duration_ms=1_000 * context.elapsed_s(),
            audio_ms=audio_ms,
            model=context.model,
            client=context.client.name if context.client else None,
            ended=ended,
            ignored=str(context.ignored) or None,
        )


class ClientConnection:
    """Client's connection of one request: what it sends and accepts, and whether it is still there.

    As soon as the body has been read the client is watched; when it disconnects, the request's task is cancelled.
    """

    def __init__(self, receive: Receive, send: Send, context: RequestContext) -> None:
        self._receive, self._send, self.visit = receive, send, context
        self._work: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._answered = self._disconnected = self._read = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Runs the app for this request. A client that disconnects is no error."""
        self._work = asyncio.current_task()
        assert self._work is not None
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._disconnected:
                raise
            self._work.uncancel()
            self.visit.status, self.visit.rejection_reason = CLIENT_GONE, "client_gone"
        finally:
            if self._watcher is not None:
                self._watcher.cancel()

    async def receive(self) -> Message:
        if self._watcher is not None:
            await asyncio.wait({self._watcher})
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._disconnected = True
            return message
        self.visit.upload_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            self._read = True
            self._watcher = asyncio.create_task(self._watch_disconnect())
        return message

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # Servers report the end of a response in the same way.
        if not self._answered and self._work is not None:
            self._disconnected = True
            self._work.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.visit.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.visit.request_id
            if ignored := str(self.visit.ignored):
                headers[IGNORED_HEADER] = ignored
            if self.visit.model is not None:
                headers["x-model"] = self.visit.model
            if self.visit.identified_language:
                headers[LANGUAGE_HEADER] = self.visit.identified_language
        elif not message.get("more_body"):
            self._answered = True
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except TimeoutError:
            self._disconnected = True
            raise ClientGone(f"the client took nothing of its answer for {SEND_TIMEOUT_S:g} s") from None

    async def drain_request_body(self) -> None:
        """Drains the rest of the request's body after the response."""
        if not self._read and not self._disconnected and self.visit.method == "POST":
            await drain_body(self._receive)


async def drain_body(receive: Receive, wait_s: float | None = None) -> None:
    """Reads a little of what a client still sends after its response: closing at once could cost it the last part.

    wait_s: DRAIN_BODY_S, unless given
    """
    remaining_bytes = DRAIN_BODY_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_BODY_S if wait_s is None else wait_s):
            while remaining_bytes > 0:
                message = await receive()
                match message["type"]:
                    case "http.disconnect" | "websocket.disconnect":
                        return
                    case "http.request" if not message.get("more_body"):
                        return
                remaining_bytes -= len(message.get("body") or message.get("bytes") or message.get("text") or b"")
