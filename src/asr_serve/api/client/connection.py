"""One WebSocket to /v1/stream: a query in, texts and audio out, events in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from urllib.parse import urlencode, urlsplit, urlunsplit

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
"""A server that takes longer to answer is none."""
PING_S = 5.0
PONG_S = 10.0
"""A connection over which no answer to a ping comes in this time is lost, whatever the network says."""
CLOSE_S = 2.0
MAX_REASON_CHARACTERS = 1_000
"""Of a value; longer ones do not go into the address: servers and those before them bound it."""
POLICY_VIOLATION_CODE = 1_008
_SILENT_LOGGER = logging.getLogger(f"{__name__}.websockets")
_SILENT_LOGGER.disabled = True
"""websockets calls an end within a frame its own bug, with a traceback. All that ends a line is raised here."""
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(server: str, query: Mapping[str, str]) -> str:
    """`http://host:8000` or `wss://host/prefix` to the route there. Raises OptionError."""
    parts = urlsplit(server if "://" in server else f"http://{server}")
    if parts.scheme not in SCHEMES or not parts.hostname or parts.query or parts.fragment:
        raise OptionError(
            f"server={server!r}", "a URL, http:// or https://, without a query", "like http://127.0.0.1:8000"
        )
    path = parts.path.rstrip("/").removesuffix(PATH) + PATH
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, urlencode(query), ""))


class WebSocketConnection:
    """A connection whose first event, `session`, has come. `send` and `receive` may be in different threads.

    Raises, as all its methods do, Unreachable; opening it, Refused too
    """

    session: SessionEvent

    def __init__(self, server: str, query: Mapping[str, str], api_key: str | None = None) -> None:
        """What is too long for an address goes into the first message."""
        long = {name: value for name, value in query.items() if len(value) > MAX_REASON_CHARACTERS}
        if long:
            query = {name: value for name, value in query.items() if name not in long} | {START: "true"}
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
                    logger=_SILENT_LOGGER,
                )
            )
        except InvalidStatus as error:
            raise _refused(error) from None
        except (OSError, EOFError, WebSocketException) as error:
            raise Unreachable(
                f"no server answers at {server}: {error}",
                "an asr-serve that is running is needed",
                "check the address, or start one: asr-serve serve",
            ) from None
        with ExitStack() as undo:
            undo.callback(self.close)
            if long:
                self.send(msgspec.json.encode({"type": START, **long}).decode())
            try:
                first = self.receive(OPEN_S)
            except Unreachable as lost:
                if lost.close_code == POLICY_VIOLATION_CODE:  # said in words that are not of this protocol
                    raise Refused(
                        f"nothing at {server} knows {PATH}; check the address.", "no_such_route"
                    ) from None
                raise
            match first:
                case SessionEvent() as session:
                    self.session = session
                case StreamErrorEvent() as told:
                    raise error_from_event(told)
                case came:
                    raise Unreachable(f"the server began with {came!r}", "it begins with its session", "update it")
            undo.pop_all()

    def send(self, message: bytes | str) -> None:
        try:
            self._socket.send(message)
        except ConnectionClosed as closed:
            raise _dropped(closed) from None

    def receive(self, timeout_s: float | None = None) -> ServerEvent:
        """The next event; those of a later version are passed over."""
        while True:
            try:
                event: ServerEvent = msgspec.json.decode(
                    self._socket.recv(timeout_s, decode=False), type=ServerEvent
                )
            except msgspec.ValidationError:
                continue
            except msgspec.DecodeError:
                raise Unreachable("what came is no JSON", "asr-serve says JSON", "check the address") from None
            except (ConnectionClosed, TimeoutError) as closed:
                raise _dropped(closed) from None
            return event

    def close(self) -> None:
        """Hang up, if that was not done: the session is over. Idempotent."""
        self._held.close()


def error_from_event(told: StreamErrorEvent) -> Refused:
    """The error for an `error` event."""
    return Refused(told.message, told.code, told.retry_after_ms)


def _dropped(error: ConnectionClosed | TimeoutError) -> Unreachable:
    frame = error.rcvd if isinstance(error, ConnectionClosed) else None
    code = None if frame is None else frame.code
    reason = "it broke" if frame is None else f"{frame.code} {frame.reason}".strip()
    return Unreachable(f"the connection was lost: {reason}", "", "try again", close_code=code)


def _refused(error: InvalidStatus) -> Refused:
    """What an answer of HTTP says that is no WebSocket."""
    status, body = error.response.status_code, error.response.body or b""
    try:
        said = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        said = _ErrorDetail()
    message = said.message or f"the server answered {status} {error.response.reason_phrase}"
    return Refused(message, said.code or f"http_{status}")


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail
