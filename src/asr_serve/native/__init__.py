"""The native modules, and the twins that stand in for them where they were not built or are not wanted.

`kernels` is the compiled core where it was built and `ASR_SERVE_NATIVE=0` is not set, else
`asr_serve.native.twins`. Both hold the same functions: rope softmax store append attend
pick tanh_norm lstm window_attention causal_conv Int8Linear, and PAGE. `ring` is the compiled ring, or
`asr_serve.native.ring_twin`, by the same rule: layout format Ring. Only the kernels need torch: importing this
loads none.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from asr_serve.config import native_wanted

if TYPE_CHECKING:
    from asr_serve.native import twins as twins

PAGE = 16
"""Positions in one page of keys and values."""


def __getattr__(name: str) -> ModuleType:
    """`native.twins`, loaded when it is first asked for: it is written in torch."""
    if name == "twins":
        return importlib.import_module("asr_serve.native.twins")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def core() -> ModuleType | None:
    """The compiled kernels, or None where they were not built (no compiler at install time) or not wanted."""
    import torch  # noqa: F401  # first: the core borrows the OpenMP threads that torch loads

    return _built("asr_serve.native._core")


def kernels() -> ModuleType:
    """The fastest set of kernels for CPU tensors in this process."""
    return core() or importlib.import_module("asr_serve.native.twins")


def ring() -> ModuleType:
    """The shared-memory ring: compiled, or in Python."""
    return _built("asr_serve.native._ring") or importlib.import_module("asr_serve.native.ring_twin")


def search() -> ModuleType:
    """The CTC search: compiled, or in Python."""
    import torch  # noqa: F401  # first: it too borrows the OpenMP threads that torch loads

    return _built("asr_serve.native._search") or importlib.import_module("asr_serve.native.search_twin")


def align() -> ModuleType:
    """The CTC forced alignment: compiled, or in numpy."""
    return _built("asr_serve.native._align") or importlib.import_module("asr_serve.native.align_twin")


def dtw() -> ModuleType:
    """Dynamic time warping: compiled, or in numpy."""
    return _built("asr_serve.native._dtw") or importlib.import_module("asr_serve.native.dtw_twin")


def disk() -> ModuleType | None:
    """Reads and writes by io_uring, or None: `transfer.disk` has other roads."""
    return _built("asr_serve.native._disk")


def copy() -> ModuleType | None:
    """Copies past the caches, or None: numpy copies through them."""
    return _built("asr_serve.native._copy")


def _built(name: str) -> ModuleType | None:
    if not native_wanted():
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        return None
