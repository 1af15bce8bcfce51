"""The policy of skips, as `.ci/run` has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from allowed_skips import STRICT_SKIPS

TESTS = """
import pytest
def test_passes(): pass
def test_allowed(): pytest.skip("no CUDA device")
def test_{name}(): pytest.skip("{reason}")
@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("strict", "reason", "code"),
    [("1", "the native core was not built", 1), ("", "the native core was not built", 0), ("1", "no CUDA device", 0)],
    ids=["refused", "on a laptop", "allowed"],
)
def test_a_skip_that_is_not_allowed_fails_the_run(tmp_path: Path, workers: str, strict: str, reason: str, code: int):
    (tmp_path / "test_some.py").write_text(TESTS.format(name="other", reason=reason))
    environ = os.environ | {STRICT_SKIPS: strict, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "allowed_skips", "-c", os.devnull, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    told = "test_some.py::test_other: Skipped: the native core was not built" in done.stdout
    assert told == bool(code), done.stdout


def test_a_module_that_skips_itself_counts_too(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    (tmp_path / "test_more.py").write_text("def test_passes(): pass\n")
    environ = os.environ | {STRICT_SKIPS: "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "allowed_skips", "-c", os.devnull, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "no_such_module" in done.stdout) == (1, True), done.stdout + done.stderr
