"""A real Ray on this machine scales by its policy: out under load, in after it. A live caller who speaks meanwhile
notices nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")

from test_ray_cluster import MODEL, WAIT_S, RunningCluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SETTINGS = {
    "models": [
        {
            "model": MODEL,
            "cpus": 0.5,
            "threads": 1,
            "autoscale": {
                "max_replicas": 2,
                "report_s": 0.5,
                "stale_s": 10,
                "out_after_s": 0,
                "cool_down_s": 0,
                # Only what the test does changes the number of replicas, however slow the machine is.
                "scale_out": {"backlog_s": {"above": 40}, "queue_s": None, "occupancy": None},
                "in_after_s": 2,
                "scale_in": {"occupancy_below": None, "queue_s_below": 60},
            },
        }
    ],
    "replica_silent_s": 5,
    "serve": {"port": 0, "turn_model": "none", "drain_s": 100, "engine": {"prefix_bytes": 0}},
}
UPLOADS = 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), json.dumps(SETTINGS))
    yield running
    running.close()


def test_a_cluster_scales_out_and_in_under_a_live_caller(cluster: RunningCluster, packaged_speech: Path):
    live, audio = packaged_speech / "two_cities.wav", (packaged_speech / "beckett.wav").read_bytes()
    quiet, text = cluster.listen(live), cluster.transcribe(audio)
    assert "worst of times" in quiet.lower()
    assert "fail better" in text.lower()
    assert len(cluster.engines) == 1
    silence = threading.Event()

    def keep_talking() -> list[str]:
        heard = []
        while not silence.is_set():
            heard.append(cluster.listen(live))
        return heard

    def keep_asking() -> list[str]:
        found = []
        while len(cluster.engines) == 1:
            found.append(cluster.transcribe(audio))
        return found

    with ThreadPoolExecutor(UPLOADS + 1) as pool:
        try:
            talking = pool.submit(keep_talking)
            asking = [pool.submit(keep_asking) for _ in range(UPLOADS)]
            wait_until(lambda: len(cluster.engines) == 2, cluster.log.read_text)
            answers = [answer for each in asking for answer in each.result(WAIT_S)]
            wait_until(lambda: len(cluster.engines) == 1, cluster.log.read_text)
        finally:
            silence.set()
        assert set(talking.result(WAIT_S)) == {quiet}
    assert len(answers) >= UPLOADS
    assert set(answers) == {text}


def test_status_shows_the_signals_and_the_limits(cluster: RunningCluster):
    found = cluster.status()
    assert found[MODEL]["limits"] == [1, 2]
    assert found["ingress"]["limits"] is None
    (replica,) = found[MODEL]["detail"]["replicas"].values()
    load = replica["load"]
    assert 0 <= load["occupancy"] <= 1
    assert (load["backlog_s"], load["ingress_queue"], load["sessions"]) == (0.0, 0.0, 0.0)
    assert (load["accelerator"], load["collectives"]) == (None, None), "there is neither here"
    assert found[MODEL]["detail"]["queue"] == {"waiting": 0, "capacity": 2_048}
    assert "(1 to 2)" in cluster.command("status")  # behind the replicas, of which a busy machine may want another


def test_scaling_by_hand_is_refused_where_a_policy_scales(cluster: RunningCluster):
    for name in (MODEL, "ingress"):
        with pytest.raises(AssertionError, match="a policy scales models of this cluster"):
            cluster.command("scale", name, "2")
    assert len(cluster.engines) == 1
