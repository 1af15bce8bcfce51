"""Slow tests begin while there is time; the others always run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slow_tests_limit import UNTIL

TESTS = """
import pytest
def test_quick(): pass
@pytest.fixture(scope="module")
def costly(): print("built")
@pytest.mark.slow
def test_slow(costly): pass
@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_some(case): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("left_s", "late"), [(None, 0), (3_600, 0), (-1, 2)], ids=["no limit", "time", "no time"])
def test_slow_tests_need_time(tmp_path: Path, workers: str, left_s: float | None, late: int):
    (tmp_path / "test_some.py").write_text(TESTS)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop(UNTIL, None)
    if left_s is not None:
        environ[UNTIL] = str(time.time() + left_s)
    command = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "xdist", "-n", workers, "-p", "slow_tests_limit"]
    command += ["-c", os.devnull, "--rootdir", ".", "-W", "ignore::pytest.PytestUnknownMarkWarning", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{4 - late} passed" in done.stdout
    assert (f"since no time was left: {late}" in done.stdout) == bool(late), done.stdout
    if workers == "0":
        assert ("built" in done.stdout) == (not late), "a fixture was built for a test that does not run"
