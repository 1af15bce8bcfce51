"""bench/test_times.py: a row of JUnit XML, and the table of CONTRIBUTING.md."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Child

ROOT = Path(__file__).resolve().parents[2]
JUNIT = """<testsuites><testsuite tests="4">
<testcase file="tests/a.py" classname="tests.a" name="test_quick" time="0.25" />
<testcase file="tests/a.py" classname="tests.a" name="test_slow[two cases]" time="12.5" />
<testcase file="tests/b.py" classname="tests.b" name="test_skipped" time="0"><skipped /></testcase>
<testcase file="tests/b.py" classname="tests.b" name="test_bad" time="1"><failure message="no" /></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench's files as they import each other when run as scripts."""
    sys.path.insert(0, str(ROOT / "bench"))
    yield importlib.import_module("test_times")
    sys.path.remove(str(ROOT / "bench"))


def test_a_row_counts_outcomes_and_lists_the_slowest_first(bench: Any) -> None:
    found = bench.row("test-fast", 14.04, JUNIT)
    counts = {name: found[name] for name in ("wall_s", "tests", "passed", "skipped", "failures", "tests_s")}
    assert counts == {"wall_s": 14.0, "tests": 4, "passed": 2, "skipped": 1, "failures": 1, "tests_s": 13.8}
    assert found["slowest"][0] == {"test": "tests/a.py::test_slow[two cases]", "s": 12.5}


def test_the_time_of_daemons_is_counted(tmp_path: Path) -> None:
    """The test ends before its daemon has computed for a CPU second."""
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while time.process_time() < 1: pass"
    command = f"[sys.executable, '-c', {daemon!r}]"
    (tmp_path / "test_daemon.py").write_text(
        f"import subprocess, sys\ndef test_daemon():\n    subprocess.run({command}, check=True)"
    )
    script, out = ROOT / "bench" / "test_times.py", tmp_path / "report.json"
    with Child(
        [sys.executable, str(script), "--each", "--paths", str(tmp_path / "test_daemon.py"), "--json", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as measuring:
        _, errors = measuring.communicate(timeout=60)
    assert measuring.returncode == 0, errors
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["tests"], row["passed"]) == (1, 1)
    assert row["cpu_s"] >= 1


def test_the_table_replaces_what_stands_between_the_markers(bench: Any) -> None:
    facts = {"cores": 2, "cpu": "AMD EPYC"}
    broken = {"name": "test", "wall_s": 3.0, "failed": "exit 2, no test ran"}
    report = {"machine": facts, "rows": [bench.row("test-fast", 14.04, JUNIT), broken]}
    page = f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter"
    filled = bench.fill(page, report)
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert "old" not in filled
    assert "| `make test-fast` | 4 | 14 | `test_slow` | 12 |" in filled
    assert "exit 2, no test ran" in filled
    assert bench.fill(filled, report) == filled


def test_the_slowest_of_make_test_have_reasons(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.json"
    reasons.write_text(json.dumps({"tests/a.py::test_slow": "two of them", "tests/a.py": "all of the file"}))
    monkeypatch.setattr(bench, "REASONS", reasons)
    filled = bench.table({"machine": {"cores": 2, "cpu": "AMD EPYC"}, "rows": [bench.row("test", 14.04, JUNIT)]})
    for line in (
        "| `a.py::test_slow[two cases]` | 12 | two of them |",
        "| `a.py::test_quick` | 0 | all of the file |",
        f"| `b.py::test_bad` | 1 | {bench.NO_REASON} |",
    ):
        assert line in filled.splitlines()


def test_reasons_are_of_tests_that_exist(bench: Any) -> None:
    for test in json.loads(bench.REASONS.read_text()):
        file, _, name = test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(), test


def test_contributing_shows_the_committed_report(bench: Any) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert bench.BEGIN in page
    if not bench.RESULTS.exists():
        pytest.skip("no tier has been measured yet: python bench/test_times.py --tiers ... --json ... --page ...")
    assert bench.fill(page, json.loads(bench.RESULTS.read_text())) == page
    assert bench.NO_REASON not in page
