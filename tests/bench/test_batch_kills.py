"""bench/batch_kills.py with few clips: a server that is killed answers every line of its batch once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "batch_kills.py"
LIMIT_S = 500.0


@pytest.mark.parametrize(
    ("clips", "kills"),
    [
        pytest.param(60, 2, marks=pytest.mark.slow),
        pytest.param(10_000, 5, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7_200)]),
    ],
)
@pytest.mark.usefixtures("packaged_speech")
def test_every_line_is_answered_once(clips: int, kills: int, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH), f"--clips={clips}", f"--kills={kills}", "--seconds=1", "--threads=1"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*command, "--look-s=0.02", f"--folder={tmp_path / 'server'}", f"--json={report}"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=LIMIT_S if clips < 1_000 else None,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["answered_once"], row["answered_more_than_once"], row["not_answered"]) == (clips, 0, 0)
    assert (row["kills"], row["errors"]) == (kills, 0)
