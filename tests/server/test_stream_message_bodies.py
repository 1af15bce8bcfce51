"""Bodies of messages on POST /v1/stream: what a WebSocket takes, and bodies that are wrong."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from running_server import Running

from asr_serve.errors import AudioTooLarge, MalformedRequest
from asr_serve.protocols.stream.message_framing import MESSAGES_TYPE, MessageReader, frame_message

MESSAGES = (b"", b"\x01\x02" * 700, '{"type":"silence","samples":1600}', "Zo\u00eb", b"\x00", '{"type":"end"}')


@pytest.mark.parametrize("size", [1, 4, 7, 5_000])
def test_messages_are_read_however_the_body_is_cut(size: int) -> None:
    body = b"".join(map(frame_message, MESSAGES))
    reader = MessageReader(1_400, 40)
    read = []
    for start in range(0, len(body), size):
        reader.append(body[start : start + size])
        while (message := reader.next()) is not None:
            read.append(message)
    assert tuple(read) == MESSAGES
    assert not reader.has_part


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (struct.pack(">BI", 2, 0), MalformedRequest),
        (struct.pack(">BI", 0, 1_401), AudioTooLarge),
        (struct.pack(">BI", 1, 41), AudioTooLarge),
        (struct.pack(">BI", 1, 1) + b"\xff", MalformedRequest),
    ],
)
def test_a_wrong_message_is_refused_before_its_content_is_held(body: bytes, error: type[Exception]) -> None:
    reader = MessageReader(1_400, 40)
    reader.append(body)
    with pytest.raises(error):
        reader.next()


def post(server: Running, body: bytes, query: str = "") -> list[dict[str, Any]]:
    answer = server.http.post(f"/v1/stream{query}", content=body, headers={"Content-Type": MESSAGES_TYPE})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_body_has_commands_and_a_start(server: Running) -> None:
    start = json.dumps({"type": "start", "hotwords": ["Ada"], "language": "en"})
    sound = np.zeros(800, "<i2").tobytes()
    messages = (start, sound, '{"type":"silence","samples":15200}', '{"type":"flush","id":"a"}', "{}", sound)
    events = post(server, b"".join(map(frame_message, messages)), "?start=true")
    assert [event["code"] for event in events if event["type"] == "error"] == ["unknown_command"]
    assert [event["id"] for event in events if event["type"] == "flushed"] == ["a"]
    assert events[-1]["type"] == "end"
    assert events[-1]["duration_s"] == pytest.approx(1.05)  # its end is the end of the audio


def test_a_body_that_ends_in_a_message_or_has_an_unknown_kind_is_told(server: Running) -> None:
    for body in (frame_message(bytes(100))[:-1], b"\x07\0\0\0\0"):
        events = post(server, body)
        assert [event["code"] for event in events if event["type"] == "error"] == ["malformed_request"]
        server.http.post(f"/v1/stream/{events[0]['session_id']}/end", json={})
