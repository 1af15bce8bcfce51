"""Faults of a cluster, each under load and counted: requests that are lost, words that change, events that come twice.

    python bench/cluster_faults.py --json cluster-faults.json
    python bench/cluster_faults.py --fault "engine killed" --fault "node cut off"

A real Ray on machines that are network namespaces of this one (tests/cluster/hosts.py; root): a head for Ray Serve's
controller, two nodes, each with an ingress and a replica, and one with Redis. Clients reach the ingresses by way of a
load balancer here. During each fault there are live callers of /v1/stream, who resume; where no ingress fails, also
callers of FunASR's and OpenAI's sockets, which cannot; and a queue of files, whose clients send a file again where the
connection ended without an answer (`sent_again`). What each is told is compared with what it is told in peace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.resources
import io
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import live_protocols
import machine
import numpy as np
import psutil
import yaml
from websockets.exceptions import ConnectionClosedError, WebSocketException
from websockets.sync.client import connect

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))

import hosts
from hosts import INGRESS_CPUS, REPLICA_CPUS, Host, Network, RayHosts

from asr_serve.api.client.connection import ServerEvent
from asr_serve.api.client.stream import StreamClient
from asr_serve.audio import read_audio
from asr_serve.errors import AsrServeError, Refused
from asr_serve.protocols.stream.server_events import EndEvent, LockedTextEvent, NumberedEvent, SegmentEvent

SOURCES = Path(__file__).resolve().parent.parent / "src"
"""Path of Ray's processes: in this folder are modules with names of packages."""
PATIENT = {"RAY_raylet_start_wait_time_s": "180"}
"""Setting of Ray for a machine that other programs use too."""
SYSTEM = {
    "worker_niceness": 0,
    # A node that is away is given up after some 20 s: later than a short cut ends, and earlier than by default.
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 2_000,
    "health_check_timeout_ms": 5_000,
    "health_check_failure_threshold": 3,
}
MODEL = "moonshine-tiny-en"
RATE_HZ = 16_000
SPEECH_S, SILENCE_S = 10.0, 1.0
FRAME_S = 0.1
FAULT_AFTER_S = 3.0
"""Time from the start of the callers to the fault: in the middle of their speech."""
AWAY_S = 8.0
"""Time that something is paused, cut off or down; more than `replica_silent_s`."""
WAIT_S = 600.0
"""Longest wait of a client for its answer, and of the bench for a cluster that is whole again."""
CALLERS, SOCKETS, FILES = 4, 1, 2
"""Live callers of /v1/stream; of FunASR's and of OpenAI's socket; clients that send files, one after another."""
UPGRADE_CALLERS = 24
BALANCER_CONNECT_S = 1.0
REDIS_PORT = 6379


class Speech(NamedTuple):
    """Recording as samples and as a file."""

    pcm: np.ndarray
    wav: bytes


def speech() -> Speech:
    """Speech that a test dependency carries, with silence after it."""
    source = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "two_cities.wav"
    pcm = (read_audio(source)[: int(SPEECH_S * RATE_HZ)] * 32_767).astype(np.int16)
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setframerate(RATE_HZ)
        file.setsampwidth(2)
        file.setnchannels(1)
        file.writeframes(pcm.tobytes())
    return Speech(np.concatenate([pcm, np.zeros(int(SILENCE_S * RATE_HZ), np.int16)]), made.getvalue())


class Balancer:
    """Load balancer for TCP: a new connection goes to one of the ingresses, and to another where that one does not
    answer at once."""

    def __init__(self, targets: list[tuple[str, int]]) -> None:
        self._targets = targets
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(WAIT_S)
        self.url = f"http://127.0.0.1:{port}"

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for host, port in random.sample(self._targets, len(self._targets)):
            try:
                back, forth = await asyncio.wait_for(asyncio.open_connection(host, port), BALANCER_CONNECT_S)
            except (OSError, TimeoutError):
                continue
            await asyncio.gather(self._copy(reader, forth), self._copy(back, writer))
            return
        writer.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        sink.close()


class Told(NamedTuple):
    """What a client was told."""

    texts: tuple[str, ...]
    """Final texts; none where it was lost."""
    lost: str = ""
    """Why it was lost."""
    changed: int = 0
    """Locked words that a later event contradicts."""
    twice: int = 0
    """Numbered events that came again."""
    missing: int = 0
    """Numbered events that never came."""
    longest_wait_s: float = 0.0
    """Longest time without any event."""
    sent_again: int = 0
    """Times that a file was sent again."""


class CountingClient(StreamClient):
    """Client that counts events before it drops those that it knows."""

    twice = missing = 0

    def _apply_event(self, event: ServerEvent) -> None:
        if isinstance(event, NumberedEvent):
            self.twice += event.seq <= self._last_seq
            self.missing += max(0, event.seq - self._last_seq - 1)
        super()._apply_event(event)


def paced(pcm: np.ndarray) -> Iterator[bytes]:
    """Frames of a recording, each when it has been spoken."""
    start_s, size = time.monotonic(), int(FRAME_S * RATE_HZ)
    for number, at in enumerate(range(0, len(pcm), size)):
        time.sleep(max(0.0, start_s + number * FRAME_S - time.monotonic()))
        yield pcm[at : at + size].tobytes()


def open_stream(url: str) -> CountingClient:
    """A session of /v1/stream. A server without room says when to come again: the session has not begun then."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return CountingClient(url, encoding="s16le", rate=RATE_HZ)
        except AsrServeError as failure:
            if time.monotonic() > end_s:
                raise
            wait_ms = failure.retry_after_ms if isinstance(failure, Refused) else None
            time.sleep((wait_ms or 500) / 1_000)


def call_stream(url: str, said: Speech) -> Told:
    """A live caller of /v1/stream."""
    with open_stream(url) as client:

        def talk() -> None:
            with contextlib.suppress(AsrServeError):  # the reader meets it too
                for frame in paced(said.pcm):
                    client.send(frame)
                client.end()

        threading.Thread(target=talk, daemon=True).start()
        texts: list[str] = []
        locked, changed, longest_s, last_s, ended = "", 0, 0.0, time.monotonic(), False
        try:
            for event in client:
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                match event:
                    case LockedTextEvent():
                        locked += event.text
                    case SegmentEvent():
                        changed += not event.text.startswith(locked.strip())
                        texts.append(event.text)
                        locked = ""
                    case EndEvent():
                        ended = True
            lost = "" if ended else "it ended without an end"
        except AsrServeError as failure:
            lost = str(failure)
        return Told(tuple(texts), lost, changed, client.twice, client.missing, longest_s)


AT_CAPACITY_CODE = 1013
"""Close code of a server without room."""


def call_socket(name: str, url: str, said: Speech) -> Told:
    """A live caller of FunASR's or OpenAI's socket, who comes again where a server has no room: it has taken no word
    then."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return try_socket(name, url, said)
        except ConnectionClosedError as failure:
            if time.monotonic() > end_s or failure.rcvd is None or failure.rcvd.code != AT_CAPACITY_CODE:
                return Told((), f"{name}: {failure!r}")
            time.sleep(0.5)


def try_socket(name: str, url: str, said: Speech) -> Told:
    """One attempt, by the same messages as in bench/live_load.py. Raises ConnectionClosedError where no text came."""
    protocol = live_protocols.NAMES[name](500)
    packets = protocol.packets(said.pcm)
    answers: list[tuple[float, dict[str, Any]]] = []
    try:
        with connect("ws" + url.removeprefix("http") + protocol.path, open_timeout=WAIT_S, max_size=None) as line:
            if protocol.hello is not None:
                line.send(protocol.hello)
            while not protocol.ready(json.loads(line.recv(WAIT_S))):
                pass
            parting = threading.Event()

            def talk() -> None:
                with contextlib.suppress(WebSocketException):
                    for packet, _ in zip(packets, paced(said.pcm), strict=False):
                        line.send(packet)
                    parting.set()
                    line.send(protocol.goodbye)

            threading.Thread(target=talk, daemon=True).start()
            while True:
                text = line.recv(WAIT_S)
                assert isinstance(text, str)
                answers.append((time.monotonic(), json.loads(text)))
                if protocol.ended(text, parting=parting.is_set()):
                    break
    except (OSError, WebSocketException, TimeoutError) as failure:
        if isinstance(failure, ConnectionClosedError) and not any(True for _ in protocol.heard(answers)):
            raise
        return Told((), f"{name}: {failure!r} after {answers[-1:]}")
    times_s = [when for when, _ in answers]
    longest_s = max((after - before for before, after in itertools.pairwise(times_s)), default=0.0)
    texts = [each["text"] for _, message in protocol.heard(answers) for each in message["sentences"]]
    return Told(tuple(texts), longest_wait_s=longest_s)


def send_file(url: str, said: Speech) -> Told:
    """A client that sends a file, and again where the connection ended without an answer."""
    begin_s, again, reason = time.monotonic(), 0, ""
    address = f"{url}/v1/audio/transcriptions"
    while time.monotonic() - begin_s < WAIT_S:
        try:
            answer = httpx.post(address, files={"file": ("talk.wav", said.wav)}, data={"model": MODEL}, timeout=WAIT_S)
        except httpx.TransportError as failure:
            reason = repr(failure)
        else:
            if answer.status_code == 200:
                return Told((answer.json()["text"],), sent_again=again, longest_wait_s=time.monotonic() - begin_s)
            reason = f"{answer.status_code} {answer.text}"
            if answer.status_code not in (429, 503):
                break
        again += 1
        time.sleep(0.3)
    return Told((), f"file: {reason}", sent_again=again)


class Bench:
    """A cluster, its clients, and its faults."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.said = speech()
        self.redis_host = network.add("redis")
        self.start_redis()
        environ = {"PYTHONPATH": str(SOURCES), **PATIENT}
        self.cluster = RayHosts(network, folder, nodes=2, environ=environ, system=SYSTEM)
        self.cluster.up(self.settings())
        self.balancer = Balancer([(node.address, 8000) for node in self.cluster.nodes])
        self.wait_whole()
        self.expected: dict[str, tuple[str, ...]] = {}

    def settings(self) -> dict[str, Any]:
        redis = f"redis://{self.redis_host.address}:{REDIS_PORT}/0"
        return {
            "models": [{"model": MODEL, "replicas": 2, "cpus": REPLICA_CPUS}],
            "ingress": {"replicas": 2, "cpus": INGRESS_CPUS},
            "replica_silent_s": 4,
            "serve": {
                "host": "0.0.0.0",
                "port": 8000,
                "turn_model": "none",
                "engine": {"prefix_bytes": 0},
                "sessions": {"redis_url": redis},
            },
        }

    def start_redis(self) -> None:
        command = [
            "redis-server",
            "--port",
            str(REDIS_PORT),
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.redis = subprocess.Popen([*self.redis_host.within, *command], stdout=subprocess.DEVNULL)

    def close(self) -> None:
        self.cluster.close()
        self.redis.kill()
        self.redis.wait(WAIT_S)

    # --- state -------------------------------------------------------------------------------------------

    def whole(self) -> bool:
        """Returns whether both ingresses are ready, and each is connected to two replicas."""
        for node in self.cluster.nodes:
            try:
                ready = httpx.get(f"{node.url}/ready", timeout=2)
                metrics = httpx.get(f"{node.url}/metrics", timeout=5)
            except httpx.HTTPError:
                return False
            replicas = set(re.findall(r'replica="([^"]+)"', metrics.text))
            if (
                ready.status_code != 200
                or len(replicas) != 2
                or 'asr_serve_session_store_up{store="redis"} 1.0' not in metrics.text
            ):
                return False
        return True

    def wait_whole(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while not self.whole():
            if time.monotonic() > end_s:
                raise SystemExit(f"the cluster is not whole after {WAIT_S:g} s:\n{self.cluster.logs()}")
            time.sleep(0.2)

    # --- load --------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """What clients are told in peace."""
        with ThreadPoolExecutor(4) as pool:
            asked = {kind: pool.submit(self.client, kind) for kind in ("stream", "funasr", "openai", "file")}
            for kind, told in asked.items():
                found = told.result(WAIT_S)
                assert found.texts, found.lost
                self.expected[kind] = found.texts
        print(self.expected, file=sys.stderr)

    def client(self, kind: str) -> Told:
        if kind == "stream":
            return call_stream(self.balancer.url, self.said)
        if kind == "file":
            return send_file(self.balancer.url, self.said)
        return call_socket(kind, self.balancer.url, self.said)

    def under_load(self, callers: int, sockets: int, fault: Callable[[], None]) -> tuple[list[tuple[str, Told]], float]:
        """Runs a fault in the middle of the callers' speech; returns what everybody was told, and the seconds from its
        beginning until the cluster was whole."""
        self.wait_whole()
        stop = threading.Event()

        def send_files() -> list[Told]:
            told = []
            while not stop.is_set():
                told.append(self.client("file"))
            return told

        kinds = ["stream"] * callers + ["funasr", "openai"] * sockets
        with ThreadPoolExecutor(len(kinds) + FILES) as pool:
            files = [pool.submit(send_files) for _ in range(FILES)]
            live = [pool.submit(self.client, kind) for kind in kinds]
            time.sleep(FAULT_AFTER_S)
            begin_s = time.monotonic()
            try:
                fault()
                self.wait_whole()
                recovery_s = time.monotonic() - begin_s
                told = [(kind, each.result(WAIT_S)) for kind, each in zip(kinds, live, strict=True)]
            finally:
                stop.set()
            told += [("file", each) for found in files for each in found.result(WAIT_S)]
        return told, recovery_s

    def row(self, name: str, callers: int, sockets: int, fault: Callable[[], None]) -> dict[str, object]:
        told, recovery_s = self.under_load(callers, sockets, fault)
        for kind, each in told:
            wrong = each.texts != self.expected[kind]
            if each.lost or each.changed or each.twice or each.missing or wrong:
                print(f"{name}: {kind}: {each}", file=sys.stderr)
        live = [each for kind, each in told if kind != "file"]
        return {
            "name": "asr-serve",
            "fault": name,
            "tried": len(told),
            "callers": len(live),
            "files": len(told) - len(live),
            "wrong": sum(
                not each.lost and (each.texts != self.expected[kind] or each.changed > 0) for kind, each in told
            ),
            "lost": sum(bool(each.lost) or each.missing > 0 for _, each in told),
            "told_twice": sum(each.twice for _, each in told),
            "sent_again": sum(each.sent_again for _, each in told),
            "longest_wait_s": round(max(each.longest_wait_s for each in live), 2),
            "recovery_s": round(recovery_s, 2),
        }

    # --- faults ------------------------------------------------------------------------------------------

    @property
    def node(self) -> Host:
        """The node that fails."""
        return self.cluster.nodes[0]

    def kill(self, processes: list[psutil.Process]) -> None:
        """Kills processes, and waits until something else has taken notice of it."""
        assert processes, "nothing to kill"
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes, WAIT_S)
        end_s = time.monotonic() + 2.0
        while self.whole() and time.monotonic() < end_s:
            time.sleep(0.05)

    def kill_engine(self) -> None:
        self.kill(self.node.engines)

    def kill_replica(self) -> None:
        self.kill(self.node.replicas)

    def kill_ingress(self) -> None:
        self.kill(self.node.ingresses)

    def kill_replicas(self) -> None:
        self.kill([each for node in self.cluster.nodes for each in (*node.replicas, *node.engines)])

    def pause(self, processes: list[psutil.Process]) -> None:
        assert processes, "nothing to pause"
        for each in processes:
            each.send_signal(signal.SIGSTOP)
        time.sleep(AWAY_S)
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)

    def pause_engine(self) -> None:
        self.pause(self.node.engines)

    def pause_ingress(self) -> None:
        self.pause(self.node.ingresses)

    def kill_redis(self) -> None:
        self.redis.kill()
        self.redis.wait(WAIT_S)
        time.sleep(AWAY_S / 2)
        self.start_redis()

    def kill_node(self) -> None:
        self.node.kill()
        time.sleep(AWAY_S)
        self.cluster.start(self.node)

    def cut_node(self) -> None:
        self.network.cut(self.node)
        time.sleep(AWAY_S)
        self.network.heal(self.node)
        end_s = time.monotonic() + WAIT_S
        while not self.whole() and time.monotonic() < end_s:
            if self.cluster.ended(self.node):  # where Ray had given it up; who runs it starts it again, as KubeRay does
                self.node.kill()
                self.cluster.start(self.node)
                return
            time.sleep(0.1)

    def cut_nodes_apart(self) -> None:
        first, second = self.cluster.nodes
        self.network.cut(first, second)
        time.sleep(AWAY_S)
        self.network.heal(first, second)

    def cut_redis(self) -> None:
        self.network.cut(self.node, self.redis_host)
        time.sleep(AWAY_S)
        self.network.heal(self.node, self.redis_host)

    def pause_redis(self) -> None:
        self.redis.send_signal(signal.SIGSTOP)
        time.sleep(AWAY_S)
        self.redis.send_signal(signal.SIGCONT)

    def upgrade(self) -> None:
        self.cluster.command("upgrade", "--config", str(self.folder / "cluster.yaml"))

    def upgrade_ingress(self) -> None:
        """Another setting of the server: its ingresses are replaced, one after the other."""
        file, settings = self.folder / "ingress.yaml", self.settings()
        settings["serve"]["resume_s"] = 61
        file.write_text(yaml.safe_dump(settings))
        self.cluster.command("upgrade", "--config", str(file))

    def faults(self) -> dict[str, tuple[int, int, Callable[[], None]]]:
        """Callers of /v1/stream, callers of each other socket, and the fault."""
        return {
            "none": (CALLERS, SOCKETS, lambda: None),
            "engine killed": (CALLERS, SOCKETS, self.kill_engine),
            "replica killed": (CALLERS, SOCKETS, self.kill_replica),
            "ingress killed": (CALLERS, 0, self.kill_ingress),
            "all replicas killed": (CALLERS, SOCKETS, self.kill_replicas),
            "engine paused": (CALLERS, SOCKETS, self.pause_engine),
            "redis killed": (CALLERS, SOCKETS, self.kill_redis),
            "redis paused": (CALLERS, SOCKETS, self.pause_redis),
            "node cut off from redis": (CALLERS, SOCKETS, self.cut_redis),
            "nodes cut off from each other": (CALLERS, SOCKETS, self.cut_nodes_apart),
            "node cut off": (CALLERS, 0, self.cut_node),
            "rolling upgrade": (UPGRADE_CALLERS - 2, 1, self.upgrade),
            "upgrade of the ingresses": (CALLERS, 0, self.upgrade_ingress),
            "node killed": (CALLERS, 0, self.kill_node),
            "ingress paused": (CALLERS, 0, self.pause_ingress),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--fault", action="append", help="only these")
    chosen = parser.parse_args()
    hosts.WAIT_S = WAIT_S
    about = machine.describe(1, ["ray", "redis"])
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, Network() as network:
        bench = Bench(network, Path(folder))
        try:
            bench.learn()
            for name, (callers, sockets, fault) in bench.faults().items():
                if chosen.fault and name not in chosen.fault:
                    continue
                rows.append(bench.row(name, callers, sockets, fault))
                print(rows[-1], flush=True)
                if chosen.json is not None:
                    chosen.json.write_text(
                        json.dumps({"bench": "cluster-faults", "machine": about, "rows": rows}, indent=1) + "\n"
                    )
        finally:
            bench.close()


if __name__ == "__main__":
    main()
