"""Memory that a file of tests leaves is given back before the next file begins.

A model that is closed stays until Python looks for cycles, and what threads have freed stays in malloc's arenas: a
process of tests grew to 4 GB, and three of them did not fit into CI's 24 GiB.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

STATM = Path("/proc/self/statm")
MOST_GROWTH_BYTES = 256 << 20
"""Growth that is let be: looking for cycles takes a quarter of a second."""
_kept_bytes = 0


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    global _kept_bytes
    result = yield
    if nextitem is not None and nextitem.path != item.path and resident_bytes() - _kept_bytes > MOST_GROWTH_BYTES:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)
        _kept_bytes = resident_bytes()
    return result
