"""Fixtures of the kernels' tests: the compiled module on each instruction set, dtypes, a seed."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from compiled_kernels import compiled

from asr_serve.kernels import reference


@pytest.fixture(params=["generic", "avx2", "avx512"])
def core(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The compiled module on one instruction set."""
    with compiled(request.param) as core:
        yield core


@pytest.fixture(params=["torch", "generic", "avx2", "avx512"])
def any_kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The reference kernels, or the compiled module on one instruction set."""
    if request.param == "torch":
        yield reference
    else:
        with compiled(request.param) as core:
            yield core


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20_26)
