"""Requests whose heads or size are no good, over the real server; what bodies hold is in test_bad_input."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator

import pytest
from raw_http import BOUNDARY, Raw, file_head, form, told
from running_server import Running

ROUTE = "/v1/audio/transcriptions"
MALFORMED = "malformed_request"
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def small(serve: Callable[..., Running]) -> Iterator[Running]:
    server = serve(max_body_bytes=MOST_BYTES)
    yield server
    server.expect_empty()


@pytest.fixture(scope="module")
def locked(serve: Callable[..., Running]) -> Running:
    return serve(api_keys=("secret",))


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Basic OnNlY3JldA=="},
        {"Authorization": "Bearer Bearer secret"},
        {"Authorization": "Bearer secret, Bearer secret"},
        {"Authorization": "Bearer \xff"},
        {"X-API-Key": "secret"},
        {"Cookie": "Authorization=Bearer secret"},
    ],
    ids=str,
)
def test_keys(locked, sent):
    answer = locked.http.post(f"{ROUTE}?api_key=secret", headers={k: v.encode("latin-1") for k, v in sent.items()})
    status, code, param, message = told(answer.status_code, dict(answer.headers), answer.content)
    assert (status, code, param) == (401, "invalid_api_key", None)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert re.match("no key came|the key sent is not one", message)
    assert "secret" not in message


@pytest.mark.parametrize("length", [MOST_BYTES + 1, 1 << 62])
def test_a_large_body_is_refused_before_it_is_sent(small, length):
    with Raw(small.port) as raw:
        raw.head(ROUTE, length)
        status, code, _, message = told(*raw.answer())
    assert (status, code) == (413, "audio_too_large")
    assert f"a body of {length} bytes or more came. at most {MOST_BYTES}" in message


def test_a_large_body_of_unknown_length_is_refused_on_the_way(small, cities):
    with Raw(small.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + cities.read_bytes()[: MOST_BYTES + 1])
        status, code, _, message = told(*raw.answer())
    assert (status, code) == (413, "audio_too_large")
    assert f"at most {MOST_BYTES}" in message


def lines(*more: str, first: str = f"POST {ROUTE} HTTP/1.1", host: str = "Host: test") -> bytes:
    return "\r\n".join([first, *([host] if host else []), *more, "", ""]).encode("latin-1")


FORM = f"multipart/form-data; boundary={BOUNDARY}"
BAD = form([("stream", "maybe")], b"x")
LENGTH, KIND, CHUNKED = f"Content-Length: {len(BAD)}", f"Content-Type: {FORM}", "Transfer-Encoding: chunked"
HEADS: dict[str, tuple[bytes, int, str, str]] = {
    "no host": (lines(KIND, LENGTH, host="") + BAD, 400, "option_error", "'maybe'"),
    "absolute form": (
        lines(KIND, LENGTH, first=f"POST http://x.example{ROUTE} HTTP/1.1") + BAD, 400, "option_error", "'maybe'"
    ),
    "length and chunks": (
        lines(KIND, "Content-Length: 5", CHUNKED) + b"0\r\n\r\n", 400, MALFORMED, "ends after 0 bytes"
    ),
    "no chunk": (lines(KIND, CHUNKED) + b"zz\r\nabc\r\n", 400, "client_gone", "after 0 bytes"),
    "endless chunk": (
        lines(KIND, CHUNKED) + b"3\r\nabc\r\nfffffffffffffffff\r\n", 400, "client_gone", "after 3 bytes"
    ),
    "two types": (lines("Content-Type: text/plain", KIND, LENGTH) + BAD, 400, MALFORMED, "'text/plain' came"),
    "no length": (lines(KIND), 400, MALFORMED, "ends after 0 bytes"),
    "other method": (lines(first=f"BREW {ROUTE} HTTP/1.1"), 405, "no_such_route", f"BREW {ROUTE} is not allowed"),
    "to a proxy": (lines(first="CONNECT elsewhere.example:80 HTTP/1.1"), 404, "no_such_route", "CONNECT"),
    "to the server": (lines(first="OPTIONS * HTTP/1.1"), 404, "no_such_route", "there is no route"),
    "a slash more": (lines(first=f"GET {ROUTE}/ HTTP/1.1"), 404, "no_such_route", f"there is no route GET {ROUTE}/"),
    "up the tree": (lines(first="GET /docs/../../etc/passwd HTTP/1.1"), 404, "no_such_route", "/etc/passwd"),
    "encoded": (lines(first="GET /%2e%2e/%00%ff HTTP/1.1"), 404, "no_such_route", "there is no route"),
    "long path": (lines(first=f"GET /{'a' * 5_000} HTTP/1.1"), 404, "no_such_route", r"no route GET /a{99}\."),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_heads(small, name):
    sent, status, code, says = HEADS[name]
    with Raw(small.port) as raw:
        raw.socket.sendall(sent)
        found = told(*raw.answer())
    assert found[:2] == (status, code)
    assert re.search(says, found[3]), found[3]


NO_HTTP: dict[str, tuple[bytes, int]] = {
    "nonsense": (b"it was the best of times\r\n\r\n", 400),
    "tls": (b"\x16\3\1\2\0\1\0\1\xfc\3\3" + bytes(32), 400),
    "a version to come": (lines(first="GET /health HTTP/9.9"), 400),
    "many headers": (lines(*(f"X-{n}: y" for n in range(500))), 431),
    "a long header": (lines("X: " + "y" * 1_000_000), 431),
    "a long address": (lines(first=f"GET /{'a' * 100_000} HTTP/1.1"), 414),
    "a header over lines": (lines("X: y", " z"), 400),
    "two lengths": (lines("Content-Length: 5", "Content-Length: 6"), 400),
    "less than nothing": (lines("Content-Length: -5"), 400),
    "an odd encoding": (lines("Transfer-Encoding: gzip"), 400),
}
"""These never become a request: granian's HTTP answers them, with a status alone."""


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_request(small, name):
    sent, status = NO_HTTP[name]
    with Raw(small.port) as raw:
        with contextlib.suppress(ConnectionError):  # closed before all of it was sent
            raw.socket.sendall(sent)
        got, headers, body = raw.answer()
    assert (got, headers["connection"], body) == (status, "close", b"")
    assert small.http.get("/health").status_code == 200


def test_a_client_that_closes_its_half_is_told(small):
    with Raw(small.port) as raw:
        raw.head(ROUTE, 1_000)
        raw.socket.sendall(file_head())
        raw.socket.shutdown(socket.SHUT_WR)
        status, code, _, message = told(*raw.answer())
    assert (status, code) == (400, "client_gone")
    assert f"after {len(file_head())} bytes" in message
