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
from resuming_caller import Caller
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
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def redis(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    host = network.add("redis")
    server = RedisServer(tmp_path_factory.mktemp("redis"), host.address, host.within)
    yield server
    server.close()


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
                    "sessions.redis_url": redis.url,
                    "sessions.checkpoint_ms": 500,
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


def begin(pcm: bytes, host: Host, kind: type[Line], until: float) -> Caller:
    caller = Caller(pcm)
    caller.connect(kind, PORT, host.address)
    caller.say(until, wait_s=0.002)
    return caller


def finish(callers: list[Caller], uncut: list[Event]) -> None:
    for caller in callers:
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)


def test_every_ingress_serves_from_every_replica(cluster: RayHosts, packaged_speech: Path):
    audio = (packaged_speech / "two_cities.wav").read_bytes()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda number: transcribe(cluster.nodes[number % 2], audio), range(6)))
    assert "worst of times" in texts[0].lower()
    assert set(texts) == {texts[0]}


def test_an_ingress_is_killed_under_live_callers(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """Its callers resume at the other one, over either transport."""
    killed, other = cluster.nodes
    kinds: list[type[Line]] = [WebSocket, Http2, WebSocket, Http2]
    callers = [begin(pcm, killed, kind, 0.2 + 0.15 * number) for number, kind in enumerate(kinds)]
    for process in killed.ingresses:
        process.kill()
    killed_s = time.monotonic()
    for caller, kind in zip(callers, reversed(kinds), strict=True):
        caller.line.rest()
        caller.listen()
        caller.connect(kind, PORT, other.address)
    print(f"4 callers resumed after {time.monotonic() - killed_s:.2f} s")
    finish(callers, uncut)
    assert other.gauge("asr_serve_session_store_up") == 1
    wait_until(lambda: ready(killed), cluster.logs)
    print(f"the ingress was back after {time.monotonic() - killed_s:.2f} s")
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


def test_an_ingress_is_cut_off_from_redis(cluster: RayHosts, redis: RedisServer, pcm: bytes, uncut: list[Event]):
    """Sessions go on there, in memory, and nobody continues an older state of them elsewhere."""
    node, other = cluster.nodes
    stays, leaves = (begin(pcm, node, WebSocket, 0.3) for _ in range(2))
    for caller in (stays, leaves):
        caller.hear_more()
    redis_host = cluster.network.hosts[0]
    cluster.network.cut(node, redis_host)
    wait_until(lambda: node.gauge("asr_serve_session_store_up") == 0)
    assert httpx.get(f"{node.url}/ready").json()["session_store"] == "away"
    assert httpx.get(f"{other.url}/ready").json()["session_store"] == "connected"
    for caller in (stays, leaves):
        seen = len(caller.told)
        caller.say(0.7, wait_s=0.002)
        caller.line.flush("in memory")
        caller.line.until(lambda caller=caller: any(event["type"] == "flushed" for event in caller.line.events))
        caller.listen()
        assert len(caller.told) > seen
        assert [event for event in caller.line.events if event["type"] == "ack"][-1]["durable"] is False
    # It was told more than what is stored: the other ingress does not take the session away from where it is.
    leaves.leave()
    refused = httpx.post(
        f"{other.url}/v1/stream", params={"session": leaves.session, "after": len(leaves.told)}, timeout=WAIT_S
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    leaves.connect(Http2, PORT, node.address, durable=False)
    cluster.network.heal(node, redis_host)
    wait_until(lambda: node.gauge("asr_serve_session_store_up") == 1)
    stays.say(0.8)
    leaves.say(0.8)
    wait_until(lambda: redis.client.hget(f"asr-serve:{{{stays.session}}}", "epoch"))
    stays.leave()
    stays.connect(WebSocket, PORT, other.address)
    for caller in (stays, leaves):
        caller.say(1.0)
        caller.end()
        assert [event["seq"] for event in caller.told] == list(range(1, len(caller.told) + 1))
        assert [event["type"] for event in caller.told].count("flushed") == 1
        assert caller.told[-1]["duration_s"] == uncut[-1]["duration_s"]


def test_an_ingress_is_cut_off_from_a_replica(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """Its work goes to the other replica, after the time for which one may be silent."""
    first, second = cluster.nodes
    callers = [begin(pcm, node, WebSocket, 0.3) for node in (first, second, first)]
    cluster.network.cut(first, second)
    cut_s = time.monotonic()
    finish(callers, uncut)
    print(f"3 callers were finished {time.monotonic() - cut_s:.2f} s after the cut")
    cluster.network.heal(first, second)


def test_a_node_is_cut_off_and_its_session_taken_over(cluster: RayHosts, pcm: bytes, uncut: list[Event]):
    """For a shorter time than Ray takes to notice. The one that was cut off drops the session and tells no more of it,
    also to a client that has not closed its old connection."""
    node, other = cluster.nodes
    caller = begin(pcm, node, WebSocket, 0.4)
    caller.hear_more()
    old = caller.line
    fenced = node.gauge("asr_serve_session_store_refused_writes_total")
    cluster.network.cut(node)
    given = Caller(pcm)
    given.continue_as(caller)
    given.connect(Http2, PORT, other.address)
    told = len(numbered(old.events))
    cluster.network.heal(node)
    old.send(pcm[caller.at : caller.at + 64_000])  # what is done with this is refused
    last = old.rest()[-1]
    assert (last["type"], last["code"]) == ("error", "taken_over")
    old.socket.close()
    assert len(numbered(old.events)) == told
    assert node.gauge("asr_serve_session_store_refused_writes_total") == fenced + 1
    finish([given], uncut)


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
