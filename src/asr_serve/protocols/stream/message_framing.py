"""Messages of /v1/stream in a body: those of its WebSocket, each after its kind and its length.

    kind     1 byte: 0 audio, 1 text
    length   4 bytes, big-endian, of what follows

A WebSocket tells where a message ends, a body does not.
"""

from __future__ import annotations

import struct

from asr_serve.errors import AudioTooLarge, MalformedRequest

MESSAGES_TYPE = "application/vnd.asr-serve.messages"
"""Content type of such a body."""
AUDIO_KIND, TEXT_KIND = 0, 1
_HEADER = struct.Struct(">BI")


def frame_message(message: bytes | str) -> bytes:
    """Returns a message with its kind and length in front: bytes are audio, text is a command."""
    kind, data = (TEXT_KIND, message.encode()) if isinstance(message, str) else (AUDIO_KIND, message)
    return _HEADER.pack(kind, len(data)) + data


def is_messages_type(content_type: str) -> bool:
    """Returns whether that value of Content-Type names a body of messages."""
    return content_type.split(";")[0].strip().lower() == MESSAGES_TYPE


class MessageReader:
    """Reader of messages out of the pieces of a body, cut anywhere."""

    def __init__(self, max_bytes: int, max_text_bytes: int) -> None:
        """`max_bytes`, `max_text_bytes`: limits of a message."""
        self._max_bytes = {AUDIO_KIND: max_bytes, TEXT_KIND: max_text_bytes}
        self._data = bytearray()

    @property
    def has_part(self) -> bool:
        """Returns whether a message has begun and has not ended."""
        return bool(self._data)

    def append(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | str | None:
        """Returns the next whole message; None: more must come first. Raises MalformedRequest, AudioTooLarge, after
        which nothing can be read any more."""
        if len(self._data) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._data)
        if kind not in self._max_bytes:
            raise MalformedRequest(
                f"a message of the kind {kind} came", f"{AUDIO_KIND} audio, {TEXT_KIND} text", "see docs/protocols.md"
            )
        if length > self._max_bytes[kind]:
            raise AudioTooLarge(
                f"a message of {length} bytes came",
                f"up to {self._max_bytes[kind]} of its kind are allowed; nothing of this one was taken",
                "go on with the session, and send audio in smaller messages, like 100 ms",
            )
        if len(self._data) < (end := _HEADER.size + length):
            return None
        data = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        if kind == AUDIO_KIND:
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise MalformedRequest("a text came that is not UTF-8", "commands are JSON in UTF-8") from None
