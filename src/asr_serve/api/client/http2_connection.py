"""Connections to /v1/stream over HTTP/2, for one event loop that serves many sessions: each session is a request, and
those to one server share few TCP connections.

The request's body is messages as those of a WebSocket (protocols/stream/message_framing), and its response server-sent
events. Messages and errors are those of `async_connection`. h2 makes and reads the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import time
from collections import deque
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlencode

import msgspec
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import H2Error, NoAvailableStreamIDError, TooManyStreamsError

from asr_serve.api.client.connection import (
    OPEN_S,
    PING_S,
    PONG_S,
    ServerEvent,
    error_for_response,
    error_from_event,
    no_server,
    parse_server,
    split_query,
)
from asr_serve.errors import Unreachable
from asr_serve.protocols.stream.client_messages import PATH, START
from asr_serve.protocols.stream.message_framing import MESSAGES_TYPE, frame_message
from asr_serve.protocols.stream.server_events import EndEvent, SessionEvent, StreamErrorEvent

READ_BYTES = 65_536
MAX_EVENT_BYTES = 16 << 20
"""Limit of one event."""
MAX_STREAMS = 100
"""Sessions on a connection, where the server allows as many."""
CONNECT_S = 5.0
"""Longest time for a connection and the server's first settings: shorter than OPEN_S, so that a session hears why."""
IDLE_S = 60.0
"""Time without a session after which a connection is closed."""
CONNECTION_WINDOW_BYTES = 16 << 20
"""Bytes of events that may be on their way on a connection: more than all its streams together may have, so that one
that nobody reads holds up no other."""


class _Stream:
    """Request of one session, as its connection sees it."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after_ms: int | None = None
        self.data = bytearray()
        """Bytes that were received and not taken."""
        self.unacknowledged = 0
        """Bytes of flow control that are granted again once they are taken."""
        self.ended = False
        self.lost: str | None = None
        self.changed = asyncio.Event()
        self.room = asyncio.Event()

    def fail(self, reason: str) -> None:
        self.lost = self.lost or reason
        self.changed.set()
        self.room.set()


class _Http2Line:
    """TCP connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._streams: dict[int, _Stream] = {}
        self._ponged_s = time.monotonic()
        self._settled = asyncio.Event()
        """Set by the server's first settings, which limit the sessions, and by the end of the connection."""
        self._full = False
        """Whether it takes no more requests for good."""
        self._leaving: asyncio.TimerHandle | None = None
        """Timer that closes it, while it is idle."""
        self.lost: str | None = None
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
        self._flush()
        self._tasks = asyncio.create_task(self._read()), asyncio.create_task(self._ping())
        self._leave_later()  # who wanted it may have given up meanwhile

    @property
    def has_room(self) -> bool:
        """Returns whether another session may use it."""
        most = min(MAX_STREAMS, self._http2.remote_settings.max_concurrent_streams)
        # The server counts a request that has ended here until its answer has ended, too.
        count = max(len(self._streams), self._http2.open_outbound_streams)
        return self.lost is None and not self._full and count < most

    async def wait_settled(self) -> None:
        """Waits until the server has said how many sessions it allows. Raises Unreachable."""
        await self._settled.wait()
        if self.lost is not None:
            raise _lost(self.lost)

    def request(self, headers: list[tuple[str, str]]) -> tuple[int, _Stream] | None:
        """Begins a request; None where the connection takes no more. Raises Unreachable."""
        if self.lost is not None:
            raise _lost(self.lost)
        stream = _Stream()
        try:
            number = self._http2.get_next_available_stream_id()
            self._http2.send_headers(number, headers)
        except (TooManyStreamsError, NoAvailableStreamIDError):
            self._full = True
            return None
        except H2Error as error:
            raise _lost(f"no request can be made: {error}") from None
        self._streams[number] = stream
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._flush()
        return number, stream

    async def send(self, number: int, stream: _Stream, data: bytes) -> None:
        """Sends a part of a request's body, as the server takes it. Raises Unreachable."""
        rest = memoryview(data)
        while rest:
            if stream.lost is not None or stream.ended:
                raise _lost(stream.lost or "the server has ended its answer")
            stream.room.clear()
            try:
                count = min(self._http2.local_flow_control_window(number), self._http2.max_outbound_frame_size)
                if count > 0:
                    self._http2.send_data(number, bytes(rest[:count]))
            except H2Error as error:
                raise _lost(str(error) or type(error).__name__) from None
            if count <= 0:
                await stream.room.wait()
                continue
            rest = rest[count:]
            self._flush()
        with contextlib.suppress(OSError):  # `_read` tells it
            await self._writer.drain()

    def take(self, number: int, stream: _Stream) -> None:
        """Grants the server the window of what was taken."""
        count, stream.unacknowledged = stream.unacknowledged, 0
        if count and self.lost is None:
            with contextlib.suppress(H2Error):
                self._http2.acknowledge_received_data(count, number)
            self._flush()

    def end(self, number: int, stream: _Stream, *, finished: bool) -> None:
        """Ends a request: its body, where its session has `finished`; else all of it."""
        self.take(number, stream)
        if self._streams.pop(number, None) is None or self.lost is not None:
            return
        with contextlib.suppress(H2Error):
            if finished:
                self._http2.end_stream(number)
            else:
                self._http2.reset_stream(number, ErrorCodes.CANCEL)
        self._flush()
        if not self._streams:
            self._leave_later()

    def leave(self) -> None:
        """Closes it in order, without waiting."""
        if self.lost is None:
            with contextlib.suppress(H2Error):
                self._http2.close_connection()
            self._flush()
        self._lose("it was not used")

    def _leave_later(self) -> None:
        self._leaving = asyncio.get_running_loop().call_later(IDLE_S, self.leave)

    async def close(self) -> None:
        """Closes it, and what uses it."""
        self._lose("it was closed")
        await asyncio.wait(self._tasks)

    def _flush(self) -> None:
        data = self._http2.data_to_send()
        if data and self.lost is None:
            self._writer.write(data)

    async def _read(self) -> None:
        reason = "the server closed it"
        try:
            while data := await self._reader.read(READ_BYTES):
                for event in self._http2.receive_data(data):
                    self._apply(event)
                self._flush()
                for stream in self._streams.values():
                    stream.room.set()  # a window or a setting may have changed
                if self.lost is not None:
                    return
        except (OSError, H2Error) as error:
            reason = f"it broke: {error or type(error).__name__}"
        finally:
            self._lose(reason)

    def _apply(self, event: Event) -> None:
        match event:
            case ConnectionTerminated():
                self._lose(f"the server ended it ({event.error_code})")
            case RemoteSettingsChanged():
                self._settled.set()
            case PingAckReceived():
                self._ponged_s = time.monotonic()
            case ResponseReceived() | DataReceived() | StreamEnded() | StreamReset():
                self._apply_to_stream(event)

    def _apply_to_stream(self, event: ResponseReceived | DataReceived | StreamEnded | StreamReset) -> None:
        stream = self._streams.get(event.stream_id or 0)
        if stream is None:
            if isinstance(event, DataReceived):  # of a request that has ended here
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return
        match event:
            case ResponseReceived():
                headers = {str(name): str(value) for name, value in event.headers}
                stream.status = int(headers[":status"])
                retry_ms = headers.get("retry-after-ms", "")
                stream.retry_after_ms = int(retry_ms) if retry_ms.isdecimal() else None
            case DataReceived():
                stream.data += event.data
                stream.unacknowledged += event.flow_controlled_length
            case StreamEnded():
                stream.ended = True
            case StreamReset():
                stream.fail(f"the server reset it ({event.error_code})")
        stream.changed.set()

    async def _ping(self) -> None:
        """Notices a server that is gone, whatever the network reports."""
        while self.lost is None:
            if time.monotonic() - self._ponged_s > PING_S + PONG_S:
                self._lose(f"no pong for {PING_S + PONG_S:g} s")
                self._writer.transport.abort()  # what waits to be sent would hold the socket
                return
            with contextlib.suppress(H2Error):
                self._http2.ping(struct.pack(">d", time.monotonic()))
            self._flush()
            await asyncio.sleep(PING_S)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._settled.set()
        if self._leaving is not None:
            self._leaving.cancel()
        for stream in self._streams.values():
            stream.fail(self.lost)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._writer.close()


class Http2StreamConnections:
    """Connections to one server, and the sessions on them."""

    def __init__(self, server: str, api_key: str | None = None) -> None:
        """Connects with the first session. Raises OptionError for an address that is none."""
        self._server, self._parts, self._key = server, parse_server(server), api_key
        self._lines: list[_Http2Line] = []
        self._connecting: asyncio.Task[_Http2Line | Unreachable] | None = None
        """Attempt that all sessions without a connection wait for."""

    @property
    def count(self) -> int:
        """TCP connections that are open."""
        return sum(line.lost is None for line in self._lines)

    async def open(self, query: Mapping[str, str]) -> Http2StreamConnection:
        """Opens or resumes a session. Raises Refused, Unreachable."""
        query, long = split_query(query)
        try:
            async with asyncio.timeout(OPEN_S), contextlib.AsyncExitStack() as undo:
                connection = await self._request(query)
                undo.push_async_callback(connection.close)
                if long:
                    await connection.send(msgspec.json.encode({"type": START, **long}).decode())
                await connection._wait_session()
                undo.pop_all()
        except TimeoutError:
            raise _lost(f"no answer within {OPEN_S:g} s") from None
        return connection

    async def close(self) -> None:
        """Closes all connections. Idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        lines, self._lines = self._lines, []
        for line in lines:
            await line.close()

    def _headers(self, query: Mapping[str, str]) -> list[tuple[str, str]]:
        path = self._parts.path.rstrip("/").removesuffix(PATH) + PATH
        headers = [
            (":method", "POST"),
            (":scheme", self._parts.scheme),
            (":authority", self._parts.netloc.rpartition("@")[2]),
            (":path", f"{path}?{urlencode(query)}"),
            ("content-type", MESSAGES_TYPE),
            ("accept", "text/event-stream"),
        ]
        return headers + ([("authorization", f"Bearer {self._key}")] if self._key else [])

    async def _request(self, query: Mapping[str, str]) -> Http2StreamConnection:
        """Begins a request on a connection with room for it. Raises Unreachable."""
        while True:
            line = await self._line()
            if (made := line.request(self._headers(query))) is not None:
                return Http2StreamConnection(line, *made)

    async def _line(self) -> _Http2Line:
        """Returns a connection with room for a session. Raises Unreachable."""
        while True:
            self._lines = [line for line in self._lines if line.lost is None]
            for line in self._lines:
                if line.has_room:
                    return line
            if (attempt := self._connecting) is None:
                attempt = self._connecting = asyncio.create_task(self._connect())
                attempt.add_done_callback(self._connected)
            await asyncio.wait({attempt})  # goes on without this session, where that gives up: others wait, too
            if attempt.cancelled():
                raise _lost("it was closed")
            made = attempt.result()
            if isinstance(made, Unreachable):
                raise Unreachable(made.came, made.allowed, made.todo)

    def _connected(self, attempt: asyncio.Task[_Http2Line | Unreachable]) -> None:
        """Ends an attempt, before those that wait for it go on."""
        self._connecting = None
        if not attempt.cancelled() and attempt.exception() is None:
            made = attempt.result()
            if isinstance(made, _Http2Line):
                self._lines.append(made)

    async def _connect(self) -> _Http2Line | Unreachable:
        """Connects; returns why it cannot, for all that wait."""
        secure = None
        if self._parts.scheme == "https":
            secure = ssl.create_default_context()
            secure.set_alpn_protocols(["h2"])
        port = self._parts.port or (443 if secure else 80)
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(self._parts.hostname, port, ssl=secure)
                    undo.callback(writer.close)
                    agreed = writer.get_extra_info("ssl_object")
                    if agreed is not None and agreed.selected_alpn_protocol() != "h2":
                        return Unreachable(
                            f"{self._server} speaks no HTTP/2", "asr-serve does", "a proxy before it must, too"
                        )
                    line = _Http2Line(reader, writer)
                    undo.callback(line.leave)
                    await line.wait_settled()
            except Unreachable as lost:
                return lost
            except TimeoutError:
                return no_server(self._server, TimeoutError(f"nothing came within {CONNECT_S:g} s"))
            except OSError as error:
                return no_server(self._server, error)
            if not line.has_room:
                return Unreachable(f"{self._server} allows no session on a connection", "at least one", "try again")
            undo.pop_all()
        return line


class Http2StreamConnection:
    """Connection whose first event, `session`, has arrived. One task may send while another receives.

    Raises, as all its methods do, Unreachable
    """

    session: SessionEvent

    def __init__(self, line: _Http2Line, number: int, stream: _Stream) -> None:
        self._line: Final = line
        self._number: Final = number
        self._stream: Final = stream
        self._events: deque[bytes] = deque()
        """Events that were taken, as JSON."""
        self._finished = False

    async def send(self, message: bytes | str) -> None:
        """Sends a message; waits while the server takes no more."""
        await self._line.send(self._number, self._stream, frame_message(message))

    async def receive(self) -> ServerEvent:
        """Returns the next event; skips event types of later versions."""
        while True:
            while not self._events:
                await self._take()
            try:
                event: ServerEvent = msgspec.json.decode(self._events.popleft(), type=ServerEvent)
            except msgspec.ValidationError:
                continue
            except msgspec.DecodeError:
                raise Unreachable(
                    "the server's message is not JSON", "asr-serve sends JSON", "check the address"
                ) from None
            self._finished = self._finished or isinstance(event, EndEvent)
            return event

    async def close(self) -> None:
        """Ends the request. Idempotent. A session that has not ended waits to be resumed."""
        self._line.end(self._number, self._stream, finished=self._finished)

    async def _take(self) -> None:
        """Waits for events. Raises Unreachable where none come any more."""
        stream = self._stream
        *events, rest = bytes(stream.data).split(b"\n\n")
        if not events:
            if stream.lost is not None or stream.ended:
                raise _lost(stream.lost or "the answer ended")
            if len(rest) > MAX_EVENT_BYTES:
                raise _lost(f"an event of more than {MAX_EVENT_BYTES} bytes came")
            stream.changed.clear()
            self._line.take(self._number, stream)
            await stream.changed.wait()
            return
        stream.data[:] = rest
        self._line.take(self._number, stream)
        for event in events:
            lines = event.split(b"\n")
            self._events.extend(line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: "))

    async def _wait_session(self) -> None:
        """Waits for the first event. Raises Refused, Unreachable."""
        stream = self._stream
        while stream.status is None and stream.lost is None:
            stream.changed.clear()
            await stream.changed.wait()
        if stream.status not in (200, None):
            while not stream.ended and stream.lost is None and len(stream.data) < READ_BYTES:
                stream.changed.clear()
                await stream.changed.wait()
            raise error_for_response(stream.status or 0, "", bytes(stream.data), stream.retry_after_ms)
        match await self.receive():
            case SessionEvent() as session:
                self.session = session
            case StreamErrorEvent() as refusal:
                raise error_from_event(refusal)
            case other:
                raise Unreachable(f"the server began with {other!r}", "it begins with its session", "update it")


def _lost(reason: str) -> Unreachable:
    return Unreachable(f"the connection was lost: {reason}", "", "try again")
