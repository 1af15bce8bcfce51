"""A live session on a server that goes on when its connection is lost.

with Stream("http://127.0.0.1:8000", language="en") as stream:
    stream.send(pcm16)          # from one thread
    stream.end()
    for event in stream:        # here, or in another
        ...
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from asr_serve.api.client.connection import CLOSE_S, WebSocketConnection, error_from_event
from asr_serve.api.client.connection import ServerEvent as Told
from asr_serve.errors import AsrServeError, OptionError, OutOfTurn, Refused, Unreachable
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EndEvent,
    FlushedEvent,
    NumberedEvent,
    PartialEvent,
    SessionEvent,
    StreamErrorEvent,
)

BUFFER_BYTES = 8 << 20
"""Audio that the server has not acknowledged: four minutes of PCM16 at 16 kHz."""
WINDOW_BYTES = 256 << 10
"""Audio under way that is not acknowledged: no more has to be sent again after a resume."""
SEND_BYTES = 32_768
MAX_QUEUED_EVENTS = 10_000
"""That nobody has read; then no more are taken from the server, and in the end `send` waits."""
RETRY_S = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Before each attempt to resume; the last again and again."""
RETRYABLE_CODES = {"at_capacity", "rate_limited", "draining"}
"""Refusals of a resume that are worth another attempt."""
LOST_CODES = {None, 1000, 1001, 1006, 1012, 1014}
"""How a connection is closed that may be resumed although an error came before. 1000: websockets drops what came
together with the close frame when its own can not be sent any more; it is told again."""
MAX_FRUITLESS_RESUMES = 10
"""Connections one after another that the server closed as if all had been told, and nothing was."""
PACKETS = "opus"
DUPLICATE_CODE = "out_of_turn"


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection was lost, and attempts to resume go on; a `Session` follows when one succeeds."""

    reason: str


ClientEvent = Told | ConnectionLost


class _Audio(msgspec.Struct, frozen=True):
    at_bytes: int
    data: bytes


class _Command(msgspec.Struct, frozen=True):
    at_bytes: int
    """Of all audio, before which it was said."""
    text: str
    id: str = ""


class StreamClient:
    """One session. One thread may send and another read.

    Raises, wherever it is used: Refused when the server ended it for a reason of its own, Unreachable when it was
    not found again for `resume_s`. An `Error` among the events is one that the session survives, or why it is
    ended: then the rest of the text still follows
    """

    session: SessionEvent

    def __init__(
        self,
        server: str,
        *,
        api_key: str | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        **query: str | int | float,
    ) -> None:
        """Connects. `query`: what /v1/stream takes, like encoding="s16le", rate=16000, language="en".

        Raises OptionError for an address that is none.
        """
        self._server, self._key, self._most_bytes = server, api_key, buffer_bytes
        self._packets = query.get("encoding") == PACKETS
        self._changed = threading.Condition()
        """Guards everything below."""
        self._unacknowledged: deque[_Audio | _Command] = deque()
        """In order: what was said and is not known to have arrived."""
        self._sent_count = 0
        """Of `_out`, how many have been said on this connection."""
        self._taken_bytes = self._sent_bytes = self._arrived_bytes = 0
        """Of all audio: what `send` took, what was said, what the server has acknowledged."""
        self._flushing: set[str] = set()
        self._events: deque[ClientEvent] = deque()
        self._last_seq = self._fruitless = 0
        self._ending = self._closed = False
        self._failure: AsrServeError | None = None
        line = WebSocketConnection(server, {name: str(value) for name, value in query.items()}, api_key)
        self._connection: WebSocketConnection | None = line
        self.session = line.session
        self._events.append(line.session)
        self._threads = [
            threading.Thread(target=self._receive_loop, args=(line,), name="stream-listen", daemon=True),
            threading.Thread(target=self._send_loop, name="stream-say", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- what is said ------------------------------------------------------------------------------------

    def send(self, audio: bytes | memoryview) -> None:
        """In the session's encoding, cut anywhere; of `opus`, one packet. Waits while `buffer_bytes` are not
        acknowledged. Raises OutOfTurn after `end`."""
        size = len(audio) if self._packets else SEND_BYTES
        for at in range(0, len(audio), size or 1):
            piece = bytes(audio[at : at + size])
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._taken_bytes - self._arrived_bytes < self._most_bytes
                )
                self._expect_open()
                self._unacknowledged.append(_Audio(self._taken_bytes, piece))
                self._taken_bytes += len(piece)
                self._changed.notify_all()

    def flush(self, id: str | None = None) -> str:
        """Ask for everything that was sent so far to become final; returns the id that `flushed` will have."""
        id = id or f"flush_{secrets.token_hex(8)}"
        with self._changed:
            self._expect_open()
            if id in self._flushing:
                raise OptionError(f"id={id!r}", "one that is not being waited for already", "leave it out")
            self._flushing.add(id)
            self._command({"type": "flush", "id": id}, id)
        return id

    def end(self) -> None:
        """No more audio will come. Idempotent."""
        with self._changed:
            if not self._ending and not self._closed:
                self._ending = True
                self._command({"type": "end"})

    def _command(self, command: dict[str, str], id: str = "") -> None:
        self._unacknowledged.append(_Command(self._taken_bytes, msgspec.json.encode(command).decode(), id))
        self._changed.notify_all()

    def _expect_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ending or self._closed:
            raise OutOfTurn("audio was sent after the end", "nothing follows `end`", "begin another session")

    # --- what is told ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ClientEvent]:
        """Until all is told."""
        while (event := self.take()) is not None:
            yield event

    def take(self, timeout_s: float | None = None) -> ClientEvent | None:
        """The next event. None: nothing came in that time, or, see `over`, nothing will."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closed, timeout_s)
            if self._events:
                event = self._events.popleft()
                self._changed.notify_all()
                return event
            if self._failure is not None:
                raise self._failure
            return None

    @property
    def over(self) -> bool:
        """All was told, and read."""
        with self._changed:
            return self._closed and not self._events

    def close(self) -> None:
        """Hang up: what was not told before is not told any more. Idempotent."""
        with self._changed:
            line, self._connection, self._closed = self._connection, None, True
            self._changed.notify_all()
        if line is not None:
            line.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)  # one that is connecting takes longer, and hangs up by itself

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread that speaks --------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._can_send())
                if self._closed:
                    return
                line, item = self._connection, self._unacknowledged[self._sent_count]
                self._sent_count += 1  # before it is out: after a resume the server says where to go on
                if isinstance(item, _Audio):
                    self._sent_bytes = item.at_bytes + len(item.data)
            assert line is not None
            try:
                line.send(item.data if isinstance(item, _Audio) else item.text)
            except Unreachable:
                with self._changed:
                    if self._connection is line:
                        self._connection = None  # the thread that listens sees it too, and resumes

    def _can_send(self) -> bool:
        under_way_bytes = self._sent_bytes - self._arrived_bytes
        return (
            self._connection is not None
            and self._sent_count < len(self._unacknowledged)
            and under_way_bytes < WINDOW_BYTES
        )

    # --- the thread that listens -------------------------------------------------------------------------

    def _receive_loop(self, line: WebSocketConnection) -> None:
        ended: AsrServeError | None = Unreachable("the client itself has failed", "", "see the traceback")
        try:
            while (lost := self._receive_until_lost(line)) is not None:
                line.close()
                with self._changed:
                    self._connection = None
                    self._enqueue_event(ConnectionLost(lost.came))
                line = self._resume(lost)
            ended = None
        except AsrServeError as failure:
            ended = failure
        finally:
            with self._changed:
                if not self._closed:
                    self._failure, self._closed = ended, True
                self._changed.notify_all()
            line.close()

    def _receive_until_lost(self, line: WebSocketConnection) -> Unreachable | None:
        """Until the connection is lost, which is returned; None: all is told, or nobody wants to hear it."""
        refused: Refused | None = None
        before_seq = self._last_seq
        while True:
            try:
                event = line.receive()
            except Unreachable as lost:
                if self._closed:
                    return None
                if refused is not None and lost.close_code not in LOST_CODES:
                    raise refused from None
                fruitless = lost.close_code == 1000 and self._last_seq == before_seq
                self._fruitless = self._fruitless + 1 if fruitless else 0
                if self._fruitless > MAX_FRUITLESS_RESUMES:
                    raise
                return lost
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._events) < MAX_QUEUED_EVENTS)
                if self._closed:
                    return None
                self._apply_event(event)
            refused = (
                error_from_event(event)
                if isinstance(event, StreamErrorEvent) and event.code != DUPLICATE_CODE
                else None
            )
            if isinstance(event, EndEvent):
                return None

    def _apply_event(self, event: Told) -> None:
        if isinstance(event, NumberedEvent):
            if event.seq <= self._last_seq:
                return
            self._last_seq = event.seq
        match event:
            case AckEvent():
                self._acknowledge(event.received_bytes)
            case StreamErrorEvent(code=code) if code == DUPLICATE_CODE:
                return  # nothing but our own repetitions can be out of turn
            case FlushedEvent():
                if event.id not in self._flushing:
                    return  # asked for again after a resume, and answered twice
                self._flushing.discard(event.id)
        self._enqueue_event(event)

    def _enqueue_event(self, event: ClientEvent) -> None:
        """A partial or an acknowledgement replaces one that nobody has read."""
        if self._events and isinstance(event, PartialEvent | AckEvent) and type(self._events[-1]) is type(event):
            self._events.pop()
        self._events.append(event)
        self._changed.notify_all()

    def _resume(self, lost: Unreachable) -> WebSocketConnection:
        """A new connection. Raises Refused, and Unreachable when the session cannot be waiting any more."""
        end_s = time.monotonic() + self.session.resume_s
        waits_s = itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1]))
        asked_s, last = 0.0, lost.came
        while time.monotonic() < end_s and not self._closed:
            try:
                return self._reconnect(max(asked_s, next(waits_s) * random.uniform(0.8, 1.2)))
            except Refused as refused:
                if refused.code not in RETRYABLE_CODES:
                    raise
                asked_s, last = (refused.retry_after_ms or 0) / 1_000, str(refused)
            except Unreachable as again:
                asked_s, last = 0.0, again.came
        raise Unreachable(
            f"the connection was lost, and not found again for {self.session.resume_s:g} s: {last}",
            "",
            "what was said since then is lost: begin again",
        )

    def _reconnect(self, wait_s: float) -> WebSocketConnection:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, wait_s):
                raise Unreachable("the stream was closed")
            query = {"session": self.session.session_id, "after": str(self._last_seq)}
        line = WebSocketConnection(self._server, query, self._key)
        with self._changed:
            if not self._closed:
                self._acknowledge(line.session.received_bytes)
                self._connection, self._sent_count, self.session = line, 0, line.session
                self._sent_bytes = line.session.received_bytes
                self._enqueue_event(line.session)
                return line
        line.close()
        raise Unreachable("the stream was closed")

    def _acknowledge(self, received_bytes: int) -> None:
        """Audio before that has arrived, and with it every command that was said before later audio."""
        self._arrived_bytes = max(self._arrived_bytes, received_bytes)
        while self._unacknowledged:
            match self._unacknowledged[0]:
                case _Command(at_bytes=at, id=id) if at >= received_bytes and (not id or id in self._flushing):
                    return
                case _Audio(at_bytes=at, data=data) if at + len(data) > received_bytes:
                    if at < received_bytes:
                        self._unacknowledged[0] = _Audio(received_bytes, data[received_bytes - at :])
                    return
            self._unacknowledged.popleft()
            self._sent_count = max(0, self._sent_count - 1)
