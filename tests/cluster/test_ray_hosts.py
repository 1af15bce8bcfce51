"""Two Ray nodes in networks of their own, each with an ingress and a replica, and Redis in a third: whatever is killed
or cut off, no acknowledged word is lost, no locked word changes, and no event is told twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hosts import INGRESS_CPUS, PORT, REPLICA_CPUS, WAIT_S, Host, Network, RayHosts, ready, wait_until
from redis_server import RedisServer
from session_faults import (
    a_server_is_cut_off_and_fenced,
    a_server_is_cut_off_from_redis,
    begin,
    callers_of_a_server_that_is_killed_resume,
    finish,
)
from stream_client import Event, Http2, Line, WebSocket, numbered, pcm_of, whole
from test_funasr_websocket import STARTED, calling
from test_openai_realtime import talking

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1_800)]

MODEL = "moonshine-tiny-en"
PLACES = 4
"""Voice-activity sessions of each engine."""
SILENT_S = 4.0


@pytest.fixture(scope="module")
def hosts(network: Network, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    running = RayHosts(network, tmp_path_factory.mktemp("hosts"), nodes=2)
    try:
        running.up(
            {
                "models": [{"model": MODEL, "replicas": 2, "cpus": REPLICA_CPUS}],
                "ingress": {"replicas": 2, "cpus": INGRESS_CPUS},
                "replica_silent_s": SILENT_S,
                "serve": {
                    "host": "0.0.0.0",
                    "port": PORT,
                    "turn_model": "none",
                    "resume_s": 60,
                    "session_idle_s": 600,
                    "sessions.redis_url": redis.url,
                    "sessions.checkpoint_ms": 500,
                    "sessions.timeout_ms": 2_000,
                    "engine": {"prefix_bytes": 0, "max_sessions": PLACES},
                },
            }
        )
        yield running
    finally:
        running.close()


@pytest.fixture
def cluster(hosts: RayHosts) -> Iterator[RayHosts]:
    """The cluster, whole: two ingresses, each with two replicas and with Redis."""

    def is_whole() -> bool:
        return all(
            len(node.engines) == 1
            and ready(node)
            and node.gauge("asr_serve_session_store_up") == 1
            and node.gauge("asr_serve_live_open_sessions") == 0
            and len(replicas(node)) == 2
            for node in hosts.nodes
        )

    wait_until(is_whole, hosts.logs)
    yield hosts
    hosts.network.heal_all()


def replicas(node: Host) -> set[str]:
    """Replicas that the ingress of a node is connected to."""
    text = httpx.get(f"{node.url}/metrics", timeout=WAIT_S).text
    return {part.partition('"')[0] for part in text.split('replica="')[1:]}


def transcribe(host: Host, audio: bytes) -> str:
    answer = httpx.post(
        f"{host.url}/v1/audio/transcriptions", files={"file": ("a.wav", audio)}, data={"model": MODEL}, timeout=WAIT_S
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text"]
    return text


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    return pcm_of(packaged_speech / "two_cities.wav", 12)


@pytest.fixture(scope="module")
def uncut(hosts: RayHosts, pcm: bytes) -> list[Event]:
    """Events of a session that nothing disturbs."""
    with WebSocket(PORT, host=hosts.nodes[0].address) as line:
        return numbered(whole(line, pcm))


def test_every_ingress_serves_from_every_replica(cluster: RayHosts, packaged_speech: Path):
    audio = (packaged_speech / "two_cities.wav").read_bytes()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda number: transcribe(cluster.nodes[number % 2], audio), range(6)))
    assert "worst of times" in texts[0].lower()
    assert set(texts) == {texts[0]}


def test_an_ingress_is_killed_under_live_callers(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    killed, other = cluster.nodes

    def kill_ingress() -> None:
        for process in killed.ingresses:
            process.kill()

    callers_of_a_server_that_is_killed_resume(killed, other, kill_ingress, pcm, uncut)
    wait_until(lambda: ready(killed), cluster.logs)
    finish([begin(pcm, killed, WebSocket, 0.1)], uncut)


def kill_replica(node: Host) -> None:
    """Kills an engine and the actor that would start it again."""
    for process in (*node.replicas, *node.engines):
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def funasr_texts(node: Host, pcm: bytes, pause_s: float, at_half: Callable[[], None]) -> list[str]:
    """Sentences that a client of FunASR's socket was told last; none that was told before has changed."""

    def call() -> list[str]:
        before: list[str] = []
        with calling(node, silence_schedule="inf:300") as caller:  # type: ignore[arg-type]
            assert caller.ask("START") == STARTED
            for at in range(0, len(pcm), 3_200):
                caller.send(pcm[at : at + 3_200])
                time.sleep(pause_s)
                if at == len(pcm) // 6_400 * 3_200:
                    at_half()
            caller.send("STOP")
            for answer in caller.until_stopped()[:-1]:
                found = [sentence["text"] for sentence in answer["sentences"]]
                assert found[: len(before)] == before
                before = found
        return before

    return await asyncio.to_thread(call)


async def openai_texts(node: Host, pcm: bytes, pause_s: float) -> list[str]:
    """Transcripts of the items of an OpenAI Realtime client."""
    samples = np.frombuffer(pcm + bytes(64_000), "<i2").astype(np.float32) / 32_768
    async with talking(node, model=MODEL) as talk:  # type: ignore[arg-type]
        await talk.pour(samples, pause_s=pause_s)
        return await talk.all_completed()


def test_replicas_are_killed_under_all_kinds_of_sockets(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """FunASR's and OpenAI's sockets cannot resume: they outlive every replica."""

    async def call(kill: Callable[[], None], pause_s: float) -> tuple[list[str], list[str]]:
        node = cluster.nodes[0]
        found = await asyncio.gather(funasr_texts(node, pcm, pause_s, kill), openai_texts(node, pcm, pause_s))
        return found[0], found[1]

    alone = asyncio.run(call(lambda: None, 0.0))
    assert "worst of times" in " ".join(alone[0]).lower()
    assert "worst of times" in " ".join(alone[1]).lower()

    def kill_all() -> None:
        """One replica after the other, so that each session loses the one that it is on."""
        kill_replica(cluster.nodes[0])
        wait_until(lambda: len(cluster.nodes[0].engines) == 1 and len(replicas(cluster.nodes[1])) == 2, cluster.logs)
        kill_replica(cluster.nodes[1])

    caller = begin(pcm, cluster.nodes[1], WebSocket, 0.4)
    assert asyncio.run(call(kill_all, 0.02)) == alone
    finish([caller], uncut)


@pytest.mark.exhaustive
def test_an_ingress_is_cut_off_from_redis(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    a_server_is_cut_off_from_redis(cluster.network, *cluster.nodes, pcm, uncut)


@pytest.mark.exhaustive
def test_an_ingress_is_cut_off_from_a_replica(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """Its work goes to the other replica, after the time for which one may be silent."""
    first, second = cluster.nodes
    callers = [begin(pcm, node, WebSocket, 0.3) for node in (first, second, first)]
    cluster.network.cut(first, second)
    cut_s = time.monotonic()
    finish(callers, uncut)
    print(f"3 callers were finished {time.monotonic() - cut_s:.2f} s after the cut")
    cluster.network.heal(first, second)


@pytest.mark.exhaustive
def test_a_node_is_cut_off_and_its_session_taken_over(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """For a shorter time than Ray takes to notice."""
    a_server_is_cut_off_and_fenced(cluster.network, *cluster.nodes, pcm, uncut)


@pytest.mark.exhaustive
def test_a_node_dies_with_its_ingress_and_its_replica(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """Its callers resume at the other node, and callers of that one go on."""
    node, other = cluster.nodes
    callers = [begin(pcm, each, WebSocket, 0.4) for each in (node, node, other, other)]
    node.kill()
    killed_s = time.monotonic()
    for caller in callers[:2]:
        caller.leave()
        caller.connect(Http2, PORT, other.address)
    print(f"2 callers resumed after {time.monotonic() - killed_s:.2f} s")
    finish(callers, uncut)
    print(f"all were finished after {time.monotonic() - killed_s:.2f} s")
    cluster.start(node)
    wait_until(lambda: ready(node), cluster.logs)


@pytest.mark.exhaustive
def test_live_callers_are_admitted_by_what_all_replicas_have_room_for(cluster: RayHosts, pcm: bytes):
    """Two ingresses together admit as many as the engines have places, and every one that is admitted is served."""
    lines: list[Line] = []
    refused: list[Event] = []
    try:
        for number in range(2 * PLACES + 3):
            line = WebSocket(PORT, host=cluster.nodes[number % 2].address)
            lines.append(line)
            line.send(pcm[:32_000])
            line.until(lambda line=line: line.events)
            time.sleep(0.05)
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s and len(refused) < 3:
            for line in lines:
                line.poll(0.01)
            refused = [event for line in lines for event in line.events if event["type"] == "error"]
        assert [event["code"] for event in refused] == ["at_capacity"] * 3
        assert all(event["retry_after_ms"] > 0 for event in refused), json.dumps(refused)
        served = [line for line in lines if not any(event["type"] == "error" for event in line.events)]
        assert len(served) == 2 * PLACES
        for line in served:
            events: list[Any] = whole(line, pcm[32_000:])
            assert events[-1]["type"] == "end"
            assert "best of times" in " ".join(e["text"] for e in events if e["type"] == "segment").lower()
    finally:
        for line in lines:
            line.socket.close()
