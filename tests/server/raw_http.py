"""HTTP/1.1 by hand, for what no client library does: half a body, a sudden end, an answer read while sending."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

BOUNDARY = "a-boundary-of-tests"


def field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def file_head(filename: str | None = "audio.wav") -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"{named}\r\n\r\n'.encode()


FILE_END = b"\r\n"
FORM_END = f"--{BOUNDARY}--\r\n".encode()


def form(fields: Iterable[tuple[str, str]], audio: bytes | None, after: Iterable[tuple[str, str]] = ()) -> bytes:
    """A whole body: fields, the file, more fields."""
    parts = [field(*each) for each in fields]
    if audio is not None:
        parts += [file_head(), audio, FILE_END]
    return b"".join([*parts, *(field(*each) for each in after), FORM_END])


def told(status: int, headers: Mapping[str, str], body: bytes) -> tuple[int, str, str | None, str]:
    """Status, code, param and message of a refusal, whose shape is seen to."""
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    answer = json.loads(body)
    assert list(answer) == ["error"]
    error = answer["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return status, error["code"], error["param"], error["message"]


class Raw:
    """One connection."""

    def __init__(self, port: int, wait_s: float = 60.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), wait_s)
        self._got = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def head(self, path: str, length: int | None = None, **headers: str) -> None:
        """The head of a POST of a form: chunked, or of `length` bytes."""
        lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Type: multipart/form-data; boundary={BOUNDARY}"]
        lines += ["Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())

    def chunk(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.socket.sendall(b"0\r\n\r\n")

    def post(self, path: str, body: bytes, **headers: str) -> None:
        self.head(path, len(body), **headers)
        self.socket.sendall(body)

    def until(self, mark: bytes) -> bytes:
        """What has come, up to and with `mark`."""
        while mark not in self._got:
            piece = self.socket.recv(65_536)
            assert piece, f"the connection ended after {self._got[-200:]!r}, before {mark!r}"
            self._got += piece
        at = self._got.index(mark) + len(mark)
        found, self._got = self._got[:at], self._got[at:]
        return found

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body. Chunked bodies come back joined."""
        head = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = b""
        if "transfer-encoding" in headers:
            while size := int(self.until(b"\r\n"), 16):
                body += self.exactly(size + 2)[:-2]
            self.exactly(2)
        else:
            body = self.exactly(int(headers.get("content-length", "0")))
        return int(head[0].split()[1]), headers, body

    def exactly(self, size: int) -> bytes:
        while len(self._got) < size:
            piece = self.socket.recv(65_536)
            assert piece, "the connection ended in the middle of the body"
            self._got += piece
        found, self._got = self._got[:size], self._got[size:]
        return found

    def event(self) -> dict[str, Any]:
        """The next server-sent event; comments are passed over. The head must have been read."""
        self.until(b"data: ")
        return dict(json.loads(self.until(b"\n\n")))
