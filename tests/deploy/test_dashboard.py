"""Dashboard and alerts ask for metrics that exist, by labels that they have, and show every one of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from busy_metrics import busy_exposition
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "asr-serve.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCRAPE: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

FROM_PROMETHEUS = {"job", "instance", "le"}
"""Labels that no metric of ours has of itself."""


class Series(NamedTuple):
    """What can be asked for by one name. `counts`: it only ever grows, so `rate` makes sense of it."""

    labels: set[str]
    counts: bool


class Use(NamedTuple):
    """A metric in an expression: its name, the labels matched on, and the function around it."""

    name: str
    matched: set[str]
    function: str


def known() -> dict[str, Series]:
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(busy_exposition().decode()):
        for sample in family.samples:
            counts = family.type in ("counter", "histogram")
            found[sample.name] = Series(set(sample.labels) - {"le"}, counts)
    return found


KNOWN = known()
EXPRESSIONS = [
    *(pytest.param(t["expr"], id=f"{p['title']}-{t['refId']}") for p in PANELS for t in p["targets"]),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in ALERTS),
]


def uses(expression: str) -> Iterator[Use]:
    for match in re.finditer(r"(?:(\w+)\()?\b(asr_serve_\w+)(?:\{(.*?)\})?", expression):
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[3] or ""))
        yield Use(match[2], matched, match[1] or "")


def grouped(expression: str) -> set[str]:
    clauses = re.findall(r"\b(?:by|on|without|ignoring)\s*\((.*?)\)", expression)
    return {name for clause in clauses for name in re.findall(r"\w+", clause)}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_dashboard_queries_metrics_that_exist(expression: str) -> None:
    used = list(uses(expression))
    if not used:
        assert expression.startswith("up{")
    for name, matched, function in used:
        assert name in KNOWN
        series = KNOWN[name]
        assert matched <= series.labels | FROM_PROMETHEUS, name
        assert (function in ("rate", "increase")) == series.counts, f"{name} in {function}()"
        assert grouped(expression) <= series.labels | FROM_PROMETHEUS, name
    if "histogram_quantile" in expression:
        assert all(name.endswith("_bucket") for name, *_ in used)
        assert "le" in grouped(expression)


def test_the_dashboard_shows_every_metric() -> None:
    shown = {use.name for panel in PANELS for target in panel["targets"] for use in uses(target["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in KNOWN}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_a_description(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= grouped(target["expr"])
        for use in uses(target["expr"]):
            per_engine = "model" in KNOWN[use.name].labels
            assert per_engine == ("model" in use.matched), f"{use.name}: the variable model decides what is shown"


@pytest.mark.parametrize("panel", [p for p in PANELS if p["fieldConfig"]["defaults"]["unit"] == "s"])
def test_times_are_shown_as_p50_p95_p99(panel: dict[str, Any]) -> None:
    quantiles = [re.findall(r"histogram_quantile\(([\d.]+)", t["expr"]) for t in panel["targets"]]
    assert quantiles == [["0.5"], ["0.95"], ["0.99"]]
    assert all("_seconds_bucket" in target["expr"] for target in panel["targets"])


def test_panels_have_distinct_ids_and_places() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in combinations((panel["gridPos"] for panel in everything), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] == 42
    assert [row["title"] for row in ROWS] == [
        "Traffic",
        "Latency",
        "Throughput",
        "Live",
        "Engine",
        "Errors and rejections",
        "What was heard before",
        "Peers",
        "Below the device",
        "Speech",
        "Stored sessions",
        "Scaling",
        "Calls over WebRTC",
    ]
    datasource, model = DASHBOARD["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == ("datasource", "datasource", "prometheus")
    assert (model["name"], model["multi"], model["includeAll"]) == ("model", True, True)
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"]["query"]).groups()
    assert label in KNOWN[name].labels
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert variables == {"datasource", "model", "__rate_interval", "__all"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_summary_and_an_action(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description"}
    said = " ".join(rule["annotations"].values())
    labels = set(re.findall(r"\$labels\.(\w+)", said))
    left = grouped(rule["expr"].split("unless")[0])
    for use in uses(rule["expr"].split("unless")[0]):
        assert labels <= (left or KNOWN[use.name].labels | FROM_PROMETHEUS)


def test_the_scrape_configuration_finds_the_alerts_and_the_job_they_name() -> None:
    assert [DEPLOY / "prometheus" / name for name in SCRAPE["rule_files"]] == [DEPLOY / "prometheus" / "alerts.yml"]
    jobs = {job["job_name"] for job in SCRAPE["scrape_configs"]}
    named = {job for rule in ALERTS for job in re.findall(r'job="(.*?)"', rule["expr"])}
    assert named <= jobs


def test_promtool_accepts_the_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    config = DEPLOY / "prometheus" / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
