"""Messages of WebSockets that are no good: each protocol answers with an event of its own, in words for a client."""

from __future__ import annotations

import json

import pytest
from running_server import WAIT_S, Running
from websockets.sync.client import connect


@pytest.mark.parametrize(
    "path", ["/v1/stream", "/v1/stream?start=true", "/v1/realtime", "/v1/audio/speech/stream", "/", "/ws", "/v1/listen"]
)
@pytest.mark.parametrize("message", ["[" * 4_000, '{"type":' * 2_000, "[" * 100_000], ids=["lists", "objects", "long"])
def test_json_that_is_nested_too_deeply(server: Running, path: str, message: str) -> None:
    with connect(f"{server.url.replace('http', 'ws')}{path}", close_timeout=1) as socket:
        socket.send(message)
        while True:
            event = json.loads(socket.recv(WAIT_S))
            error = event.get("error", event)
            if "code" in error:
                break
    assert error["code"] in ("malformed_request", "unknown_command", "unsupported_protocol", "invalid_event"), error
    assert len(error["message"]) < 400
    assert "recursion" not in error["message"].lower()
