"""Dashboards and alerts ask for metrics that exist, by labels that they have, and show every one of them."""

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
AUDIENCES = {
    "caller": ["Service level", "Traffic", "Latency", "Live", "Speech", "Calls over WebRTC"],
    "operator": [
        "Engine",
        "Errors and rejections",
        "Peers",
        "Below the device",
        "Stored sessions",
        "Governance",
        "Batches",
    ],
    "capacity": ["Scaling", "Limits", "Throughput", "What was heard before"],
}
"""Dashboards, by whom they are for, with their rows."""
DASHBOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((DEPLOY / "grafana" / f"{name}.json").read_text()) for name in AUDIENCES
}


def rules_of(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RULES = [*rules_of("alerts.yml"), *rules_of("slo.yml")]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
SCRAPE: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
PANELS = [panel for board in DASHBOARDS.values() for panel in board["panels"] if panel["type"] != "row"]

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
    *(pytest.param(expression, id=name) for name, expression in RECORDED.items()),
]


def uses(expression: str) -> Iterator[Use]:
    for match in re.finditer(r"(?:(\w+)\()?\b(asr_serve_\w+)(?:\{(.*?)\})?", expression):
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[3] or ""))
        yield Use(match[2], matched, match[1] or "")


def grouped(expression: str) -> set[str]:
    clauses = re.findall(r"\b(?:by|on|without|ignoring)\s*\((.*?)\)", expression)
    return {name for clause in clauses for name in re.findall(r"\w+", clause)}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dashboards_and_rules_query_metrics_that_exist(expression: str) -> None:
    used = list(uses(expression))
    recorded = set(re.findall(r"\basr_serve:\w+:\w+", expression))
    assert recorded <= RECORDED.keys()
    if not used and not recorded:
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


def test_the_dashboards_show_every_metric() -> None:
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


@pytest.mark.parametrize("board", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_distinct_ids_and_places(board: dict[str, Any]) -> None:
    everything = board["panels"]
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


@pytest.mark.parametrize("name", AUDIENCES)
def test_a_dashboard_is_one_that_grafana_imports(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["id"] is None
    assert board["schemaVersion"] == 42
    assert board["uid"] == f"asr-serve-{name}"
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == AUDIENCES[name]
    [link] = board["links"]
    assert set(link["tags"]) <= set(board["tags"]), "each leads to the others"
    datasource, model = board["templating"]["list"]
    assert (datasource["name"], datasource["type"], datasource["query"]) == ("datasource", "datasource", "prometheus")
    assert (model["name"], model["multi"], model["includeAll"]) == ("model", True, True)
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"]["query"]).groups()
    assert label in KNOWN[metric].labels
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert variables == {"datasource", "model", "__rate_interval", "__all"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_summary_and_an_action(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description"}
    said = " ".join(rule["annotations"].values())
    labels = set(re.findall(r"\$labels\.(\w+)", said))
    left = grouped(rule["expr"].split("unless")[0])
    if "asr_serve:" in rule["expr"]:
        assert not labels, "what is recorded is of all servers"
    for use in uses(rule["expr"].split("unless")[0]):
        assert labels <= (left or KNOWN[use.name].labels | FROM_PROMETHEUS)


def test_the_scrape_configuration_finds_the_alerts_and_the_job_they_name() -> None:
    assert SCRAPE["rule_files"] == ["alerts.yml", "slo.yml"]
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


# --- service levels ---------------------------------------------------------------------------------------

BUDGETS = {"request_errors": 0.001, "live_late": 0.01, "queue_late": 0.01}
WINDOWS_S = {"5m": 300, "30m": 1_800, "1h": 3_600, "2h": 7_200, "6h": 21_600, "1d": 86_400, "3d": 259_200}
PERIOD_S = 30 * 86_400
SPEEDS = {
    "Fast": ("1h", "5m", 0.02),
    "Steady": ("6h", "30m", 0.05),
    "Slow": ("1d", "2h", 0.1),
    "Creeping": ("3d", "6h", 0.1),
}
"""Long window, short window, and the part of the budget that an alert means."""


def test_each_service_level_is_recorded_and_watched_at_four_speeds() -> None:
    assert RECORDED.keys() == {f"asr_serve:{name}:ratio_rate{window}" for name in BUDGETS for window in WINDOWS_S}
    alerts = {rule["alert"]: rule for rule in rules_of("slo.yml") if "alert" in rule}
    expected = set()
    for name, budget in BUDGETS.items():
        for speed, (long, short, part) in SPEEDS.items():
            alert = "AsrServe" + name.title().replace("_", "") + speed
            burn = part * PERIOD_S / WINDOWS_S[long]
            over = f"> {burn:g} * {budget:g}"
            ratio = f"asr_serve:{name}:ratio_rate"
            assert alerts[alert]["expr"] == f"{ratio}{long} {over} and {ratio}{short} {over}"
            assert alerts[alert]["labels"]["severity"] == ("page" if speed in ("Fast", "Steady") else "ticket")
            expected.add(alert)
    assert alerts.keys() == expected
    shown = [target["expr"] for panel in PANELS for target in panel["targets"] if "asr_serve:" in target["expr"]]
    assert {tuple(each.split(":ratio_rate")[0].split(":")[1:]) for each in shown} == {(name,) for name in BUDGETS}
    for each in shown:
        name = each.split(":")[1]
        assert each.endswith(f" / {BUDGETS[name]:g}")


def test_thresholds_are_bounds_of_the_histograms() -> None:
    buckets = {
        (sample.name, sample.labels["le"])
        for family in text_string_to_metric_families(busy_exposition().decode())
        for sample in family.samples
        if "le" in sample.labels
    }
    asked = {
        (name, operator, le)
        for expression in RECORDED.values()
        for name, operator, le in re.findall(r'(\w+_bucket)\{le(=~?)"(.*?)"', expression)
    }
    assert len(asked) == 2
    for name, operator, le in asked:
        pattern = le.replace("\\\\", "\\") if operator == "=~" else re.escape(le)
        assert any(bucket == name and re.fullmatch(pattern, bound) for bucket, bound in buckets), name


@pytest.mark.parametrize(
    ("failing", "at", "fires"),
    [
        ("0x400", "6h", set()),
        ("0+10x400", "1h10m", {"Fast", "Steady", "Slow", "Creeping"}),  # 2 % for over an hour
        ("0x355 0+100x45", "5h57m", set()),  # one minute, of which the long windows have seen little
        ("0+10x340 3400x60", "6h40m", {"Creeping", "Slow"}),  # it is over: nobody is woken any more
    ],
    ids=["nothing fails", "2 % for an hour", "a moment", "over"],
)
def test_alerts_fire_while_the_budget_burns(failing: str, at: str, fires: set[str], tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    series = 'asr_serve_requests_total{job="asr-serve",instance="a",route="/asr",method="POST",status="%s"}'
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "slo.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series % "200", "values": "0+490x400"},
                    {"series": series % "500", "values": failing},
                    # A server that starts refuses work, and nobody asked for it.
                    {"series": series.replace("/asr", "/ready") % "503", "values": "0+300x400"},
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="AsrServeRequestErrors{speed}",alertstate="firing"}})',
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": 1}] if speed in fires else [],
                    }
                    for speed in SPEEDS
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
