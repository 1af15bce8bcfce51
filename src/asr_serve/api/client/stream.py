"""Client of a live session that resumes after a lost connection.

with StreamClient("http://127.0.0.1:8000", language="en") as stream:
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
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec

from asr_serve.api.client.connection import CLOSE_S, WebSocketConnection, error_from_event
from asr_serve.api.client.connection import ServerEvent as Told
from asr_serve.errors import AsrServeError, OptionError, OutOfTurn, Refused, Unreachable, UnsupportedOption
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
"""Limit of audio that the server has not acknowledged: four minutes of PCM16 at 16 kHz."""
WINDOW_BYTES = 256 << 10
"""Limit of audio sent and not acknowledged: no more has to be sent again after a resume."""
SEND_BYTES = 32_768
MAX_QUEUED_EVENTS = 10_000
"""Limit of unread events; at it no more are received, and in the end `send` waits."""
RETRY_S = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Delays before attempts to resume; the last one repeats."""
NORMAL_CLOSURE_CODE = 1000
LOST_CODES = {None, NORMAL_CLOSURE_CODE, 1001, 1006, 1012, 1014}
"""Close codes after which a session may be resumed although an error came before. 1000: websockets drops events
that came together with the close frame when it cannot send its own any more; the server sends them again."""
MAX_FRUITLESS_RESUMES = 10
"""Limit of consecutive connections that the server closed normally without any new event."""
PACKETS = "opus"
SAMPLE_BYTES = {"s16le": 2, "mulaw": 1, "alaw": 1}
"""Bytes of a sample, of encodings in which silence can be a count."""
DUPLICATE_CODE = "out_of_turn"


class ConnectionLost(msgspec.Struct, frozen=True):
    """Event: the connection was lost, and attempts to resume continue; a `Session` follows when one succeeds. Not for a
    connection that the server closed normally: what did not arrive of its end is requested again without an event."""

    reason: str


ClientEvent = Told | ConnectionLost


class _Audio(msgspec.Struct, frozen=True):
    at_bytes: int
    data: bytes

    @property
    def end_bytes(self) -> int:
        return self.at_bytes + len(self.data)


class _Silence(msgspec.Struct, frozen=True):
    """Silence that is sent as its length, and stands for `samples * sample_bytes` of audio."""

    at_bytes: int
    samples: int
    sample_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.at_bytes + self.samples * self.sample_bytes

    @property
    def text(self) -> str:
        return msgspec.json.encode({"type": "silence", "samples": self.samples}).decode()


class _Command(msgspec.Struct, frozen=True):
    at_bytes: int
    """Position in all audio before which it was sent."""
    text: str
    id: str = ""

    @property
    def end_bytes(self) -> int:
        return self.at_bytes


class StreamClient:
    """Client of one session. One thread may send and another read.

    Every method raises Refused when the server ended the session for a reason of its own, and Unreachable when it
    could not be resumed for `resume_s`. An `Error` event is one that the session survives, or the reason of its
    end: then the rest of the text still follows
    """

    session: SessionEvent

    def __init__(
        self, server: str, *, api_key: str | None = None, buffer_bytes: int = BUFFER_BYTES, **query: str | int | float
    ) -> None:
        """Connects. `query`: parameters of /v1/stream, like encoding="s16le", rate=16000, language="en". Raises
        OptionError for an invalid address."""
        self._server, self._key, self._most_bytes = server, api_key, buffer_bytes
        self._packets = query.get("encoding") == PACKETS
        self._changed = threading.Condition()
        """Guards everything below."""
        self._unacknowledged: deque[_Audio | _Silence | _Command] = deque()
        """Audio and commands, in order, that are not known to have arrived."""
        self._sent_count = 0
        """Number of items of `_unacknowledged` sent on this connection."""
        self._undurable: deque[_Audio | _Silence | _Command] = deque()
        """Audio and commands that have arrived, and that only the server which has them can continue from: the store of
        its sessions is away. Of these the oldest are dropped beyond `buffer_bytes`."""
        self._dropped_bytes = 0
        """Position of all audio before which nothing is kept."""
        self._taken_bytes = self._sent_bytes = self._arrived_bytes = 0
        """Positions in all audio: accepted by `send`, sent, acknowledged by the server."""
        self._stored, self._epoch = False, 0
        """Whether the session was ever stored outside its server, and the newest claim of it."""
        self._flushing: set[str] = set()
        self._events: deque[ClientEvent] = deque()
        self._last_seq = self._fruitless = 0
        self._loss_announced = False
        self._ending = self._closed = False
        self._failure: AsrServeError | None = None
        connection = WebSocketConnection(server, {name: str(value) for name, value in query.items()}, api_key)
        self._connection: WebSocketConnection | None = connection
        self._begin_connection(connection.session)
        self._events.append(connection.session)
        self._threads = [
            threading.Thread(target=self._receive_loop, args=(connection,), name="stream-listen", daemon=True),
            threading.Thread(target=self._send_loop, name="stream-say", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- sending ---------------------------------------------------------------------------------------

    def send(self, audio: bytes | memoryview) -> None:
        """Sends audio in the session's encoding, cut anywhere; with `opus`, one packet. Waits while
        `buffer_bytes` are not acknowledged. Raises OutOfTurn after `end`."""
        size = len(audio) if self._packets else SEND_BYTES
        for at in range(0, len(audio), size or 1):
            self._append(_Audio, bytes(audio[at : at + size]))

    def send_silence(self, samples: int) -> None:
        """Sends silence in place of audio, as its length: samples at the session's rate, after whole samples. Waits as
        `send` does. Raises OutOfTurn after `end`, UnsupportedOption for an encoding that has silence of its own, and
        OptionError for a negative length."""
        encoding = self.session.encoding
        sample_bytes = SAMPLE_BYTES.get(encoding)
        if sample_bytes is None:
            raise UnsupportedOption(
                f"silence as a count, in {encoding}", f"encodings: {', '.join(SAMPLE_BYTES)}", "send its packets"
            )
        if samples < 0:
            raise OptionError(f"a silence of {samples} samples", "0 or more", param="samples")
        step = SEND_BYTES // sample_bytes
        for at in range(0, samples, step):
            self._append(_Silence, min(step, samples - at), sample_bytes)

    def _append(self, make: Callable[..., _Audio | _Silence], *content: Any) -> None:
        """Appends audio to what is to be sent, once there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._taken_bytes - self._arrived_bytes < self._most_bytes)
            self._expect_open()
            item = make(self._taken_bytes, *content)
            self._unacknowledged.append(item)
            self._taken_bytes = item.end_bytes
            self._changed.notify_all()

    def flush(self, id: str | None = None) -> str:
        """Requests that all audio so far becomes final; returns the id of the `flushed` event to come."""
        id = id or f"flush_{secrets.token_hex(8)}"
        with self._changed:
            self._expect_open()
            if id in self._flushing:
                raise OptionError(f"id={id!r}", "one that is not being waited for already", "leave it out")
            self._flushing.add(id)
            self._command({"type": "flush", "id": id}, id)
        return id

    def end(self) -> None:
        """Ends the audio. Idempotent."""
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

    # --- receiving -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ClientEvent]:
        """Yields events until the last."""
        while (event := self.take()) is not None:
            yield event

    def take(self, timeout_s: float | None = None) -> ClientEvent | None:
        """Returns the next event. None: none arrived in that time or, see `over`, none will."""
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
        """Returns whether all events have arrived and been read."""
        with self._changed:
            return self._closed and not self._events

    def close(self) -> None:
        """Closes the connection; events that have not arrived are lost. Idempotent."""
        with self._changed:
            connection, self._connection, self._closed = self._connection, None, True
            self._changed.notify_all()
        if connection is not None:
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)  # a thread that is connecting takes longer, and closes its connection itself

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- send thread -----------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._can_send())
                if self._closed:
                    return
                connection, item = self._connection, self._unacknowledged[self._sent_count]
                self._sent_count += 1  # before sending: after a resume the server reports where to continue
                if not isinstance(item, _Command):
                    self._sent_bytes = item.end_bytes
            assert connection is not None
            try:
                connection.send(item.data if isinstance(item, _Audio) else item.text)
            except Unreachable:
                with self._changed:
                    if self._connection is connection:
                        self._connection = None  # the receive thread notices too, and resumes

    def _can_send(self) -> bool:
        in_flight_bytes = self._sent_bytes - self._arrived_bytes
        return (
            self._connection is not None
            and self._sent_count < len(self._unacknowledged)
            and in_flight_bytes < WINDOW_BYTES
        )

    # --- receive thread --------------------------------------------------------------------------------

    def _receive_loop(self, line: WebSocketConnection) -> None:
        error: AsrServeError | None = Unreachable("the client itself has failed", "", "see the traceback")
        try:
            while (lost := self._receive_until_lost(line)) is not None:
                line.close()
                with self._changed:
                    self._connection = None
                # 1000: the server has sent everything, and some of it was dropped here, see LOST_CODES.
                if lost.close_code != NORMAL_CLOSURE_CODE:
                    self._announce_loss(lost.came)
                line = self._resume(lost)
            error = None
        except AsrServeError as failure:
            error = failure
        finally:
            with self._changed:
                if not self._closed:
                    self._failure, self._closed = error, True
                self._changed.notify_all()
            line.close()

    def _receive_until_lost(self, line: WebSocketConnection) -> Unreachable | None:
        """Receives events until the connection is lost, and returns that error; None: all events have arrived,
        or the client is closed."""
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
                fruitless = lost.close_code == NORMAL_CLOSURE_CODE and self._last_seq == before_seq
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
                self._acknowledge(event.received_bytes, durable=event.durable)
            case StreamErrorEvent(code=code) if code == DUPLICATE_CODE:
                return  # a repetition after a resume, nothing else, can be out of turn
            case FlushedEvent():
                if event.id not in self._flushing:
                    return  # requested again after a resume, and answered twice
                self._flushing.discard(event.id)
        self._enqueue_event(event)

    def _enqueue_event(self, event: ClientEvent) -> None:
        """Queues an event. A partial or an acknowledgement replaces an unread one before it."""
        if self._events and isinstance(event, PartialEvent | AckEvent) and type(self._events[-1]) is type(event):
            self._events.pop()
        self._events.append(event)
        self._changed.notify_all()

    def _resume(self, lost: Unreachable) -> WebSocketConnection:
        """Returns a new connection. Raises Refused, and Unreachable once the session has expired."""
        end_s = time.monotonic() + self.session.resume_s
        waits_s = itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1]))
        retry_after_s, last = 0.0, lost.came
        while time.monotonic() < end_s and not self._closed:
            try:
                return self._reconnect(max(retry_after_s, next(waits_s) * random.uniform(0.8, 1.2)))
            except Refused as refused:
                if not refused.is_retryable:
                    raise
                retry_after_s, last = (refused.retry_after_ms or 0) / 1_000, str(refused)
            except Unreachable as again:
                retry_after_s, last = 0.0, again.came
            self._announce_loss(last)
        raise Unreachable(
            f"the connection was lost, and not found again for {self.session.resume_s:g} s: {last}",
            "",
            "audio since then is lost: start a new session",
        )

    def _announce_loss(self, reason: str) -> None:
        """Queues a ConnectionLost, once until a connection is there again."""
        with self._changed:
            if not (self._loss_announced or self._closed):
                self._loss_announced = True
                self._enqueue_event(ConnectionLost(reason))

    def _reconnect(self, wait_s: float) -> WebSocketConnection:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, wait_s):
                raise Unreachable("the stream was closed")
            query = {"session": self.session.session_id, "after": str(self._last_seq)}
            if self._stored:
                query |= {"received": str(self._dropped_bytes), "epoch": str(self._epoch)}
        connection = WebSocketConnection(self._server, query, self._key)
        with self._changed:
            if not self._closed:
                if connection.session.received_bytes < self._dropped_bytes:
                    connection.close()
                    raise Refused(
                        f"the server has the audio up to byte {connection.session.received_bytes}, and this client has "
                        f"none before {self._dropped_bytes}: begin a new session",
                        "audio_lost",
                    )
                self._begin_connection(connection.session)
                self._connection = connection
                if self._loss_announced:
                    self._loss_announced = False
                    self._enqueue_event(connection.session)
                return connection
        connection.close()
        raise Unreachable("the stream was closed")

    def _begin_connection(self, session: SessionEvent) -> None:
        """Continues where the server says. What it has not, it is sent again, also where it has been acknowledged by
        another server that nobody reaches any more."""
        self.session, self._stored = session, self._stored or session.durable
        self._epoch = max(self._epoch, session.epoch)
        self._unacknowledged.extendleft(each for each in reversed(self._undurable) if not self._is_answered(each))
        self._undurable.clear()
        self._sent_count, self._sent_bytes, self._arrived_bytes = 0, session.received_bytes, 0
        self._acknowledge(session.received_bytes, durable=session.durable or not self._stored)

    def _is_answered(self, item: _Audio | _Silence | _Command) -> bool:
        return isinstance(item, _Command) and bool(item.id) and item.id not in self._flushing

    def _acknowledge(self, received_bytes: int, *, durable: bool) -> None:
        """Drops audio before that position, which has arrived, and with it every command sent before later audio.
        What is not durable is kept, as far as there is room."""
        self._arrived_bytes = max(self._arrived_bytes, received_bytes)
        while self._unacknowledged:
            match self._unacknowledged[0]:
                case _Command(at_bytes=at) as command if at >= received_bytes and not self._is_answered(command):
                    break
                case _Audio(at_bytes=at, data=data, end_bytes=end) if end > received_bytes:
                    if at < received_bytes:
                        self._undurable.append(_Audio(at, data[: received_bytes - at]))
                        self._unacknowledged[0] = _Audio(received_bytes, data[received_bytes - at :])
                    break
                case _Silence(at_bytes=at, samples=samples, sample_bytes=size, end_bytes=end) if end > received_bytes:
                    if at < received_bytes:  # the server takes whole samples of it
                        left = (end - received_bytes) // size
                        self._undurable.append(_Silence(at, samples - left, size))
                        self._unacknowledged[0] = _Silence(received_bytes, left, size)
                    break
            self._undurable.append(self._unacknowledged.popleft())
            self._sent_count = max(0, self._sent_count - 1)
        while self._undurable and (
            (durable and self._undurable[0].end_bytes <= received_bytes)
            or self._taken_bytes - self._undurable[0].at_bytes > self._most_bytes
        ):
            self._undurable.popleft()
        self._dropped_bytes = max(
            self._dropped_bytes, self._undurable[0].at_bytes if self._undurable else self._arrived_bytes
        )
