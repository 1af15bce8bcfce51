"""TCP server of Wyoming: each connection becomes an ASGI scope, as a WebSocket is one, for the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.types import ASGIApp, Message

from asr_serve.protocols.wyoming.events import PATH
from asr_serve.server.realtime.wyoming.endpoint import EXTENSION

log = logging.getLogger(__name__)

READ_BYTES = 65_536
CLOSE_S = 2.0
"""Longest wait for a client to take its last bytes."""
MAX_WYOMING_CONNECTIONS = 256
"""Connections at once; one beyond that is closed at once. Each is a live session too (`max_live_sessions`)."""


class WyomingServer:
    """Listens on a port. Belongs to the event loop's thread."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Port that it listens on, once started."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Raises OSError if the port cannot be listened on."""
        self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=READ_BYTES)
        log.info("Wyoming is served on %s:%d", self._host, self.port)

    async def close(self) -> None:
        """Closes the port, and all connections."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_WYOMING_CONNECTIONS:
            log.warning("a Wyoming connection is refused: %d are open", len(self._connections))
            writer.close()
            return
        self._connections.add(task)
        socket = _Socket(reader, writer)
        try:
            await self._app(_scope(writer), socket.receive, socket.send)
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await writer.wait_closed()


def _scope(writer: asyncio.StreamWriter) -> dict[str, object]:
    peer = writer.get_extra_info("peername") or ("", 0)
    return {
        "type": "websocket",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "ws",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "client": (str(peer[0]), int(peer[1])),
        "server": None,
        "subprotocols": [],
        "state": {},
        "extensions": {EXTENSION: {}},
    }


class _Socket:
    """A connection in the messages of an ASGI WebSocket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connected = False

    async def receive(self) -> Message:
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return {"type": "websocket.disconnect", "code": 1_005}
        return {"type": "websocket.receive", "bytes": data}

    async def send(self, message: Message) -> None:
        match message["type"]:
            case "websocket.send":
                data = message.get("bytes")
                with contextlib.suppress(OSError):  # it has left: `receive` says so
                    self._writer.write(message["text"].encode() if data is None else data)
                    await self._writer.drain()
            case "websocket.close":
                self._writer.close()
