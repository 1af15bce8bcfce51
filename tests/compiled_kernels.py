"""The compiled kernels on one instruction set, for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from asr_serve import kernels


@contextmanager
def compiled(isa: str) -> Iterator[ModuleType]:
    """The compiled module on one instruction set; the test is skipped where there is none."""
    core = kernels.core()
    if core is None:
        pytest.skip("the native core is not built or not wanted: pip install -e . builds it")
    try:
        core.choose_isa(isa)
    except ValueError:
        pytest.skip(f"this CPU, or what was compiled for it, has no {isa}")
    try:
        assert core.isa() == isa
        yield core
    finally:
        core.choose_isa("auto")
