"""The chart's ScaledObject asks for metrics that exist, at a cluster's thresholds, and each query has one result."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import golden, objects
from test_dashboard import FROM_PROMETHEUS, KNOWN, SCRAPE, grouped, uses

from asr_serve.cluster.autoscaling import AutoscaleSettings
from asr_serve.config import EngineConfig

OBJECT: dict[str, Any] = objects(golden("cluster"))["ScaledObject"]
TRIGGERS: dict[str, dict[str, Any]] = {trigger["name"]: trigger for trigger in OBJECT["spec"]["triggers"]}
QUERIES = {name: trigger["metadata"]["query"] for name, trigger in TRIGGERS.items()}

SERIES = {
    "asr_serve_ingress_queue_fill_ratio": {"a": "0.1x20", "b": "0.75x20"},
    'asr_serve_queue_seconds_sum{priority="interactive"}': {"a": "0+6x20", "b": "0+3x20"},
    'asr_serve_queue_seconds_count{priority="interactive"}': {"a": "0+30x20", "b": "0+15x20"},
    'asr_serve_queue_seconds_sum{priority="bulk"}': {"a": "0+600x20", "b": "0x20"},
    'asr_serve_queue_seconds_count{priority="bulk"}': {"a": "0+30x20", "b": "0x20"},
    "asr_serve_backlog_seconds": {"a": "40x20", "b": "5x20"},
    "asr_serve_occupied_seconds_total": {"a": "0+12x20", "b": "0+6x20"},
    "asr_serve_sessions": {"a": "70x20", "b": "7x20"},
    "asr_serve_collective_seconds_total": {"a": "0+9x20", "b": "0+3x20"},
}
"""Two servers, every 15 s: one of them full in its queue, the other busy."""
BUSY = {
    "ingress-queue": 0.75,
    "queue-time": 0.2,
    "backlog": 45.0,
    "occupancy": 1.2,
    "sessions": 77.0,
    "collectives": 0.4,
}
IDLE = {"queue-time": 0.0, "collectives": 0.0}
"""What has a result without any series: nobody waits, and no model is split."""


def series_of(name: str, instance: str) -> str:
    metric, own = re.fullmatch(r"(\w+)(?:\{(.*)\})?", name).groups()
    return f'{metric}{{job="asr-serve",instance="{instance}",model="m"{"," + own if own else ""}}}'


@pytest.mark.parametrize("name", TRIGGERS)
def test_queries_ask_for_metrics_that_exist(name: str):
    used = list(uses(QUERIES[name]))
    assert used
    for metric, matched, function in used:
        series = KNOWN[metric]
        assert matched <= series.labels | FROM_PROMETHEUS, metric
        assert (function == "rate") == series.counts, metric
    assert grouped(QUERIES[name]) <= {"instance"}
    jobs = set(re.findall(r'job="(.*?)"', QUERIES[name]))
    assert jobs == {job["job_name"] for job in SCRAPE["scrape_configs"]}


def test_thresholds_are_those_of_a_cluster():
    rules = AutoscaleSettings(max_replicas=2).scale_out
    thresholds = {name: float(trigger["metadata"]["threshold"]) for name, trigger in TRIGGERS.items()}
    assert thresholds.keys() == BUSY.keys()
    assert thresholds["ingress-queue"] == rules.ingress_queue.above
    assert thresholds["queue-time"] == rules.queue_s.above
    assert thresholds["backlog"] == rules.backlog_s.above
    assert thresholds["collectives"] == rules.collectives.above
    assert thresholds["sessions"] == int(rules.sessions.above * EngineConfig().max_sessions)
    # A target that is tracked, between the two thresholds of a cluster.
    scale_in = AutoscaleSettings(max_replicas=2).scale_in
    assert scale_in.occupancy_below < thresholds["occupancy"] < rules.occupancy.above
    steps = OBJECT["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert steps["scaleUp"]["policies"][0]["value"] == max(rule.add for rule in (rules.ingress_queue, rules.queue_s))
    assert steps["scaleDown"]["policies"][0]["value"] == scale_in.remove
    assert steps["scaleDown"]["stabilizationWindowSeconds"] == AutoscaleSettings(max_replicas=2).in_after_s


def test_an_unknown_load_is_not_a_low_one():
    for trigger in TRIGGERS.values():
        assert trigger["type"] == "prometheus"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes text alone"
    assert OBJECT["spec"]["fallback"]["behavior"] == "currentReplicas"


@pytest.mark.parametrize(("series", "expected"), [(SERIES, BUSY), ({}, IDLE)], ids=["busy", "nothing scraped"])
def test_prometheus_answers_each_query_with_one_value(
    tmp_path: Path, series: dict[str, dict[str, str]], expected: dict[str, float]
):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    given = [
        {"series": series_of(name, instance), "values": values}
        for name, servers in series.items()
        for instance, values in servers.items()
    ]
    asked = [
        {
            "expr": f"round(({query}) * 1000) / 1000",
            "eval_time": "4m",
            "exp_samples": [{"labels": "{}", "value": expected[name]}] if name in expected else [],
        }
        for name, query in QUERIES.items()
    ]
    test = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": given, "promql_expr_test": asked}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
