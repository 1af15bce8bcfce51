"""Environments of other Pythons, which `make vllm` and `make clients` build. `.ci/run` builds them beside all
else: tests that want one are late in `tests/file_order.py`, and wait here if it is not whole yet.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILDING = "ENVIRONMENTS_BUILDING"
"""Variable that `.ci/run` sets to a folder: an environment is being built while a file of its name is there."""
LIMIT_S = 300.0
"""How long a test waits for one: half of the 600 s that it may take."""
gave_up: set[str] = set()
"""Those for which a test has waited that long: the others do not."""


def python_of(name: str, missing: str) -> Path:
    """Python of the environment `name` (`.venv-vllm`). The test is skipped, with the reason `missing`, where there is
    none: nobody built it, it could not be built, or it takes too long."""
    building = os.environ.get(BUILDING)
    end_s = time.monotonic() + LIMIT_S
    while building and name not in gave_up and Path(building, name).exists():
        if time.monotonic() > end_s:
            gave_up.add(name)
        time.sleep(0.5)
    if not (ROOT / name / ".done").is_file():
        pytest.skip(missing)
    return ROOT / name / "bin" / "python"
