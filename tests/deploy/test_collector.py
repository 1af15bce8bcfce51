"""The collector's configuration: its parts fit together, and it exports metrics that exist, by labels that they have.
The alarms of the Terraform module look at those. No collector is run: no package index has one with what AWS needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_dashboard import DEPLOY, KNOWN

from asr_serve.server.routes import health
from asr_serve.server.telemetry import tracing

CONFIG: dict[str, Any] = yaml.safe_load((DEPLOY / "otel" / "cloudwatch.yaml").read_text())
SCRAPE: dict[str, Any] = CONFIG["receivers"]["prometheus"]["config"]["scrape_configs"][0]
EMF: dict[str, Any] = CONFIG["exporters"]["awsemf"]
MODULE = DEPLOY / "terraform" / "aws"
EMF_KEYS = {
    *("namespace", "log_group_name", "log_stream_name", "region", "dimension_rollup_option"),
    *("resource_to_telemetry_conversion", "metric_declarations"),
}
"""Settings of the exporter awsemf that are used here, by its documentation."""


def families() -> dict[str, set[str]]:
    """Metrics as the collector has them, a histogram being one, with the labels that all of its series have."""
    found: dict[str, set[str]] = {}
    for name, series in KNOWN.items():
        family = name
        for end in ("_bucket", "_sum", "_count"):
            if name.endswith(end) and f"{name.removesuffix(end)}_bucket" in KNOWN:
                family = name.removesuffix(end)
        found[family] = series.labels
    return found


def kept() -> set[str]:
    [rule] = SCRAPE["metric_relabel_configs"]
    assert (rule["source_labels"], rule["action"]) == (["__name__"], "keep")
    series = {name for name in KNOWN if re.fullmatch(rule["regex"], name)}
    for name in re.findall(r"\w+", rule["regex"].partition("(")[2].replace("(first_text|live_final|queue)", "queue")):
        assert any(name in each for each in series), f"{name} is kept, and is no metric"
    return {family for family in families() if {family, f"{family}_sum"} & series}


def declared(name: str) -> list[set[str]]:
    """Sets of dimensions under which a metric is exported."""
    return [
        set(dimensions)
        for each in EMF["metric_declarations"]
        for dimensions in each["dimensions"]
        if any(re.search(selector, name) for selector in each["metric_name_selectors"])
    ]


def test_every_part_is_used_and_defined() -> None:
    pipelines = CONFIG["service"]["pipelines"]
    for kind in ("receivers", "processors", "exporters"):
        assert {part for pipeline in pipelines.values() for part in pipeline[kind]} == CONFIG[kind].keys()
    assert set(CONFIG["service"]["extensions"]) == CONFIG["extensions"].keys()
    for pipeline in pipelines.values():
        assert pipeline["processors"][0] == "memory_limiter", "before anything holds memory"
        assert pipeline["processors"][-1].startswith("batch"), "after all that drops or changes"
    assert EMF.keys() == EMF_KEYS


def test_histograms_are_scraped_whole() -> None:
    [rule] = SCRAPE["metric_relabel_configs"]
    for family in kept():
        parts = {f"{family}{end}" for end in ("_bucket", "_sum", "_count")} & KNOWN.keys()
        assert all(re.fullmatch(rule["regex"], part) for part in parts), family


def test_what_is_scraped_is_exported_by_labels_that_it_has() -> None:
    exported = kept()
    assert len(exported) >= 15
    for name in exported:
        assert declared(name), f"{name} is scraped, and reaches nobody"
        for dimensions in declared(name):
            assert "service" in dimensions
            assert dimensions - {"service"} <= families()[name], name
    for each in EMF["metric_declarations"]:
        for selector in each["metric_name_selectors"]:
            assert any(re.search(selector, name) for name in exported), f"{selector} selects nothing"
    for name in families().keys() - exported:
        assert not declared(name), f"{name} is exported, and never scraped"


def test_alarms_look_at_what_is_exported() -> None:
    text = (MODULE / "monitoring.tf").read_text()
    alarms = re.findall(r'namespace = "asr-serve", metric = "(\w+)"', text)
    assert alarms
    for name in alarms:
        assert {"service"} in declared(name), name
        assert name in kept()
    assert EMF["namespace"] == "asr-serve"
    assert EMF["log_group_name"] == "/${env:ASR_SERVE_NAME}/metrics"
    assert re.search(r'toset\(\[.*"metrics".*\]\)\n\s+name\s+= "/\$\{var\.name\}/\$\{each\.key\}"', text)
    [service] = [each for each in CONFIG["processors"]["resource"]["attributes"] if each["key"] == "service"]
    assert service["value"] == "${env:ASR_SERVE_NAME}"
    assert EMF["resource_to_telemetry_conversion"] == {"enabled": True}, "a dimension is a label of the metric"


def test_the_server_sends_and_serves_where_the_collector_listens_and_asks() -> None:
    endpoint = CONFIG["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert f'otel_endpoint = \\"http://{endpoint}\\"' in (MODULE / "hosts.tf").read_text()
    assert "/v1/traces" in Path(tracing.__file__).read_text(), (
        "OTLP over HTTP, as tests/server/test_tracing.py receives it"
    )
    assert f'"{SCRAPE["metrics_path"]}"' in Path(health.__file__).read_text()


@pytest.mark.parametrize("name", ["ASR_SERVE_NAME", "ASR_SERVE_KEY_FILE", "AWS_REGION", "HOSTNAME"])
def test_every_variable_is_explained(name: str) -> None:
    text = (DEPLOY / "otel" / "cloudwatch.yaml").read_text()
    assert name in text.partition("receivers:")[0]
    assert set(re.findall(r"\$\{env:(\w+)\}", text)) == {
        *("ASR_SERVE_NAME", "ASR_SERVE_KEY_FILE", "AWS_REGION", "HOSTNAME")
    }
