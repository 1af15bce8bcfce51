"""Two Ray nodes in networks of their own, each with an ingress and a replica."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hosts import INGRESS_CPUS, REPLICA_CPUS, WAIT_S, Host, RayHosts, ray_hosts

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

MODEL = "moonshine-tiny-en"
SETTINGS = {
    "models": [{"model": MODEL, "replicas": 2, "cpus": REPLICA_CPUS}],
    "ingress": {"replicas": 2, "cpus": INGRESS_CPUS},
    "replica_silent_s": 4,
    "serve": {"host": "0.0.0.0", "port": 8000, "turn_model": "none", "engine": {"prefix_bytes": 0}},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    with ray_hosts(tmp_path_factory.mktemp("hosts"), nodes=2) as running:
        running.up(SETTINGS)
        yield running


def transcribe(host: Host, audio: bytes) -> str:
    answer = httpx.post(
        f"{host.url}/v1/audio/transcriptions", files={"file": ("a.wav", audio)}, data={"model": MODEL}, timeout=WAIT_S
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text"]
    return text


def test_every_ingress_serves_from_every_replica(cluster: RayHosts, packaged_speech: Path):
    assert [len(node.engines) for node in cluster.nodes] == [1, 1]
    audio = (packaged_speech / "two_cities.wav").read_bytes()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda number: transcribe(cluster.nodes[number % 2], audio), range(6)))
    assert "worst of times" in texts[0].lower()
    assert set(texts) == {texts[0]}
