"""OpenAI Realtime at the command as it is served: an engine that is full, that dies, that dies again and again."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
import soxr
from children import Child
from openai_checked import checked
from running_server import eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.audio.reader import open_audio
from asr_serve_tools.evaluate.wer import wer

WAIT_S = 180.0
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
OPEN_SESSIONS = re.compile(r"^asr_serve_live_open_sessions\{.*\} (\S+)$", re.MULTILINE)


class Served(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    metrics: str


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One for all tests; the last of them leaves it without an engine."""
    command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "serve", "--port", "0"]
    command += ["--voice", "none", "--set", "engine_threads=1", "--set", "engine.max_sessions=1"]
    with Child(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = ""
        while not (main := re.search(r" on http://(\S+) \(ready", said)):
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        reading = threading.Thread(target=process.stderr.read, daemon=True)  # so that its log never waits
        reading.start()
        yield Served(process, f"ws://{main[1]}/v1/realtime?intent=transcription", f"http://{main[1]}/metrics")
        if process.poll() is None:
            process.kill()
        reading.join(WAIT_S)


@pytest.fixture
def served(server: Served) -> Served:
    """With nobody on it."""
    eventually(lambda: not any(map(float, OPEN_SESSIONS.findall(httpx.get(server.metrics, timeout=WAIT_S).text))))
    return server


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    speech = np.concatenate([*open_audio(packaged_speech / "beckett.wav"), np.zeros(16_000, np.float32)])
    return (np.clip(soxr.resample(speech, 16_000, 24_000), -1, 1) * 32_767).astype("<i2").tobytes()


def hear(line: ClientConnection) -> dict[str, Any]:
    return checked(json.loads(line.recv(WAIT_S)))


def until(line: ClientConnection, kind: str) -> dict[str, Any]:
    while not (event := hear(line))["type"].endswith(kind):
        pass
    return event


def append(line: ClientConnection, pcm: bytes) -> None:
    line.send(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()}))


def commit(line: ClientConnection) -> None:
    line.send('{"type": "input_audio_buffer.commit"}')


def manual(line: ClientConnection) -> None:
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    line.send(json.dumps({"type": "session.update", "session": session}))


def kill_engine(served: Served) -> bool:
    engines = psutil.Process(served.process.pid).children()
    for engine in engines:
        with suppress(psutil.NoSuchProcess):
            engine.kill()
            engine.wait(WAIT_S)
    return bool(engines)


def closed(line: ClientConnection) -> int:
    try:
        while True:
            hear(line)
    except ConnectionClosed as ended:
        return int(ended.rcvd.code) if ended.rcvd else 1_006


@pytest.mark.slow
def test_an_engine_that_is_full(served, pcm):
    with connect(served.url, max_queue=None) as one, connect(served.url) as two:
        append(one, pcm)
        until(one, "speech_started")
        until(two, "session.created")
        append(two, pcm)
        told = until(two, "error")["error"]
        assert (told["code"], told["type"], closed(two)) == ("at_capacity", "rate_limit_error", 1_013)
        assert told["retry_after_ms"] > 0
        until(one, "transcription.completed")


@pytest.mark.slow
def test_an_engine_that_dies_once(served, pcm):
    with connect(served.url) as line:
        manual(line)
        append(line, pcm[: len(pcm) // 2])
        until(line, "session.updated")
        time.sleep(0.5)  # voice activity and words are under way
        assert kill_engine(served)
        append(line, pcm[len(pcm) // 2 :])
        commit(line)
        text = until(line, "transcription.completed")["transcript"]
    assert wer([BECKETT], [text]).errors <= 2, text


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again(served, pcm):
    """What was committed has failed, the session ends, and nobody waits for ever."""
    with connect(served.url) as line:
        manual(line)
        until(line, "session.updated")
        over = threading.Event()

        def kill() -> None:
            while not over.wait(0.05):
                kill_engine(served)

        killing = threading.Thread(target=kill)
        killing.start()
        try:
            append(line, pcm)
            commit(line)
            item = until(line, "committed")["item_id"]
            failed = until(line, "transcription.failed")
            told = until(line, "error")
        finally:
            over.set()
            killing.join(WAIT_S)
        assert failed["item_id"] == item
        assert failed["error"]["type"] == told["error"]["type"] == "server_error"
        assert closed(line) in (1_011, 1_013)
