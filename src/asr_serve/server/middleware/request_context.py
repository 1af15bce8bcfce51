"""One request from its head to the last byte of its answer: its id, log line, metrics and trace, and the client's
end of it. The outermost layer of the server."""

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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asr_serve.errors import ClientGone
from asr_serve.metrics import ServerMetrics
from asr_serve.server.telemetry import logs
from asr_serve.server.telemetry.tracing import RequestTrace, Tracer

CLIENT_GONE = 499
"""Nginx's number for a client that did not wait. It is logged and counted, and never sent."""
SEND_TIMEOUT_S = 60.0
"""How long a client may take nothing of its answer."""
DRAIN_BODY_BYTES, DRAIN_BODY_S = 64 << 20, 2.0
"""What is still read of what a client sends whose answer is out."""
WEBSOCKET = "WEBSOCKET"
"""Among the methods; SWITCHING is the status of one that was not refused."""
SWITCHING_PROTOCOLS = 101
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", WEBSOCKET)
_SANE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_KEY = "asr_serve.visit"


class ApiClient(msgspec.Struct, frozen=True):
    """Who asks: `name` is safe to log. `admin` may load and unload models."""

    name: str
    admin: bool = False


class RequestContext(msgspec.Struct, kw_only=True):
    """What is known of a request. Routes fill it in as they learn."""

    request_id: str
    route: str
    """The template that the path matches."""
    method: str
    trace: RequestTrace
    started_s: float = msgspec.field(default_factory=time.perf_counter)
    client: ApiClient | None = None
    status: int = 0
    """0 until it is known."""
    rejection_reason: str = ""
    """The code of the error that it was refused with or failed by."""
    model: str | None = None
    audio_s: float | None = None
    """That was heard."""
    synthesized_s: float | None = None
    """Of sound that was made."""
    first_text_s: float | None = None
    """From the head of the request to the first words of its answer."""
    upload_bytes: int = 0
    end_reason: str = ""
    """How a WebSocket ended: done, client_gone in the middle of a session, or the code of an error."""

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def mark_first_text(self) -> None:
        if self.first_text_s is None:
            self.first_text_s = self.elapsed_s()


def request_context(scope: Scope) -> RequestContext:
    return cast(RequestContext, scope[_KEY])


class RequestContextMiddleware:
    """ASGI: gives each request and each WebSocket its Visit, and tells of it when it is over. A request is
    cancelled when its client goes; a WebSocket hears of that itself."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, tracer: Tracer, template: Callable[[Scope], str]
    ) -> None:
        """`template`: the route that a request matches, from a bounded set."""
        self.app, self.metrics, self.tracer, self.template = app, metrics, tracer, template

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        method = scope.get("method", WEBSOCKET)
        method = method if method in METHODS else "other"
        with self.tracer.start_request(method, headers) as trace:
            visit = RequestContext(
                request_id=sent_id if _SANE_ID.fullmatch(sent_id) else f"req_{uuid.uuid4().hex}",
                route=self.template(scope),
                method=method,
                trace=trace,
            )
            scope[_KEY] = visit
            known = logs.request_id.set(visit.request_id)
            try:
                if method == WEBSOCKET:
                    await self._socket(scope, receive, send, visit)
                else:
                    await self._request(scope, receive, send, visit)
            finally:
                logs.request_id.reset(known)

    async def _request(self, scope: Scope, receive: Receive, send: Send, visit: RequestContext) -> None:
        in_flight = self.metrics.requests_in_flight.labels(visit.route)
        in_flight.inc()
        line = ClientConnection(receive, send, visit)
        try:
            await line.run(self.app, scope)
        finally:
            in_flight.dec()
            self._observe_metrics(visit)
            self._log_access(visit)
        await line.drain_request_body()

    async def _socket(self, scope: Scope, receive: Receive, send: Send, visit: RequestContext) -> None:
        is_open = self.metrics.live_open.labels(visit.route)
        is_open.inc()
        try:
            await self.app(scope, receive, send)
        finally:
            is_open.dec()
            visit.end_reason = visit.end_reason or visit.rejection_reason or "internal_error"
            self.metrics.live_ended.labels(visit.route, visit.end_reason).inc()
            if visit.rejection_reason:
                self.metrics.rejections.labels(visit.rejection_reason).inc()
            self._log_access(visit)

    def _observe_metrics(self, visit: RequestContext) -> None:
        duration_s, route = visit.elapsed_s(), visit.route
        metrics = self.metrics
        metrics.requests.labels(route, visit.method, visit.status or 500).inc()
        metrics.request_seconds.labels(route).observe(duration_s)
        if visit.rejection_reason:
            metrics.rejections.labels(visit.rejection_reason).inc()
        if visit.upload_bytes:
            metrics.upload_bytes.labels(route).inc(visit.upload_bytes)
        if visit.first_text_s is not None:
            metrics.first_text_seconds.labels(route).observe(visit.first_text_s)
        if visit.audio_s:
            metrics.upload_audio_seconds.labels(route).inc(visit.audio_s)
            metrics.real_time_factor.labels(route).observe(duration_s / visit.audio_s)

    def _log_access(self, visit: RequestContext) -> None:
        """The log line, and the end of the trace."""
        route, status, ended = visit.route, visit.status or 500, visit.end_reason or None
        audio_s = visit.audio_s or visit.synthesized_s
        audio_ms = round(1_000 * audio_s) if audio_s else None
        facts: dict[str, Any] = {
            "request_id": visit.request_id,
            "model": visit.model,
            "audio_ms": audio_ms,
            "ended": ended,
        }
        visit.trace.set_attributes(**{name: value for name, value in facts.items() if value is not None})
        visit.trace.set_response(route, status)
        logs.log_access(
            method=visit.method,
            route=route,
            status=status,
            duration_ms=1_000 * visit.elapsed_s(),
            audio_ms=audio_ms,
            model=visit.model,
            client=visit.client.name if visit.client else None,
            ended=ended,
        )


class ClientConnection:
    """The client's end of one request: what it sends, what it takes, and whether it is still there.

    As soon as the body has been read the client is watched; when it goes, the task that works for it is cancelled.
    """

    def __init__(self, receive: Receive, send: Send, visit: RequestContext) -> None:
        self._receive, self._send, self.visit = receive, send, visit
        self._work: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._answered = self._disconnected = self._read = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the app for this request. A client that has gone is no error."""
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
        # Servers tell of the end of an answer in the same way.
        if not self._answered and self._work is not None:
            self._disconnected = True
            self._work.cancel()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.visit.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.visit.request_id
        elif not message.get("more_body"):
            self._answered = True
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except TimeoutError:
            self._disconnected = True
            raise ClientGone(f"the client took nothing of its answer for {SEND_TIMEOUT_S:g} s") from None

    async def drain_request_body(self) -> None:
        """After the answer: take a little of what the client still sends."""
        if not self._read and not self._disconnected and self.visit.method == "POST":
            await drain_body(self._receive)


async def drain_body(receive: Receive, wait_s: float | None = None) -> None:
    """A little of what a client still sends that was told all: closing on it would cost it the last words.

    wait_s: LEFT_S, unless told
    """
    left_bytes = DRAIN_BODY_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_BODY_S if wait_s is None else wait_s):
            while left_bytes > 0:
                message = await receive()
                match message["type"]:
                    case "http.disconnect" | "websocket.disconnect":
                        return
                    case "http.request" if not message.get("more_body"):
                        return
                left_bytes -= len(message.get("body") or message.get("bytes") or message.get("text") or b"")
