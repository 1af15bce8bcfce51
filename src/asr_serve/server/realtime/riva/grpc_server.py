"""gRPC server of Riva's services: each call becomes an ASGI scope for the application, that of StreamingRecognize a
WebSocket, others a POST. Messages pass as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from starlette.types import ASGIApp, Message, Scope

from asr_serve.config import ServeConfig
from asr_serve.errors import ClientGone, Draining
from asr_serve.protocols.riva.methods import PATHS, STREAMING_RECOGNIZE, RivaStatus, decode_status
from asr_serve.server.middleware.error_handlers import NORMAL_CLOSURE, SERVICE_RESTART, riva_status
from asr_serve.server.middleware.request_context import IGNORED_HEADER, RequestContext, request_context
from asr_serve.server.realtime.lifecycle import DRAIN_RETRY_MS
from asr_serve.server.realtime.riva.endpoints import EXTENSION

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message, which is in memory as a whole; `max_body_bytes` may be less."""
SPARE_CALLS = 256
"""Calls beyond the limits, which are refused by them with a retry time."""
IDLE_CONNECTION_MS = 300_000
"""Time without a call after which a connection is closed."""
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 20_000
"""Time without a byte after which a client is asked whether it is there, and to answer that."""
CANCEL_GRACE_S = 0.5
"""Longest wait after the end of a call without a message: gRPC reports a message that its client broke off as the end
too, and only then that the client has left."""
LEAVE_S = 10.0
"""Longest wait for a call to end by itself, once its client has left."""
CLOSE_S = 2.0
"""Longest wait for calls to end when the port is closed."""


class RivaServer:
    """Listens on a port. Belongs to the event loop's thread."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        assert config.riva_port is not None
        self._app, self._config = app, config
        self._server: grpc.aio.Server | None = None
        self._port = config.riva_port

    @property
    def port(self) -> int:
        """Port that it listens on, once started."""
        return self._port

    async def start(self) -> None:
        """Raises RuntimeError if the port cannot be listened on."""
        config = self._config
        calls = config.max_concurrent + config.max_live_sessions + SPARE_CALLS
        self._server = server = grpc.aio.server(
            maximum_concurrent_rpcs=calls,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", calls),
                ("grpc.max_receive_message_length", min(config.max_body_bytes, MAX_MESSAGE_BYTES)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ),
        )
        for path in PATHS:  # any other path gets UNIMPLEMENTED
            service, method = path.strip("/").split("/")
            handlers = {method: grpc.stream_stream_rpc_method_handler(self._handler(path))}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.riva_port}"
        if config.tls_cert is None or config.tls_key is None:
            self._port = server.add_insecure_port(address)
        else:
            key, cert = (Path(name).expanduser().read_bytes() for name in (config.tls_key, config.tls_cert))
            self._port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
        await server.start()
        log.info("Riva's services are served on %s:%d", host, self._port)

    async def close(self) -> None:
        """Closes the port, and breaks off all calls."""
        if self._server is not None:
            await self._server.stop(CLOSE_S)

    def _handler(self, path: str) -> Callable[[Any, Any], Awaitable[None]]:
        async def handle(_: object, context: Any) -> None:
            await self._serve(path, context)

        return handle

    async def _serve(self, path: str, context: Any) -> None:
        call = _SocketCall(context) if path == STREAMING_RECOGNIZE else _RequestCall(context)
        scope = _scope(path, context, call.kind, self._config)
        work = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:  # the client has left, or `close` breaks off
            call.leave()
            if (await asyncio.wait({work}, timeout=LEAVE_S))[1]:
                work.cancel()
                await asyncio.wait({work}, timeout=LEAVE_S)
            raise
        finally:
            call.close()
        facts, status = request_context(scope), call.status
        trailers = _trailers(facts)
        if status is None and (error := _late_error(work, completed=call.completed)) is not None:
            status = decode_status(riva_status(error, facts.request_id))
        if status is not None:
            context.set_code(grpc.StatusCode[status.code])
            context.set_details(status.message)
            if status.retry_after_ms is not None:
                trailers += [
                    (name, str(status.retry_after_ms)) for name in ("retry-after-ms", "grpc-retry-pushback-ms")
                ]
        context.set_trailing_metadata(tuple(trailers))


def _trailers(facts: RequestContext) -> list[tuple[str, str]]:
    """Trailing metadata of a call, which HTTP has as headers."""
    found = {"x-request-id": facts.request_id, "x-model": facts.model, IGNORED_HEADER: str(facts.ignored)}
    return [(name, value) for name, value in found.items() if value]


def _late_error(work: asyncio.Future[None], *, completed: bool) -> Exception | None:
    """Error of a call whose response had begun; None: it has ended well. One that ends without an end was cut off by
    a server that drains."""
    error = None if work.cancelled() else work.exception()
    if error is None and not completed:
        error = Draining("the server is going down", "it ends every call", DRAIN_RETRY_MS)
    return error if error is None or isinstance(error, Exception) else RuntimeError("the call was broken off")


def _scope(path: str, context: Any, kind: str, config: ServeConfig) -> Scope:
    metadata = context.invocation_metadata() or ()
    secure = "s" if config.tls_cert is not None else ""
    scope: dict[str, Any] = {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "scheme": ("ws" if kind == "websocket" else "http") + secure,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in metadata
            if isinstance(value, str)
        ],
        "client": _peer(context.peer()),
        "server": None,
        "state": {},
        "extensions": {EXTENSION: {}},
    }
    if kind == "websocket":
        return scope | {"subprotocols": []}
    return scope | {"method": "POST"}


def _peer(peer: str) -> tuple[str, int]:
    """Address and port of gRPC's name of a peer.

    >>> _peer("ipv4:127.0.0.1:50051"), _peer("ipv6:%5B::1%5D:50051"), _peer("unix:")
    (('127.0.0.1', 50051), ('::1', 50051), ('', 0))
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() else 0


class _Call:
    """A call in messages of ASGI."""

    kind = ""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._reading: asyncio.Future[Any] | None = None
        self._message_received = self._ended = False
        self._gone = asyncio.Event()
        self.status: RivaStatus | None = None
        """Status of an error; None: none came."""
        self.completed = False
        """Whether the application has sent all that it sends."""

    def leave(self) -> None:
        """Tells the application that the client has left."""
        self._gone.set()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def receive(self) -> Message:
        raise NotImplementedError

    async def send(self, message: Message) -> None:
        raise NotImplementedError

    async def _read(self) -> bytes | None:
        """Next message; None where there is none any more: the client has half-closed, or left, or the call is over."""
        if self._ended:
            return None
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({self._reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            message: bytes = reading.result()
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self._gone.set()
            return None
        if message is grpc.aio.EOF:
            self._ended = True
            if not self._message_received:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), CANCEL_GRACE_S)
            return None
        self._message_received = True
        return message

    async def _write(self, message: bytes) -> None:
        if not self._gone.is_set():
            with contextlib.suppress(grpc.aio.BaseError):  # it has left: `receive` says so
                await self._context.write(message)


class _RequestCall(_Call):
    """Call as a request: each part of its body is a message, and so is each of a response's."""

    kind = "http"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._half_closed = self._sent = False
        self._http_status = 0
        self._error = b""

    async def receive(self) -> Message:
        if not self._half_closed and not self._gone.is_set():
            message = await self._read()
            if not self._gone.is_set():
                self._half_closed = message is None
                return {"type": "http.request", "body": message or b"", "more_body": message is not None}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._http_status = message["status"]
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._http_status != 200:
            self._error += body
        elif body or not self._sent:
            self._sent = True
            if self._gone.is_set():
                raise ClientGone("the client left before its answer")
            await self._write(body)
        if not more:
            self.completed = True
            if self._http_status != 200:
                self.status = decode_status(self._error)
            self._gone.set()  # nothing more is read


class _SocketCall(_Call):
    """Call with messages in both directions, as a WebSocket. The half-close is a message without bytes, and a text that
    the application sends is the status of an error."""

    kind = "websocket"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._connected = self._half_closed = False

    async def receive(self) -> Message:
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        if not self._half_closed and not self._gone.is_set():
            if (message := await self._read()) is not None:
                return {"type": "websocket.receive", "bytes": message}
            if not self._gone.is_set():
                self._half_closed = True
                return {"type": "websocket.receive", "text": ""}
        await self._gone.wait()
        return {"type": "websocket.disconnect", "code": NORMAL_CLOSURE}

    async def send(self, message: Message) -> None:
        match message["type"]:
            case "websocket.send":
                if (text := message.get("text")) is not None:
                    self.status = decode_status(text)
                    self._gone.set()
                else:
                    await self._write(message["bytes"])
            case "websocket.close":
                # A server that drains has sent all results, and then this alone.
                self.completed = message.get("code") != SERVICE_RESTART
                self._gone.set()
