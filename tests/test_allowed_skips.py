"""The policy of skips, as `.ci/run` has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from allowed_skips import REFUSED, STRICT_SKIPS, allowing_pattern

TESTS = """
import pytest
def test_passes(): pass
def test_allowed(): pytest.skip("no CUDA device")
def test_{name}(): pytest.skip("{reason}")
@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""


NATIVE = "the native core was not built"


@pytest.mark.parametrize(
    ("strict", "reason", "workers", "code"),
    [
        ("1", NATIVE, "2", 1),
        ("1", NATIVE, "0", 1),
        ("report", NATIVE, "0", 0),
        ("", NATIVE, "0", 0),
        ("1", "no CUDA device", "2", 0),
    ],
    ids=["refused in workers", "refused", "listed", "on a laptop", "allowed"],
)
def test_a_skip_that_is_not_allowed_fails_the_run(tmp_path: Path, strict: str, reason: str, workers: str, code: int):
    (tmp_path / "test_some.py").write_text(TESTS.format(name="other", reason=reason))
    if code:  # modules that skip themselves count too
        (tmp_path / "test_more.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    environ = os.environ | {STRICT_SKIPS: strict, "PYTHONPATH": str(Path(__file__).parent)}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", workers, "-p", "allowed_skips"]
    command += ["-c", os.devnull, "--rootdir", ".", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    told = f"test_some.py::test_other: Skipped: {NATIVE}" in done.stdout
    assert told == (reason == NATIVE and bool(strict)), done.stdout
    assert ("no_such_module" in done.stdout) == bool(code), done.stdout
    counted = f"skipped {1 + (reason != NATIVE)}: no CUDA device* (CI has no GPU)"
    assert (counted in done.stdout) == bool(strict), done.stdout
    cached = tmp_path / ".pytest_cache" / "v" / REFUSED
    assert cached.exists() == bool(code)
    if code:
        assert set(json.loads(cached.read_text())) == {"test_some.py::test_other", "test_more.py"}


@pytest.mark.parametrize(
    "reason",
    [
        "no weights of moonshine-tiny-en: pip install moonshine-voice==0.1.0",
        "no weights of whisper-tiny-en",
        "the weights of fastpitch-en or of the speaker encoder are not here",
        "hibari-tts is not installed: pip install hibari-tts",
        "the native core is not built or not wanted: pip install -e . builds it",
        "there is no Chromium on this machine",
        "axe-core is not installed: npm --prefix console ci",
        "the oracle: pip install 'asr-serve[dev]'",
        "no network of its own here: there is no `ip`",
        "could not import 'jiwer': No module named 'jiwer'",
    ],
)
def test_what_ci_installs_may_not_be_missing(reason: str):
    assert allowing_pattern(f"Skipped: {reason}") is None
