"""One front door and two encoders, as an operator starts them: whoever is killed, the text is the same."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from running_server import eventually
from server_process import WAIT_S, Serving

MODEL = "moonshine-tiny-en"
PLAIN = ("--model", MODEL, "--port", "0", "--set", "engine.prefix_bytes=0")


@pytest.fixture(scope="module")
def encoders(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    folder = tmp_path_factory.mktemp("encoders")
    started = [Serving(folder / f"{n}.log", "--role", "encode", *PLAIN, "--encode-port", "0") for n in range(2)]
    yield started
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def door(encoders: list[Serving], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The server that everybody asks."""
    asked = [flag for each in encoders for flag in ("--peer", each.encodes_at)]
    settings = ("--set", "engine.encode_frames=400")  # several batches of one file
    started = Serving(tmp_path_factory.mktemp("door") / "log", "--role", "decode", *asked, *PLAIN, *settings)
    yield started
    started.close()


def counted(server: Serving, metric: str) -> float:
    """The sum over all its samples."""
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*?}})? (\S+)$", text, re.MULTILINE))


def peers(server: Serving, state: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    return sum(map(float, re.findall(rf'^asr_serve_peers{{.*state="{state}".*}} (\S+)$', text, re.MULTILINE)))


def transcribe(server: Serving, file: Path) -> str:
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions", files={"file": (file.name, file.read_bytes())}, timeout=WAIT_S
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


@pytest.mark.slow
def test_an_encoder_says_what_it_is_and_hears_nobody(encoders: list[Serving], cities: Path) -> None:
    one = encoders[0]
    assert f"encodes {MODEL} for others at 127.0.0.1:" in one.said("encodes .* for others at .*")[0]
    assert one.said("ask it .*")[0].endswith(f"--model {MODEL} --peer {one.encodes_at}")
    assert httpx.get(f"{one.url}/ready", timeout=WAIT_S).json()["status"] == "ready"
    assert httpx.get(f"{one.url}/health", timeout=WAIT_S).status_code == 200
    assert "asr_serve_step_seconds" in httpx.get(f"{one.url}/metrics", timeout=WAIT_S).text
    for method, path in (("POST", "/v1/audio/transcriptions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/docs")):
        answer = httpx.request(method, f"{one.url}{path}", timeout=WAIT_S)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "no_such_route")
        assert "this engine encodes for other engines (role=encode)" in error["message"]


@pytest.mark.slow
def test_killed_in_mid_file_the_others_go_on(door: Serving, encoders: list[Serving], cities: Path) -> None:
    for each in encoders:
        assert each.encodes_at in door.said(r"peers\s+.* \(asked to encode\)")[0]
    eventually(lambda: peers(door, "ready") == 2)
    together = transcribe(door, cities)
    assert together.startswith("It was the best of times")
    assert all(counted(each, "asr_serve_step_seconds_count") for each in encoders), "one of them had nothing to do"

    # One whose engine stands still has taken some of the file when all of it is killed.
    encoders[0].engine().send_signal(signal.SIGSTOP)
    before = counted(door, "asr_serve_queue_seconds_count")
    heard: list[str] = []
    asking = [threading.Thread(target=lambda: heard.append(transcribe(door, cities))) for _ in range(3)]
    for each in asking:
        each.start()
    eventually(lambda: counted(door, "asr_serve_queue_seconds_count") >= before + 3)
    encoders[0].kill()
    for each in asking:
        each.join(WAIT_S)
    assert heard == [together] * 3
    eventually(lambda: peers(door, "ready") == 1)
    assert counted(door, "asr_serve_failed_steps_total") == 0

    # An engine alone: its own server starts another, and it is asked again.
    before = counted(door, "asr_serve_peer_batches_total")
    old = encoders[1].engine().pid
    psutil.Process(old).kill()
    assert transcribe(door, cities) == together
    eventually(lambda: peers(door, "ready") == 1)
    assert encoders[1].engine().pid != old
    assert transcribe(door, cities) == together
    assert counted(door, "asr_serve_peer_batches_total") > before

    encoders[1].kill()  # now it is alone
    assert transcribe(door, cities) == together
    assert peers(door, "ready") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--role", "encode", "--peer", "here:1"], "role=encode with peers"),
        (["--role", "encode", "--model", MODEL, "--model", "whisper-tiny-en"], "role=encode with 2 models"),
        (["--role", "decode", "--model", "armspeech-hy"], "models that hear whole utterances: "),
        (["--role", "half"], "both, decode, encode"),
        (["--peer", "nowhere"], "host:port"),
    ],
)
def test_what_cannot_be_is_said_at_start(tmp_path: Path, flags: list[str], said: str) -> None:
    server = Serving(tmp_path / "log", *flags, "--port", "0", "--encode-port", "0")
    assert server.process.wait(WAIT_S) in (1, 2)
    assert said in server.log.read_text()
