"""Clients of sherpa-onnx's WebSocket servers over the real server, at `/`: streaming, offline, and what is refused."""

from __future__ import annotations

import json
import struct
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import WAIT_S, Running
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.protocols.funasr.websocket import FunAsrOptions
from asr_serve.server.realtime.funasr.conversation import FunAsrConversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import Outbox

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
STEP_BYTES = 32_000
HALF = struct.pack("<f", 0.5) * 100


class AnyOptions:
    """Factory of no sessions."""

    def validate(self, options: FunAsrOptions) -> None:
        """Takes all."""

    def resolve_language(self, code: str | None) -> str:
        raise NotImplementedError

    def start(self, options: FunAsrOptions, outbox: Outbox) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def samples(beckett: Path) -> bytes:
    """The recording in floating point, as these clients send it."""
    with wave.open(str(beckett)) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return (pcm.astype(np.float32) / 32_768).tobytes()


@contextmanager
def calling(server: Running) -> Iterator[ClientConnection]:
    with connect(server.url.replace("http", "ws", 1), max_size=None, open_timeout=WAIT_S) as line:
        yield line


def hear(line: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.recv(WAIT_S))
    return found


@pytest.mark.parametrize("zeros", [0, STEP_BYTES])
def test_streaming(server, samples, zeros):
    """Zeros come first where a microphone was muted: they belong to the audio, whichever protocol it is of."""
    with calling(server) as line:
        for audio in (bytes(zeros), samples):
            for at in range(0, len(audio), STEP_BYTES):
                line.send(audio[at : at + STEP_BYTES])
        line.send("Done")
        answers = []
        while (message := line.recv(WAIT_S)) != "Done!":
            answers.append(json.loads(message))
        with pytest.raises(ConnectionClosed, match="1000"):
            line.recv(WAIT_S)
    *_, final, last = answers
    assert last == final | {"is_eof": True}
    finals = [answer for answer in answers[:-1] if answer["is_final"]]
    assert " ".join(answer["text"] for answer in finals) == BECKETT
    assert [answer["segment"] for answer in finals] == list(range(len(finals)))
    assert zeros / 64_000 < finals[0]["start_time"] + 0.2


@pytest.mark.asyncio
async def test_zeros_in_many_small_frames_are_held_as_their_number():
    frames = [*[bytes(4)] * 1_000, HALF]

    async def receive():
        return {"type": "websocket.receive", "bytes": frames.pop(0)}

    async def send(message):
        raise AssertionError(message)

    conversation = FunAsrConversation(
        receive, Outbox(send), AnyOptions(), SessionLimits(60.0, 60.0, 3_000), str, FunAsrOptions()
    )
    assert await conversation.run() is None
    assert conversation.other_protocol == "sherpa_online"
    again = conversation.receive_again(receive)
    assert [(await again())["bytes"] for _ in range(3)] == [bytes(3_000), bytes(1_000), HALF]


def test_a_microphone_that_is_muted_for_minutes_loses_no_word(server, samples):
    with calling(server) as line:
        for _ in range(100):
            line.send(bytes(64_000))
        line.send(samples)
        line.send("Done")
        finals = []
        while (message := line.recv(WAIT_S)) != "Done!":
            answer = json.loads(message)
            finals += [answer["text"]] if answer["is_final"] and not answer["is_eof"] else []
    assert " ".join(finals) == BECKETT


def test_recordings_one_after_another(server, samples):
    with calling(server) as line:
        for step in (10_240, len(samples) + 8):
            sent = struct.pack("<ii", 16_000, len(samples)) + samples
            for at in range(0, len(sent), step):
                line.send(sent[at : at + step])
            answer = hear(line)
            assert (answer["text"], len(answer["tokens"])) == (BECKETT, 12)
        line.send(struct.pack("<ii", 8_000, 0))
        assert hear(line)["text"] == ""
        line.send("Done")
        with pytest.raises(ConnectionClosed, match="1000"):
            line.recv(WAIT_S)


def test_done_behind_a_recording_waits_for_its_answer(server, samples):
    with calling(server) as line:
        line.send(struct.pack("<ii", 16_000, len(samples)) + samples)
        line.send("Done")
        assert hear(line)["text"] == BECKETT
        with pytest.raises(ConnectionClosed, match="1000"):
            line.recv(WAIT_S)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([HALF, "Stop"], "unknown_command"),
        ([HALF, b"abc"], "malformed_request"),
        ([HALF, struct.pack("<f", float("nan"))], "malformed_request"),
        ([struct.pack("<ii", 16_000, 800) + HALF, "Done"], "malformed_request"),
        ([struct.pack("<ii", 16_000, 0x7FFF_FFF0)], "audio_too_long"),
        ([struct.pack("<ii", 16_000, 400) + HALF + struct.pack("<ii", 5, 4)], "unsupported_audio"),
    ],
)
def test_what_cannot_be_read_ends_the_connection(server, messages, code):
    with calling(server) as line:
        for message in messages:
            line.send(message)
        while "code" not in (error := hear(line)):
            pass
        assert (error["event"], error["code"]) == ("error", code)
        with pytest.raises(ConnectionClosed, match="1008"):
            line.recv(WAIT_S)


def test_a_client_that_leaves_leaves_nothing(server, samples):
    for header in (b"", struct.pack("<ii", 16_000, len(samples))):
        with calling(server) as line:
            line.send(header + samples[:128_000])
