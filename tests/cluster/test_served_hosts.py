"""Servers by the command, each on a machine of its own, with Redis on a third: what is killed or cut off costs no
acknowledged word. The same faults with Ray are in test_ray_hosts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import PORT, Host, Network, ready, wait_until
from redis_server import RedisServer
from server_process import Serving
from session_faults import (
    a_server_is_cut_off_and_fenced,
    a_server_is_cut_off_from_redis,
    callers_of_a_server_that_is_killed_resume,
)
from stream_client import Event, WebSocket, numbered, pcm_of, whole

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="module")
def start(network: Network, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Host], Serving]:
    flags = ["--host=0.0.0.0", f"--port={PORT}", "--set=engine.prefix_bytes=0", "--set=resume_s=60"]
    flags += [f"--set=sessions.redis_url={redis.url}", "--set=sessions.checkpoint_ms=500"]
    # On a machine that does much else too, Redis and clients may be slow.
    flags += ["--set=sessions.timeout_ms=2000", "--set=session_idle_s=600"]

    def serve(host: Host) -> Serving:
        return Serving(tmp_path_factory.mktemp("server") / "log", *flags, within=host.within)

    return serve


@pytest.fixture(scope="module")
def servers(network: Network, start: Callable[[Host], Serving]) -> Iterator[dict[Host, Serving]]:
    found = {host: start(host) for host in [network.add("first"), network.add("second")]}
    yield found
    for server in found.values():
        server.close()


@pytest.fixture
def pair(network: Network, servers: dict[Host, Serving]) -> list[Host]:
    """Machines whose servers are ready, with Redis, and without callers."""
    network.heal_all()
    for host, server in servers.items():
        wait_until(lambda host=host: ready(host), server.log.read_text)
        wait_until(lambda host=host: host.gauge("asr_serve_session_store_up") == 1, server.log.read_text)
    return list(servers)


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    return pcm_of(packaged_speech / "two_cities.wav", 12)


@pytest.fixture
def uncut(pair: list[Host], pcm: bytes) -> list[Event]:
    """Events of a session that nothing disturbs."""
    with WebSocket(PORT, host=pair[0].address) as line:
        return numbered(whole(line, pcm))


def test_a_server_is_cut_off_from_redis(network, pair, pcm, uncut):
    a_server_is_cut_off_from_redis(network, *pair, pcm, uncut)


def test_a_machine_is_cut_off_and_its_session_taken_over(network, pair, pcm, uncut):
    a_server_is_cut_off_and_fenced(network, *pair, pcm, uncut)


def test_a_server_is_killed_under_live_callers(pair, servers, pcm, uncut):
    callers_of_a_server_that_is_killed_resume(*pair, servers[pair[0]].kill, pcm, uncut)
