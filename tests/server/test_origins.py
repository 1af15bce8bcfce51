"""Origin headers that are no URL: refused on every POST and every WebSocket, over HTTP/1 and HTTP/2."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from running_server import WAIT_S
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from asr_serve.errors import NotAllowed
from asr_serve.server.middleware.admission import origin_host

ROUTE = "/v1/audio/transcriptions"
UNREADABLE = ["http://[", "http://[::1", "http://]:8000"]


@pytest.mark.parametrize("origin", UNREADABLE)
def test_what_cannot_be_read(origin):
    with pytest.raises(NotAllowed, match="is no URL"):
        origin_host(origin)


@pytest.mark.parametrize("origin", [None, "", "null", "https://example.org", "http://[::1]:8000"])
def test_what_can_be(origin):
    origin_host(origin)


@pytest.mark.parametrize("origin", UNREADABLE)
@pytest.mark.parametrize("route", [ROUTE, "/asr", "/v1/stream"])
def test_posts_are_refused(server, route, origin):
    told = server.http.post(route, headers={"Origin": origin}, content=b"")
    assert (told.status_code, told.json()["error"]["code"]) == (403, "not_allowed")
    assert "is no URL" in told.json()["error"]["message"]
    assert server.http.get("/v1/models", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/ws", "/v1/stream", "/v1/realtime?intent=transcription"])
def test_sockets_are_refused(server, path):
    url = f"{server.url.replace('http', 'ws', 1)}{path}"
    with connect(url, additional_headers={"Origin": UNREADABLE[0]}, open_timeout=WAIT_S) as line:
        assert "is no URL" in line.recv(WAIT_S)
        with pytest.raises(ConnectionClosed) as closed:
            line.recv(WAIT_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1_008


def test_posts_over_http_2_are_refused(server):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-s", "--http2-prior-knowledge", "-H", f"Origin: {UNREADABLE[0]}", "-d", ""]
    told = subprocess.run([*command, server.url + ROUTE], capture_output=True, check=True, timeout=WAIT_S)
    assert json.loads(told.stdout)["error"]["code"] == "not_allowed"
