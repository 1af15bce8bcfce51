"""WebSocket connection to /v1/stream: options in the query; text and audio out, events in."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from urllib.parse import SplitResult, urlencode, urlsplit, urlunsplit

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from asr_serve.errors import OptionError, Refused, Unreachable
from asr_serve.protocols.stream.client_messages import PATH, START
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EndEvent,
    FlushedEvent,
    LockedTextEvent,
    PartialEvent,
    SegmentEvent,
    SessionEvent,
    SpeakersEvent,
    StreamErrorEvent,
    StreamTurnEvent,
)

ServerEvent = (
    SessionEvent
    | PartialEvent
    | AckEvent
    | StreamErrorEvent
    | LockedTextEvent
    | SegmentEvent
    | FlushedEvent
    | StreamTurnEvent
    | SpeakersEvent
    | EndEvent
)

OPEN_S = 10.0
"""Time for a server to answer."""
PING_S = 5.0
PONG_S = 10.0
"""Time for a pong, after which a connection counts as lost, whatever the network reports."""
CLOSE_S = 2.0
MAX_REASON_CHARACTERS = 1_000
"""Limit of a value in the address; longer ones go into the first message: servers and proxies bound addresses."""
POLICY_VIOLATION_CODE = 1_008
SILENT_LOGGER = logging.getLogger(f"{__name__}.websockets")
SILENT_LOGGER.disabled = True
"""Logger of websockets, disabled: it reports an end within a frame as its own bug, with a traceback. Every end
of a connection is raised here."""
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def parse_server(server: str, schemes: Collection[str] = ("http", "https")) -> SplitResult:
    """Splits a server's address; http where it names no scheme. Raises OptionError."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise OptionError(
            f"server={server!r}", "a URL, http:// or https://, without a query", "like http://127.0.0.1:8000"
        )
    return parts


def websocket_url(server: str, query: Mapping[str, str]) -> str:
    """Returns the route's URL for `http://host:8000` or `wss://host/prefix`. Raises OptionError."""
    parts = parse_server(server, SCHEMES)
    path = parts.path.rstrip("/").removesuffix(PATH) + PATH
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, urlencode(query), ""))


def split_query(query: Mapping[str, str]) -> tuple[Mapping[str, str], dict[str, str]]:
    """Returns the query of an address, and the values that are too long for it: those go in the first message."""
    long = {name: value for name, value in query.items() if len(value) > MAX_REASON_CHARACTERS}
    if long:
        query = {name: value for name, value in query.items() if name not in long} | {START: "true"}
    return query, long


def no_server(server: str, error: Exception) -> Unreachable:
    """Error for a server that does not answer."""
    return Unreachable(
        f"no server answers at {server}: {error}",
        "an asr-serve that is running is needed",
        "check the address, or start one: asr-serve serve",
    )


class WebSocketConnection:
    """Connection whose first event, `session`, has arrived. `send` and `receive` may be in different threads.

    Raises, as all its methods do, Unreachable; opening it, Refused too
    """

    session: SessionEvent

    def __init__(self, server: str, query: Mapping[str, str], api_key: str | None = None) -> None:
        """Connects. Values too long for an address are sent in the first message."""
        query, long = split_query(query)
        url = websocket_url(server, query)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._held = ExitStack()
        try:
            self._socket = self._held.enter_context(
                connect(
                    url,
                    additional_headers=headers,
                    compression=None,
                    open_timeout=OPEN_S,
                    close_timeout=CLOSE_S,
                    ping_interval=PING_S,
                    ping_timeout=PONG_S,
                    logger=SILENT_LOGGER,
                )
            )
        except InvalidStatus as error:
            raise error_for_refusal(error) from None
        except (OSError, EOFError, WebSocketException) as error:
            raise no_server(server, error) from None
        with ExitStack() as undo:
            undo.callback(self.close)
            if long:
                self.send(msgspec.json.encode({"type": START, **long}).decode())
            try:
                first = self.receive(OPEN_S)
            except Unreachable as lost:
                if lost.close_code == POLICY_VIOLATION_CODE:  # from a server without this protocol
                    raise Refused(f"nothing at {server} knows {PATH}; check the address.", "no_such_route") from None
                raise
            match first:
                case SessionEvent() as session:
                    self.session = session
                case StreamErrorEvent() as error_event:
                    raise error_from_event(error_event)
                case other:
                    raise Unreachable(f"the server began with {other!r}", "it begins with its session", "update it")
            undo.pop_all()

    def send(self, message: bytes | str) -> None:
        try:
            self._socket.send(message)
        except ConnectionClosed as closed:
            raise lost_connection(closed) from None

    def receive(self, timeout_s: float | None = None) -> ServerEvent:
        """Returns the next event; skips event types of later versions."""
        while True:
            try:
                event: ServerEvent = msgspec.json.decode(self._socket.recv(timeout_s, decode=False), type=ServerEvent)
            except msgspec.ValidationError:
                continue
            except msgspec.DecodeError:
                raise Unreachable(
                    "the server's message is not JSON", "asr-serve sends JSON", "check the address"
                ) from None
            except (ConnectionClosed, TimeoutError) as closed:
                raise lost_connection(closed) from None
            return event

    def close(self) -> None:
        """Closes the connection, and so ends the session. Idempotent."""
        self._held.close()


def error_from_event(told: StreamErrorEvent) -> Refused:
    """Converts an `error` event to an error."""
    return Refused(told.message, told.code, told.retry_after_ms)


def lost_connection(error: ConnectionClosed | TimeoutError) -> Unreachable:
    """Converts the end of a connection to an error."""
    frame = error.rcvd if isinstance(error, ConnectionClosed) else None
    code = None if frame is None else frame.code
    reason = "it broke" if frame is None else f"{frame.code} {frame.reason}".strip()
    return Unreachable(f"the connection was lost: {reason}", "", "try again", close_code=code)


def error_for_refusal(error: InvalidStatus) -> Refused:
    """Converts the HTTP response to a refused upgrade."""
    response = error.response
    return error_for_response(response.status_code, response.reason_phrase, bytes(response.body or b""))


def error_for_response(status: int, reason: str, body: bytes, retry_after_ms: int | None = None) -> Refused:
    """Converts an HTTP response that is an error."""
    try:
        detail = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        detail = _ErrorDetail()
    message = detail.message or f"the server answered {status} {reason}".strip()
    return Refused(message, detail.code or f"http_{status}", retry_after_ms)


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail
