"""/v1/stream?start=true: what is asked for comes in the first message, for some is longer than an address."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from running_server import WAIT_S, Running
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from asr_serve.api.client.stream import StreamClient
from asr_serve.audio import read_audio
from asr_serve.errors import MalformedRequest, OptionError
from asr_serve.protocols.stream import client_messages
from asr_serve.protocols.stream.server_events import SegmentEvent


def names(count: int) -> list[str]:
    rng = random.Random(count)
    parts = ["ba", "ko", "ri", "ten", "sha", "mol", "gu", "vex", "lin", "tra", "do", "pem"]
    return sorted({"".join(rng.choices(parts, k=4)).capitalize() for _ in range(3 * count)})[:count]


def first_event(server: Running, query: str, message: str | bytes) -> dict[str, Any]:
    with connect(f"ws://127.0.0.1:{server.port}/v1/stream?{query}") as line:
        line.send(message)
        event: dict[str, Any] = json.loads(line.recv(WAIT_S))
        if event["type"] == "error":
            with contextlib.suppress(ConnectionClosed):
                while True:
                    line.recv(WAIT_S)  # a TimeoutError: it was not hung up
        return event


def test_ten_thousand_hot_words_come_to_a_stream(server: Running, beckett: Path):
    """Through the Python client, which keeps them out of the address."""
    pcm = (read_audio(beckett) * 32_767).astype("<i2").tobytes()
    with StreamClient(server.url, hotwords=",".join([*names(9_999), "Beckett"])) as line:
        line.send(pcm)
        line.end()
        told = " ".join(event.text for event in line if isinstance(event, SegmentEvent))
    assert "fail" in told.lower()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "message", "says"),
    [
        ("start=true", b"\x00\x00", "audio came before the start"),
        ("start=true", "{", "a start came that cannot be read"),
        ("start=true", '{"type":"end"}', "the first message was no start"),
        ("start=true", '{"type":"start","langauge":"en"}', "unknown field 'langauge'"),
        ("start=true", '{"type":"start","session":"x"}', "it is part of the address"),
        ("start=true&itn=true", '{"type":"start","itn":true}', "in the address and in the start"),
        ("start=true", '{"type":"start","prompt":["a"]}', "hotwords may be one"),
        ("start=true", '{"type":"start","hotwords":["Ada:99"]}', "0.1 to 10"),
        ("start=perhaps", '{"type":"start"}', "true or false"),
        ("start=true&session=abc", '{"type":"start"}', "start came with session"),
    ],
)
def test_a_bad_start_is_refused(server: Running, query: str, message: str | bytes, says: str):
    event = first_event(server, query, message)
    assert event["type"] == "error"
    assert says in event["message"]


def test_a_start_says_what_a_query_says(server: Running):
    assert first_event(server, "start=true", '{"type":"start","language":"en","hotwords":["Ada"]}')["type"] == "session"


def test_a_start_is_bounded():
    with pytest.raises(MalformedRequest, match="a start of"):
        client_messages.merge_start_message({}, "x" * (client_messages.MAX_START_CHARACTERS + 1))
    with pytest.raises(OptionError, match="once is allowed"):
        client_messages.merge_start_message({"itn": ["true"]}, '{"type":"start","itn":false}')
    query = client_messages.merge_start_message(
        {"model": ["m"]}, '{"type":"start","words":true,"rate":8000,"hotwords":["a b","c:2"]}'
    )
    assert query == {"model": ["m"], "words": ["true"], "rate": ["8000"], "hotwords": ["a b,c:2"]}
    with pytest.raises(OptionError, match="a body is audio only"):
        client_messages.parse_query({"start": ["true"]}, packets=False)
