"""How long the tests take: wall seconds of each tier, and its slowest tests.

    python bench/test_times.py --tiers test-fast,test,test-slow --json bench/results/test-times.json
    python bench/test_times.py --page CONTRIBUTING.md          # only fills the table from that file
    python bench/test_times.py --paths tests/text/formats      # one folder instead of tiers
    python bench/test_times.py --each --paths tests/a.py tests/b.py    # each file in a process by itself

The page also lists the slowest tests of `make test`, each with the reason in bench/test_times_reasons.json for taking
so long. A reason belongs to a test (`tests/a.py::test_b`, without parameters) or to all tests of a file
(`tests/a.py`); a test's own comes first.

Rows have the CPU seconds of all processes that the tests started, daemons included: a file with few of them to a wall
second waits, and leaves a core to others. These hardly depend on what else the machine does; wall seconds do.

A tier is a target of the Makefile. It runs once, with nothing else on the machine; `make setup` runs before the
clock starts. Times of single tests are those of pytest: set-up, call and tear-down. The exit code is 1 when tests
failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "test-times.json"
REASONS = ROOT / "bench" / "test_times_reasons.json"
TIERS = ("test-fast", "test", "test-slow")
JUSTIFIED = "test"
"""Tier whose slowest tests the page lists with their reasons."""
NO_REASON = "no reason given"
SLOWEST = 20
"""Tests listed for each tier."""
ORPHANS_S = 60.0
BEGIN, END = "<!-- bench:test-times -->", "<!-- /bench -->"
NOT_RUN = {"skipped", "failure", "error"}

Row = dict[str, Any]


def run(name: str, command: Sequence[str], junit: Path) -> Row:
    """Run a command that writes `junit` and report it as a row."""
    print(f"{name}: {shlex.join(command)}", file=sys.stderr)
    started, cpu_started_s = time.perf_counter(), children_cpu_s()
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    wall_s = time.perf_counter() - started
    await_orphans()
    cpu_s = round(children_cpu_s() - cpu_started_s, 1)
    if not junit.exists():
        failed = f"exit {done.returncode}, no test ran"
        return {"name": name, "wall_s": round(wall_s, 1), "cpu_s": cpu_s, "failed": failed}
    made = row(name, wall_s, junit.read_text()) | {"cpu_s": cpu_s}
    if done.returncode and not made["failures"]:
        made["failed"] = f"exit {done.returncode} without a failed test"
    return made


def adopt_orphans() -> None:
    """Makes this process the parent of daemons that its children start (Linux), so that their time is counted."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def await_orphans() -> None:
    """Waits until daemons of the tests have ended, for ORPHANS_S at the most."""
    end_s = time.monotonic() + ORPHANS_S
    while time.monotonic() < end_s:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
        except ChildProcessError:
            return


def children_cpu_s() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(name: str, wall_s: float, junit: str) -> Row:
    """A tier's row from pytest's JUnit XML (family xunit1)."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    outcomes = [{part.tag for part in case} & NOT_RUN for case in cases]
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:SLOWEST]
    return {
        "name": name,
        "wall_s": round(wall_s, 1),
        "tests": len(cases),
        "passed": sum(not each for each in outcomes),
        "skipped": sum(each == {"skipped"} for each in outcomes),
        "failures": sum(bool(each - {"skipped"}) for each in outcomes),
        "tests_s": round(sum(float(case.get("time", 0)) for case in cases), 1),
        "slowest": [{"test": test_id(case), "s": round(float(case.get("time", 0)), 2)} for case in slowest],
    }


def test_id(case: ElementTree.Element) -> str:
    """`tests/text/test_tokenizers.py::test_name[parameters]`; classes are left out."""
    return f"{case.get('file') or case.get('classname')}::{case.get('name')}"


def table(report: dict[str, Any]) -> str:
    """The report as CONTRIBUTING.md shows it, markers included."""
    facts = report["machine"]
    lines = [
        BEGIN,
        f"| tier ({facts['cores']} cores, {facts['cpu']}) | tests | wall s | slowest test | its s |",
        "|---|---|---|---|---|",
    ]
    for each in report["rows"]:
        if "slowest" not in each or not each["slowest"]:
            lines.append(f"| `make {each['name']}` | | {each['wall_s']:.0f} | {each.get('failed', '')} | |")
            continue
        worst = each["slowest"][0]
        name = worst["test"].rsplit("::", 1)[-1].partition("[")[0]
        wall_s = each["wall_s"]
        lines.append(f"| `make {each['name']}` | {each['tests']:,} | {wall_s:,.0f} | `{name}` | {worst['s']:.0f} |")
    slowest: list[Row] = next((each.get("slowest", []) for each in report["rows"] if each["name"] == JUSTIFIED), [])
    if slowest:
        lines += ["", f"| slowest of `make {JUSTIFIED}` | s | why it takes so long |", "|---|---|---|"]
        lines += [f"| `{shown(each['test'])}` | {each['s']:.0f} | {reason(each['test'])} |" for each in slowest]
    return "\n".join([*lines, END])


def shown(test: str) -> str:
    """A test's id in a cell of the table."""
    return test.removeprefix("tests/").replace("|", "\\|")


def reason(test: str) -> str:
    """Why a test takes so long, or NO_REASON."""
    reasons = json.loads(REASONS.read_text())
    file, _, name = test.partition("::")
    return reasons.get(f"{file}::{name.partition('[')[0]}") or reasons.get(file) or NO_REASON


def fill(page: str, report: dict[str, Any]) -> str:
    """The page with the table between its markers."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: table(report), page, count=1, flags=re.DOTALL)


def measure(tiers: Sequence[str], paths: Sequence[str], each: bool = False) -> list[Row]:
    """Rows of the tiers, or of the paths together; of each path by itself where `each` is true, without exhaustive
    cases, as in CI."""
    rows = []
    adopt_orphans()
    groups = [[path] for path in paths] if each else [paths]
    with tempfile.TemporaryDirectory(prefix="asr-serve-tests-") as folder:
        for number, name in enumerate([" ".join(group) for group in groups] if paths else tiers):
            junit = Path(folder, f"{number}.xml")
            options = ["-o", "junit_family=xunit1", f"--junitxml={junit}"]
            processes = ["-n", "0", "-m", "not exhaustive"] if each else ["-n", "2", "--dist", "loadfile"]
            command = [sys.executable, "-m", "pytest", *processes, *options, *name.split()]
            rows.append(run(name, command if paths else ["make", name, f"ARGS={shlex.join(options)}"], junit))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", help=f"targets of the Makefile, like {','.join(TIERS)}")
    parser.add_argument("--paths", nargs="+", default=[], help="folders or files instead of tiers")
    parser.add_argument("--each", action="store_true", help="measure each of the paths by itself")
    parser.add_argument("--json", type=Path, help="where the report goes, or, without --tiers, comes from")
    parser.add_argument("--page", type=Path, help="fill the table of this page")
    args = parser.parse_args()
    if args.tiers or args.paths:
        if args.tiers:
            subprocess.run(["make", "setup"], cwd=ROOT, stdout=sys.stderr, check=True)
        facts = machine.describe(machine.cores())
        report: dict[str, Any] = {
            "bench": "test-times",
            "machine": facts,
            "rows": measure((args.tiers or "").split(","), args.paths, args.each),
        }
        machine.tell(args.json, report)
    else:
        report = json.loads((args.json or RESULTS).read_text())
    if args.page is not None:
        page = fill(args.page.read_text(), report)
        args.page.write_text(page)
        if NO_REASON in page:
            print(f"tests without a reason: add them to {REASONS.relative_to(ROOT)}", file=sys.stderr)
    return int(any(each.get("failures") or "failed" in each for each in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
