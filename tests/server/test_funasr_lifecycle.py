"""The command as FunASR's clients meet it: its second port, an engine that dies, a stop while somebody speaks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
from children import Child
from running_server import eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.audio.reader import open_audio

WAIT_S = 180.0
SESSIONS = 3
"""That the engine holds."""
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
OPEN_SESSIONS = re.compile(r"^asr_serve_live_open_sessions\{.*\} (\S+)$", re.MULTILINE)


class Served(NamedTuple):
    process: subprocess.Popen[str]
    main: str
    realtime: str


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One for all tests; the last of them stops it."""
    command = [
        sys.executable,
        "-c",
        "from asr_serve.api.cli import main; main()",
        "serve",
        "--voice",
        "none",
        "--port",
        "0",
    ]
    command += ["--realtime-port", "0", "--set", "engine_threads=1", "--set", f"engine.max_sessions={SESSIONS}"]
    with Child(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = ""
        while not (live := re.search(r"^  live +(ws://\S+)", said, re.MULTILINE)):
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        main = re.search(r" on http://(\S+) \(ready", said)
        assert main
        yield Served(process, f"ws://{main[1]}", live[1])
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.fixture
def served(server: Served) -> Served:
    """With nobody on it."""
    metrics = f"http://{server.main.removeprefix('ws://')}/metrics"
    eventually(lambda: not any(map(float, OPEN_SESSIONS.findall(httpx.get(metrics, timeout=WAIT_S).text))))
    return server


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    return (np.concatenate(list(open_audio(packaged_speech / "beckett.wav"))) * 32_767).astype("<i2").tobytes()


def hear(line: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.recv(WAIT_S))
    return found


def final(line: ClientConnection) -> list[str]:
    while not (answer := hear(line)).get("is_final"):
        pass
    return [sentence["text"] for sentence in answer["sentences"]]


def closed(line: ClientConnection) -> int:
    """The code that the server closes with."""
    try:
        while True:
            hear(line)
    except ConnectionClosed as ended:
        return int(ended.rcvd.code) if ended.rcvd else 1_006


@pytest.mark.slow
def test_both_ports_answer(served, pcm):
    assert served.main != served.realtime
    for url in (served.realtime, served.main, f"{served.realtime}/ws", f"{served.main}/ws"):
        with connect(url, open_timeout=WAIT_S) as line:
            line.send("START")
            line.send(pcm)
            line.send("STOP")
            assert final(line) == [BECKETT]


@pytest.mark.slow
def test_an_engine_that_is_full(served, pcm):
    with ExitStack() as open_lines:
        lines = [open_lines.enter_context(connect(served.main, open_timeout=WAIT_S)) for _ in range(SESSIONS + 2)]
        for line in lines[:SESSIONS]:
            line.send("START")
            assert hear(line) == {"event": "started"}
        lines[SESSIONS].send("START")
        told = hear(lines[SESSIONS])
        assert (told["code"], told["retry_after_ms"] > 0) == ("at_capacity", True)
        assert closed(lines[SESSIONS]) == 1_013
        lines[0].send("STOP")
        assert final(lines[0]) == []
        lines[-1].send("START")
        lines[-1].send(pcm)
        lines[-1].send("STOP")
        assert final(lines[-1]) == [BECKETT]


@pytest.mark.slow
def test_an_engine_that_dies_while_somebody_speaks(served, pcm):
    with connect(served.realtime, open_timeout=WAIT_S) as line:
        line.send("START")
        for at in range(0, len(pcm), 3_200):
            line.send(pcm[at : at + 3_200])
            if at == 48 * 3_200:
                [engine] = psutil.Process(served.process.pid).children()
                engine.kill()
            time.sleep(0.02)
        line.send("STOP")
        assert final(line) == [BECKETT]


@pytest.mark.slow
def test_a_stop_while_somebody_speaks(served, pcm):
    with connect(served.realtime) as line, connect(f"{served.main}/ws") as recording, connect(served.main) as idle:
        for each in (line, recording):
            each.send("START")
            each.send(pcm)
        while not hear(line).get("partial"):
            pass
        served.process.send_signal(signal.SIGTERM)
        for each in (line, recording):
            assert final(each) == [BECKETT]
        for each in (line, recording, idle):
            assert closed(each) == 1_012
    assert served.process.wait(WAIT_S) == 0
