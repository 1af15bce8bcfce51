"""The native modules, and the twins that stand in for them where they were not built or are not wanted.

`kernels` is the compiled core where it was built and `ASR_SERVE_NATIVE=0` is not set, else
`asr_serve.kernels.reference`. Both hold the same functions: rope softmax store append attend
pick tanh_norm lstm window_attention causal_conv Int8Linear, and PAGE. `ring` is the compiled ring, or
`asr_serve.kernels.ring_reference`, by the same rule: layout format Ring. Only the kernels need torch:
importing this loads none.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from asr_serve.config import native_kernels_enabled

if TYPE_CHECKING:
    from asr_serve.kernels import reference as reference

PAGE = 16
"""Positions in one page of keys and values."""


def __getattr__(name: str) -> ModuleType:
    """`kernels.reference`, loaded when it is first asked for: it is written in torch."""
    if name == "reference":
        return importlib.import_module("asr_serve.kernels.reference")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def core() -> ModuleType | None:
    """The compiled kernels, or None where they were not built (no compiler at install time) or not wanted."""
    import torch  # noqa: F401  # first: the core borrows the OpenMP threads that torch loads

    return _built("asr_serve.kernels._core")


def kernels() -> ModuleType:
    """The fastest set of kernels for CPU tensors in this process."""
    return core() or importlib.import_module("asr_serve.kernels.reference")


def ring() -> ModuleType:
    """The shared-memory ring: compiled, or in Python."""
    return _built("asr_serve.kernels._ring") or importlib.import_module("asr_serve.kernels.ring_reference")


def search() -> ModuleType:
    """The CTC search: compiled, or in Python."""
    import torch  # noqa: F401  # first: it too borrows the OpenMP threads that torch loads

    return _built("asr_serve.kernels._search") or importlib.import_module("asr_serve.kernels.ctc_search_reference")


def align() -> ModuleType:
    """The CTC forced alignment: compiled, or in numpy."""
    return _built("asr_serve.kernels._align") or importlib.import_module(
        "asr_serve.kernels.ctc_alignment_reference"
    )


def dtw() -> ModuleType:
    """Dynamic time warping: compiled, or in numpy."""
    return _built("asr_serve.kernels._dtw") or importlib.import_module("asr_serve.kernels.dtw_reference")


def disk() -> ModuleType | None:
    """Reads and writes by io_uring, or None: `transfer.disk` has other roads."""
    return _built("asr_serve.kernels._disk")


def copy() -> ModuleType | None:
    """Copies past the caches, or None: numpy copies through them."""
    return _built("asr_serve.kernels._copy")


def _built(name: str) -> ModuleType | None:
    if not native_kernels_enabled():
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        return None
