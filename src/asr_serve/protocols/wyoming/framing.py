"""Framing of Wyoming: a line of JSON, then data as JSON and a payload, of the lengths that the line tells.

Source  wyoming 1.10 for Python, event.py
"""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve.errors import MalformedRequest

MAX_HEADER_BYTES = 65_536
"""Longest line; Python's own streams read no longer one."""
MAX_DATA_BYTES = 1 << 20
"""Longest JSON behind a line."""
MAX_PAYLOAD_BYTES = 1 << 20
"""Longest payload: 32 s of audio at 16 kHz."""


class WyomingEvent(msgspec.Struct, frozen=True):
    """One event as it came."""

    type: str
    data: dict[str, Any]
    payload: bytes = b""


class _Header(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any] | None = None
    data_length: int | None = None
    payload_length: int | None = None


class EventDecoder:
    """Bytes of one connection, cut anywhere, to events. Holds less than an event and what was fed at once."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: _Header | None = None
        self._searched = 0

    def feed(self, data: bytes) -> list[WyomingEvent]:
        """Events that are complete. Raises MalformedRequest; the decoder must not be used afterwards."""
        self._buffer += data
        events = []
        while (event := self._next()) is not None:
            events.append(event)
        return events

    def _next(self) -> WyomingEvent | None:
        if self._header is None:
            end = self._buffer.find(b"\n", self._searched)
            self._searched = max(0, len(self._buffer))
            if max(end, 0 if end >= 0 else len(self._buffer)) > MAX_HEADER_BYTES:
                raise MalformedRequest(
                    f"a line of {max(end, len(self._buffer) if end < 0 else end)} bytes or more came",
                    f"up to {MAX_HEADER_BYTES} for the line of an event",
                    "send longer data behind it, with data_length",
                )
            if end < 0:
                return None
            self._header = _parse_header(bytes(self._buffer[:end]))
            del self._buffer[: end + 1]
            self._searched = 0
        header = self._header
        data_bytes, payload_bytes = header.data_length or 0, header.payload_length or 0
        if len(self._buffer) < data_bytes + payload_bytes:
            return None
        data = dict(header.data or {})
        if data_bytes:
            data |= _decode_object(bytes(self._buffer[:data_bytes]))
        payload = bytes(self._buffer[data_bytes : data_bytes + payload_bytes])
        del self._buffer[: data_bytes + payload_bytes]
        self._header = None
        return WyomingEvent(header.type, data, payload)


def _parse_header(line: bytes) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, RecursionError):
        raise MalformedRequest(
            f"a line that is no header of an event came: {line[:60]!r}",
            'a line of JSON, like {"type": "describe"}',
            "speak Wyoming to this port; HTTP has another one",
        ) from None
    for name, most in (("data_length", MAX_DATA_BYTES), ("payload_length", MAX_PAYLOAD_BYTES)):
        length = getattr(header, name) or 0
        if not 0 <= length <= most:
            raise MalformedRequest(f"{name} is {length}", f"0 to {most} bytes", "send it in parts")
    return header


def _decode_object(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise MalformedRequest(f"data that cannot be read came: {text[:60]!r}", "a JSON object", "") from None


def encode_event(kind: str, data: dict[str, Any] | None = None, payload: bytes = b"") -> bytes:
    """One event; its data is behind the line, so that the line stays short."""
    header: dict[str, Any] = {"type": kind}
    body = msgspec.json.encode(data) if data else b""
    if body:
        header["data_length"] = len(body)
    if payload:
        header["payload_length"] = len(payload)
    return b"".join((msgspec.json.encode(header), b"\n", body, payload))
