"""Faults of a cluster on several machines, as bench/cluster_faults.py counts them: no request is lost, no locked word
changes, no event is told twice. Faults of one machine are in test_ray_cluster.py, and the others in the bench."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Network

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray")]
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sys.path.append(str(BENCH))
    module = importlib.import_module("cluster_faults")
    sys.path.remove(str(BENCH))
    with Network() as network:
        running = module.Bench(network, tmp_path_factory.mktemp("faults"))
        try:
            running.learn()
            yield running
        finally:
            running.close()


@pytest.mark.parametrize("fault", ["ingress killed", "node cut off", "all replicas killed"])
def test_nothing_is_lost_or_changed_or_told_twice(bench: Any, fault: str) -> None:
    callers, sockets, make = bench.faults()[fault]
    row = bench.row(fault, callers, sockets, make)
    assert row["tried"] > callers + 2 * sockets, row  # files were answered as well
    assert (row["wrong"], row["lost"], row["told_twice"]) == (0, 0, 0), row
