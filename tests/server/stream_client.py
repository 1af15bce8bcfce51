"""A client of /v1/stream over each of its transports, without threads: connections break where a test wants."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import h2.config
import h2.connection
import h2.events
import numpy as np
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from asr_serve.audio.reader import open_audio

WAIT_S = 110.0
"""Less than a session may be idle: the server ends none that a test waits for."""
Event = dict[str, Any]
NUMBERED = {"locked", "segment", "flushed", "turn", "speakers", "language", "end"}


def pcm_of(path: Path, seconds: float | None = None) -> bytes:
    pcm = np.concatenate(list(open_audio(path)))
    return (pcm[: None if seconds is None else int(16_000 * seconds)] * 32_767).astype("<i2").tobytes()


class Line:
    """One connection. `events` has all that came over it; `over`: the server has ended it."""

    def __init__(
        self, port: int, headers: dict[str, str] | None = None, host: str = "127.0.0.1", **query: object
    ) -> None:
        self.socket = socket.create_connection((host, port), WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.target = "/v1/stream" + (f"?{urlencode(query)}" if query else "")
        self.headers = headers or {}
        self.events: list[Event] = []
        self.over = False
        try:
            self.open(f"{host}:{port}")
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def open(self, host: str) -> None:
        raise NotImplementedError

    def send(self, audio: bytes) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def took(self, data: bytes) -> None:
        """Bytes came; none: the connection is closed."""
        raise NotImplementedError

    def poll(self, wait_s: float = 0.0) -> bool:
        """Take what has come. False: nothing did."""
        if self.over or not select.select([self.socket], [], [], wait_s)[0]:
            return False
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.took(data)
        return True

    def write(self, data: bytes) -> None:
        """What the server has closed already is read to its end."""
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def until(self, true: Callable[[], object]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not true():
            assert not self.over or true(), self.events
            assert time.monotonic() < end_s, self.events
            self.poll(0.1)

    def hear(self, kind: str) -> Event:
        """The first event of that type that has come, or comes."""
        self.until(lambda: any(event["type"] == kind for event in self.events))
        return next(event for event in self.events if event["type"] == kind)

    def rest(self) -> list[Event]:
        """All events, when the server has ended the connection."""
        end_s = time.monotonic() + WAIT_S
        while not self.over:
            assert time.monotonic() < end_s, self.events
            self.poll(0.1)
        return self.events

    def cut(self, *, reset: bool) -> None:
        """Without a word; `reset`: what is on its way is lost."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        self.over = True


class WebSocket(Line):
    code: int | None = None
    """What the server closed with."""

    def open(self, host: str) -> None:
        self._protocol = ClientProtocol(parse_uri(f"ws://{host}{self.target}"), max_size=None)
        request = self._protocol.connect()
        for name, value in self.headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()
        while self._protocol.state is State.CONNECTING:
            self.took(self.socket.recv(1 << 20))
        assert self._protocol.handshake_exc is None, self._protocol.handshake_exc

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self.write(data)

    def send(self, audio: bytes) -> None:
        self._protocol.send_binary(audio)
        self._flush()

    def say(self, command: str) -> None:
        self._protocol.send_text(command.encode())
        self._flush()

    def flush(self, name: str) -> None:
        self.say(json.dumps({"type": "flush", "id": name}))

    def end(self) -> None:
        self.say('{"type":"end"}')

    def close(self, code: int) -> None:
        self._protocol.send_close(code)
        self._flush()
        self.rest()

    def took(self, data: bytes) -> None:
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
            self.over = True
        for found in self._protocol.events_received():
            if getattr(found, "opcode", None) is Opcode.TEXT:
                self.events.append(json.loads(found.data))
            elif getattr(found, "opcode", None) is Opcode.CLOSE:
                self.code, self.over = self._protocol.close_rcvd.code, True
        if self._protocol.state is not State.CLOSED:
            self._flush()


class _Body(Line):
    """Server-sent events are the answer to a body that is still sent."""

    status: int | None = None

    def open(self, host: str) -> None:
        self._left = b""
        self.body = b""
        self.open_body(host)

    def open_body(self, host: str) -> None:
        raise NotImplementedError

    def got(self, piece: bytes) -> None:
        """Some of the answer's body."""
        self.body += piece
        if self.status != 200:
            return
        *blocks, self._left = (self._left + piece).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if not fields:
                continue
            event = json.loads(fields[b"data"])
            assert fields[b"event"].decode() == event["type"]
            assert (b"id" in fields) == (event["type"] in NUMBERED)
            if b"id" in fields:
                assert int(fields[b"id"]) == event["seq"]
            self.events.append(event)


class Http1(_Body):
    """A chunked body."""

    def open_body(self, host: str) -> None:
        self._raw = b""
        lines = [f"POST {self.target} HTTP/1.1", f"Host: {host}", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        self.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def send(self, audio: bytes) -> None:
        if audio:
            self.write(b"%x\r\n%s\r\n" % (len(audio), audio))

    def end(self) -> None:
        self.write(b"0\r\n\r\n")

    def took(self, data: bytes) -> None:
        self._raw += data
        self.over = self.over or not data
        if self.status is None:
            head, mark, rest = self._raw.partition(b"\r\n\r\n")
            if not mark:
                return
            self.status, self._raw = int(head.split()[1]), rest
            self._chunked = b"transfer-encoding: chunked" in head.lower()
        if not self._chunked:
            self.got(self._raw)
            self._raw = b""
            return
        while b"\r\n" in self._raw:
            size, _, rest = self._raw.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            self.got(rest[:length])
            self._raw = rest[length + 2 :]
            self.over = self.over or not length


class Http2(_Body):
    """Prior knowledge, without TLS."""

    def open_body(self, host: str) -> None:
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._h2.initiate_connection()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", host), (":path", self.target)]
        self._h2.send_headers(1, head + [(name.lower(), value) for name, value in self.headers.items()])
        self.write(self._h2.data_to_send())

    def send(self, audio: bytes) -> None:
        left = audio
        while left and not self.over:
            size = min(len(left), self._h2.local_flow_control_window(1), self._h2.max_outbound_frame_size)
            if size:
                self._h2.send_data(1, left[:size])
                self.write(self._h2.data_to_send())
                left = left[size:]
            else:
                self.poll(1.0)

    def end(self) -> None:
        self._h2.end_stream(1)
        self.write(self._h2.data_to_send())

    def abandon(self) -> None:
        """The stream, not the connection: RST_STREAM."""
        self._h2.reset_stream(1, 8)
        self.write(self._h2.data_to_send())
        self.over = True

    def took(self, data: bytes) -> None:
        self.over = self.over or not data
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.status = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.DataReceived):
                self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
                self.got(event.data)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset | h2.events.ConnectionTerminated):
                self.over = True
        out = self._h2.data_to_send()
        if out and not self.over:
            self.write(out)


TRANSPORTS: tuple[type[Line], ...] = (WebSocket, Http1, Http2)


def pour(line: Line, pcm: bytes, packet_bytes: int = 3_200, wait_s: float = 0.0) -> None:
    """Send, and take what comes meanwhile."""
    for at in range(0, len(pcm), packet_bytes):
        line.send(pcm[at : at + packet_bytes])
        while line.poll():
            pass
        if wait_s:
            time.sleep(wait_s)


def whole(line: Line, pcm: bytes, packet_bytes: int = 3_200, wait_s: float = 0.0) -> list[Event]:
    """All events of a session that nothing disturbs."""
    pour(line, pcm, packet_bytes, wait_s)
    line.end()
    return line.rest()


def numbered(events: list[Event]) -> list[Event]:
    return [event for event in events if event["type"] in NUMBERED]


def segments(events: list[Event]) -> list[tuple[float, float, str]]:
    return [(event["start_s"], event["end_s"], event["text"]) for event in events if event["type"] == "segment"]


def expect_sound(events: list[Event]) -> None:
    """What holds of every session's numbered events, as its client has put them together."""
    told = numbered(events)
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
    locked, index, at_s = "", 0, 0.0
    for event in told:
        for name in ("start_s", "end_s", "position_s", "duration_s"):
            assert event.get(name, 0.0) == round(event.get(name, 0.0) * 16_000) / 16_000, event
        match event["type"]:
            case "locked":
                assert event["text"]
                locked += event["text"]
            case "segment":
                assert event["text"].startswith(locked), (locked, event)
                assert event["index"] == index
                assert at_s <= event["start_s"] < event["end_s"], event
                locked, index, at_s = "", index + 1, event["end_s"]
            case "end":
                assert event is told[-1]
                assert (event["segments"], locked) == (index, "")
