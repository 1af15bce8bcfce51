"""The bench's files, imported as they import each other when run as scripts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

BENCH = Path(__file__).resolve().parents[2] / "bench"


@contextmanager
def bench_modules(*names: str) -> Iterator[SimpleNamespace]:
    """Context manager around the modules of those names, with the folder of the bench on the path."""
    sys.path.insert(0, str(BENCH))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(BENCH))
