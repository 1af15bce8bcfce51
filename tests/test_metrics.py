"""The exposition is valid Prometheus text that a linter accepts, and docs/metrics.md describes all of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from busy_metrics import MODELS, busy_engine, busy_exposition, busy_server
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families

from asr_serve import errors
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.metrics import CONTENT_TYPE, EngineMetrics, ServerMetrics, render_exposition
from asr_serve.server.middleware.error_handlers import error_code

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

BASE_UNITS = {"seconds", "bytes", "ratio"}
COUNTED = {"requests", "rejections", "rows", "pages", "sessions", "slots", "tokens"}
COUNTED |= {"packets", "datagrams", "peers", "batches", "failures", "entries", "moves", "writes", "migrations"}
COUNTED |= {"routes", "rollbacks", "words", "lines", "notices"}
COUNTED |= {"fallbacks", "steps", "restarts", "waits", "partials", "resumes", "offloads", "streams", "evictions"}
SPOKEN_FOR = {
    "asr_serve_requests_in_flight",
    "asr_serve_pages_used",
    "asr_serve_ring_depth",
    "asr_serve_engine_up",
    "asr_serve_session_store_up",
    "asr_serve_build_info",
    "asr_serve_real_time_factor",
    "asr_serve_streams_offloaded",
}
"""Names that do not end in what they count, since everybody knows them so."""


def families(text: bytes) -> dict[str, Metric]:
    """By the name Prometheus shows: a counter's with its `_total`."""
    found = list(text_string_to_metric_families(text.decode()))
    named = {family.name + "_total" * (family.type == "counter"): family for family in found}
    assert len(named) == len(found), "a family came twice"
    return named


def labels(family: Metric) -> set[str]:
    return {name for sample in family.samples for name in sample.labels} - {"le"}


@pytest.fixture(scope="module")
def text() -> bytes:
    return busy_exposition()


def test_every_family_is_announced_once_and_stays_together(text: bytes) -> None:
    lines = text.decode().split("\n")
    assert lines.pop() == ""
    current, seen = "", []
    for number, line in enumerate(lines):
        if line.startswith("# HELP"):
            current = line.split()[2]
            seen.append(current)
            assert lines[number + 1].startswith(f"# TYPE {current} ")
        elif not line.startswith("# TYPE"):
            sample = re.match(r"\w+", line)[0]
            assert re.fullmatch(f"{current}(_bucket|_sum|_count)?", sample), line
    assert len(seen) == len(set(seen)) == text.count(b"# TYPE")
    assert set(seen) == set(families(text))


def test_a_busy_server_has_samples_of_every_family(text: bytes) -> None:
    assert [name for name, family in families(text).items() if not family.samples] == []


def test_names_follow_the_conventions(text: bytes) -> None:
    for name, family in families(text).items():
        assert re.fullmatch(r"asr_serve(_[a-z]+)+", name)
        assert family.documentation.endswith(".")
        assert (family.type == "counter") == name.endswith("_total")
        assert not re.search(r"_(counter|gauge|histogram|count|sum|bucket|ms|s|us|ns|kb|mb|percent)\b", name + " ")
        unit = name.removesuffix("_total").rsplit("_", 1)[1]
        assert unit in BASE_UNITS | COUNTED or name in SPOKEN_FOR, name
        assert not labels(family) & {"quantile", "instance", "job", "name", "type"}


def test_promtool_accepts_the_metrics(text: bytes) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_samples_of_each_engine_have_its_model(text: bytes) -> None:
    engine = families(busy_engine("m").render())
    for name, family in families(text).items():
        if name in engine:
            assert {sample.labels["model"] for sample in family.samples} == set(MODELS)
    assert not set(engine) & set(families(render_exposition(busy_server(), [])))


def test_recorded_values_are_exported(text: bytes) -> None:
    found = families(text)
    assert {s.value for s in found["asr_serve_audio_seconds_total"].samples} == {7.5}
    assert {s.value for s in found["asr_serve_pages_used"].samples} == {45}
    states = {(s.labels["model"], s.labels["state"]): s.value for s in found["asr_serve_engine_requests"].samples}
    counts = (("waiting", 5), ("decoding", 12), ("speaking", 4))
    assert states == {(model, state): n for model in MODELS for state, n in counts}
    (info,) = found["asr_serve_build_info"].samples
    assert (info.labels, info.value) == ({"version": "1.2.3"}, 1)


def test_step_counters_start_at_zero_without_a_look_up() -> None:
    """A series that begins with its first event hides that event from `rate`."""
    metrics = EngineMetrics("m")
    stages = ("vad", "chunk", "encode", "verify", "decode", "hotwords", "speak", "turn", "speakers")
    for stage in stages:
        metrics.step[stage].observe(0.5)
    found = families(metrics.render())
    assert {sample.value for sample in found["asr_serve_failed_steps_total"].samples} == {0}
    sums = {s.labels["stage"]: s.value for s in found["asr_serve_step_seconds"].samples if s.name.endswith("_sum")}
    assert sums == dict.fromkeys(stages, 0.5)


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "sep\u2028arator", "ünïcode", "# HELP x y"])
def test_labels_are_escaped(name: str) -> None:
    server = ServerMetrics("1")
    server.requests.labels(name, "POST", "200").inc()
    found = families(render_exposition(server, [EngineMetrics(name).render(), EngineMetrics("b").render()]))
    assert [s.labels["route"] for s in found["asr_serve_requests_total"].samples] == [name]
    assert {s.labels["model"] for s in found["asr_serve_pages"].samples} == {name, "b"}


def test_metrics_are_not_registered_globally() -> None:
    ServerMetrics("1"), ServerMetrics("1"), EngineMetrics("m"), EngineMetrics("m")
    assert not [family.name for family in REGISTRY.collect() if "asr_serve" in family.name]
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_the_server_counts_without_torch() -> None:
    script = "import sys, asr_serve.metrics; sys.exit('torch' in sys.modules)"
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `asr_serve_") and line.count("|") == 5
]


def test_the_page_describes_every_metric(text: bytes) -> None:
    described = {}
    for name, unit, tells, then in ROWS:
        match = re.fullmatch(r"`(\w+)(?:\{([\w,]+)\})?`", name)
        assert match, name
        assert all((unit, tells, then)), name
        described[match[1]] = set((match[2] or "").split(",")) - {""}
    assert len(described) == len(ROWS)
    assert described == {name: labels(family) for name, family in families(text).items()}


def test_the_page_gives_the_unit_that_the_name_has() -> None:
    for name, unit, *_ in ROWS:
        in_name = re.match(r"`(\w+?)(_total)?[{`]", name)[1].rsplit("_", 1)[1]
        if in_name in BASE_UNITS:
            assert unit == in_name, name


def test_settings_named_on_the_page_exist(text: bytes) -> None:
    """Everything in code type is a metric, a label or its value, an error, or a setting."""
    found = families(text)
    known = set(found) | {name for family in found.values() for name in labels(family)}
    known |= {value for family in found.values() for sample in family.samples for value in sample.labels.values()}
    known |= error_codes() | set(ServeConfig.__struct_fields__) | set(EngineConfig.__struct_fields__)
    known |= {"rate", "increase", "traceparent", "request_id", "otel"}
    words = re.findall(r"`([a-z_]+)`", PAGE.read_text())
    assert [word for word in words if word not in known] == []


def error_codes() -> set[str]:
    """As `rejections` counts them: by the name on the wire."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and not issubclass(kind, errors.ServerError)  # those are a client's
    ]
    return {error_code(kind("", "", 1) if issubclass(kind, errors.AtCapacity) else kind("")) for kind in kinds}


def test_the_reasons_on_the_page_are_codes_of_errors() -> None:
    table = PAGE.read_text().split("### Reasons")[1].split("\n## ")[0]
    listed = [code for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)]
    assert listed
    assert len(set(listed)) == len(listed)
    assert set(listed) <= error_codes()
