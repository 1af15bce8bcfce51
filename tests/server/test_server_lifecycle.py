"""The command as it is run: many clients, some of whom leave; an engine that is killed; a stop under load."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import re
import resource
import signal
import socket
import sys
import time
import wave
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from children import Child
from raw_http import Raw, field, file_head

from asr_serve.config import ServeConfig
from asr_serve.engine.process.startup_checks import StartupNames, check_names
from asr_serve.errors import OptionError
from asr_serve.server.silent_connections import SILENT_MS

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
MODEL = "moonshine-tiny-en"
PATH = "/v1/audio/transcriptions"


class Served:
    """`asr-serve serve` in a process of its own."""

    def __init__(self, log: Path, *flags: str, open_files: int | None = None) -> None:
        """`open_files`: the limit of the process; None: the tests' own."""
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
            self.port = probe.getsockname()[1]
        with log.open("w") as out:
            self.process = Child(
                [
                    sys.executable,
                    "-c",
                    "from asr_serve.api.cli import main; main()",
                    "serve",
                    "--port",
                    str(self.port),
                    *("--voice", "none", "--set", "engine_threads=1"),
                    *flags,
                ],
                stdout=out,
                stderr=out,
                env={k: v for k, v in os.environ.items() if not k.startswith("ASR_SERVE_P")},
                preexec_fn=open_files and partial(resource.setrlimit, resource.RLIMIT_NOFILE, (open_files, open_files)),
            )

    def until_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    @property
    def engine(self) -> psutil.Process:
        [engine] = psutil.Process(self.process.pid).children()
        return engine

    def metrics(self) -> dict[str, float]:
        """Sums over the labels of each sample."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if match := re.fullmatch(r"(\w+)(?:\{.*\})? (\S+)", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def rss_mib(self) -> float:
        server = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (server, *server.children())) / 2**20

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*flags: str, open_files: int | None = None) -> Served:
        started.append(Served(tmp_path / f"server-{len(started)}.log", *flags, open_files=open_files))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def clips(packaged_speech: Path) -> list[bytes]:
    """Twelve files of 2 to 4.2 s, from different places of one recording: each says something else."""
    with wave.open(str(packaged_speech / "two_cities.wav")) as whole:
        rate, frames = whole.getframerate(), whole.readframes(whole.getnframes())
    made = []
    for number in range(12):
        start, length = int(3.4 * number * rate), int((2 + number / 5) * rate)
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(frames[2 * start : 2 * (start + length)])
        made.append(out.getvalue())
    return made


def ask(http: httpx.Client, clip: bytes) -> str:
    answer = http.post(PATH, files={"file": ("clip.wav", clip)}, data={"model": MODEL})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


@pytest.fixture(scope="module")
def texts(clips: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every clip's text when nobody else asks."""
    server = Served(tmp_path_factory.mktemp("alone") / "log", "--dtype", "fp32")
    try:
        server.until_ready()
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            found = [ask(http, clip) for clip in clips]
    finally:
        assert server.stop() == 0
    assert len(set(found)) == len(found), "texts must tell the clips apart"
    return found


async def many(
    server: Served, clips: list[bytes], clients: int, rounds: int, leave: float, seed: int = 1
) -> list[tuple[int, str]]:
    """`clients` at once, each `rounds` times; a share of the requests is broken off. The answers."""
    answers: list[tuple[int, str]] = []

    async def client(number: int) -> None:
        chance = random.Random(1_000 * seed + number)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
            for _ in range(rounds):
                which = chance.randrange(len(clips))
                asking = http.post(
                    PATH,
                    files={"file": ("clip.wav", clips[which])},
                    data={"model": MODEL, "stream": "true" if chance.random() < 0.3 else "false"},
                )
                if chance.random() < leave:
                    try:
                        await asyncio.wait_for(asking, chance.uniform(0.001, 0.4))
                    except (TimeoutError, httpx.TransportError):
                        continue
                else:
                    answer = await asking
                    assert answer.status_code == 200, answer.text
                    answers.append((which, text_of(answer)))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return answers


def text_of(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["type"] == "transcript.text.done", answer.text
        assert "".join(e["delta"] for e in events[:-1]) == events[-1]["text"]
        return str(events[-1]["text"])
    return str(answer.json()["text"])


def expect_nothing_held(server: Served) -> None:
    held = ("pages_used", "sessions", "engine_requests", "ring_depth", "requests_in_flight")
    deadline = time.monotonic() + WAIT_S
    while True:
        metrics = server.metrics()
        left = {name: metrics[f"asr_serve_{name}"] for name in held}
        left["requests_in_flight"] -= 1  # the one that asks
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_many_clients_of_whom_some_leave(served, clips, texts):
    server = served("--dtype", "fp32", "--log-format", "json")
    server.until_ready()
    sizes = []
    for seed in range(4):
        for which, text in asyncio.run(many(server, clips, clients=32, rounds=2, leave=0.3, seed=seed)):
            assert text == texts[which]
        expect_nothing_held(server)
        sizes.append(server.rss_mib())
    # The first round still fills the ring, the threads and the heaps that are kept.
    assert sizes[3] < 1.1 * sizes[1], f"memory grows: {sizes} MiB"
    metrics = server.metrics()
    assert metrics["asr_serve_requests_total"] > 32 * 2 * 4 * 0.6
    assert metrics["asr_serve_failed_steps_total"] == 0
    assert "Traceback" not in server.log.read_text()
    assert server.stop() == 0


def test_an_engine_killed_under_load_costs_nobody_the_answer(served, clips, texts):
    server = served("--dtype", "fp32", "--set", "engine.prefix_bytes=0")  # a clip that comes again is computed again
    server.until_ready()

    async def run() -> list[tuple[int, str]]:
        load = asyncio.create_task(many(server, clips, clients=12, rounds=2, leave=0.0))
        while not (await asyncio.to_thread(server.metrics))["asr_serve_engine_requests"]:
            await asyncio.sleep(0.02)
        os.kill(server.engine.pid, signal.SIGKILL)
        return await load

    answers = asyncio.run(run())
    assert len(answers) == 12 * 2
    assert [text for _, text in answers] == [texts[which] for which, _ in answers]
    assert server.metrics()["asr_serve_engine_restarts_total"] == 1
    expect_nothing_held(server)
    assert server.stop() == 0


@pytest.mark.slow
def test_a_stop_under_load_loses_no_request_that_was_accepted(served, clips, texts):
    server = served("--dtype", "fp32", "--set", "engine.prefix_bytes=0")  # a clip that comes again is computed again
    server.until_ready()
    outcomes: list[tuple[int, str | int]] = []

    async def client(number: int, http: httpx.AsyncClient) -> None:
        while True:
            which = number % len(clips)
            try:
                answer = await http.post(PATH, files={"file": ("c.wav", clips[which])}, data={"model": MODEL})
            except httpx.ConnectError:
                return  # the port is closed: it was never accepted
            outcomes.append((which, answer.json()["text"] if answer.status_code == 200 else answer.status_code))
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "draining"
                assert int(answer.headers["retry-after"]) >= 1
                return

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http, asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(client(number, http))
            while len(outcomes) < 24:
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)

    asyncio.run(run())
    assert server.process.wait(WAIT_S) == 0
    answered = [(which, text) for which, text in outcomes if isinstance(text, str)]
    assert len(answered) >= 24
    assert all(text == texts[which] for which, text in answered)
    assert "broken off" not in server.log.read_text()


@pytest.mark.slow
def test_a_drain_has_an_end(served, monkeypatch, packaged_speech):
    """Whatever holds a connection: uploads that go on for ever, a head of which half has come."""
    monkeypatch.setenv("ASR_SERVE_DRAIN_S", "0.2")
    monkeypatch.setenv("ASR_SERVE_UPLOAD_IDLE_S", "80000")
    server = served()
    server.until_ready()
    with (
        Raw(server.port) as buffered,
        Raw(server.port) as streamed,
        Raw(server.port) as begun,
        Raw(server.port) as half,
    ):
        for raw, stream in ((buffered, "false"), (streamed, "true")):
            raw.head(PATH)
            raw.chunk(field("model", MODEL) + field("stream", stream) + file_head() + bytes(10))
        begun.head(PATH)
        begun.chunk(field("stream", "true") + file_head() + (packaged_speech / "two_cities.wav").read_bytes())
        assert begun.event()["type"] == "transcript.text.delta"
        half.socket.sendall(f"POST {PATH} HTTP/1.1\r\nHost: test\r\n".encode())
        deadline = time.monotonic() + WAIT_S
        while server.metrics()["asr_serve_requests_in_flight"] < 4:  # these three, and the one that asks
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        for raw in (buffered, streamed):
            status, headers, body = raw.answer()
            assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
            assert int(headers["retry-after"]) >= 1
        with pytest.raises(AssertionError, match="the connection ended"):
            begun.until(b"0\r\n\r\n")  # cut off, and not as if that were all
        assert server.process.wait(25) == 0  # granian gives half a head 30 s
    engine.wait(WAIT_S)
    log = server.log.read_text()
    assert "3 requests were not answered in 0.2 s and are broken off" in log
    assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_while_a_model_loads(served, signals):
    server = served()
    deadline = time.monotonic() + WAIT_S
    while not psutil.Process(server.process.pid).children():
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine = server.engine
    engine.suspend()  # it never loads
    for _ in range(signals):
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + WAIT_S
        while "stopping:" not in server.log.read_text():  # it has come: two that wait are one
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert server.process.wait(WAIT_S) == signals - 1
    engine.wait(WAIT_S)


@pytest.mark.slow
def test_the_engine_ends_with_a_server_that_is_killed(served):
    server = served()
    server.until_ready()
    engine = server.engine
    server.process.kill()
    engine.wait(WAIT_S)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--model", "moonshine-tiny"), 2, "there is no model 'moonshine-tiny'.*did you mean 'moonshine-tiny-en'"),
        (("--weights", "/no/such/folder"), 2, "no-such|/no/such/folder"),
        (("--host", "203.0.113.7"), 2, "cannot be listened on"),
        (("--device", "gpu"), 2, "device='gpu'.*auto, cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), 2, "device 'cuda:99'"),
        (("--dtype", "fp23"), 2, "did you mean 'fp32'"),
    ],
    ids=["model", "weights", "host", "device", "no such device", "dtype"],
)
def test_a_start_that_fails_says_why_and_ends(served, flags, code, says):
    server = served(*flags)
    assert server.process.wait(WAIT_S) == code
    log = server.log.read_text()
    assert re.search(says, log), log
    assert "Traceback" not in log
    assert "Listening" not in log, "a wrong setting is found before the server listens"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"aliases": {"foo": "hibary"}}, "for the alias 'foo': 'hibary'.*did you mean 'hibari'"),
        ({"voice": "fastpich-en"}, "speech synthesis model 'fastpich-en'.*did you mean 'fastpitch-en'"),
        ({"voice": "whisper-tiny"}, "voice=whisper-tiny, which recognizes speech"),
    ],
    ids=["alias", "voice", "no voice"],
)
def test_the_check_before_the_start_names_what_is_wrong(settings, says):
    """What the process that checks would say, without one."""
    names = StartupNames.of(ServeConfig(**settings), None, ())
    assert not names.known_to_be_valid
    with pytest.raises(OptionError, match=says):
        check_names(names)


def test_a_cache_that_cannot_be_written_is_named_without_a_traceback(served, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "file" / "cache"))
    server = served()
    assert server.process.wait(WAIT_S) == 1
    log = server.log.read_text()
    assert f"weights cannot be written to {tmp_path / 'file' / 'cache'}: Not a directory" in log
    assert "set ASR_SERVE_CACHE" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_port_that_is_taken(served):
    server = served()
    server.until_ready()
    second = served("--port", server.url.rsplit(":", 1)[1])
    assert second.process.wait(WAIT_S) == 2
    assert "cannot be listened on" in second.log.read_text()
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.slow
def test_connections_that_send_their_headers_slowly_keep_nobody_out(served):
    """Nobody else was answered while more connections than requests were open; 2,400 sufficed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = 4_000
    if hard != resource.RLIM_INFINITY and hard < 3 * connections:
        pytest.skip(f"the system allows {hard} open files, and {3 * connections} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * connections), hard))
    server = served("--max-concurrent", "8", "--set", "max_live_sessions=8")
    server.until_ready()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(connections)]
        for connection in slow:
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\nX-A: ")
        for byte in b"slowly":
            for connection in slow:
                connection.sendall(bytes([byte]))
            assert httpx.get(f"{server.url}/ready", timeout=WAIT_S).status_code == 200
        for connection in slow:  # others were answered beside them, not after they were closed
            with pytest.raises(BlockingIOError):
                connection.recv(1, socket.MSG_DONTWAIT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a connection has received")
def test_silent_connections_keep_nobody_out_for_long(served):
    """More connections that send nothing than the server accepts. Those were kept for ever."""
    files, accepted = 600, 336
    server = served("--max-concurrent", "8", "--set", "max_live_sessions=8", open_files=files)
    server.until_ready()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))
            for _ in range(accepted + 100)
        ]
        asked_s = time.monotonic()
        assert httpx.get(f"{server.url}/ready", timeout=WAIT_S).status_code == 200
        assert time.monotonic() - asked_s < SILENT_MS / 2_000, "sooner than where there is room"
        assert silent[0].recv(1) == b""
    log = server.log.read_text()
    assert f"up to {accepted} connections instead of 8208: the system allows {files} open files" in log
