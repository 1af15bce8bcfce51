"""The native core, and the twins that stand in for it.

`kernels` is the compiled module where it was built and `ASR_SERVE_NATIVE=0` is not set, else
`asr_serve.native.twins`. Both hold the same functions: rope softmax store append attend
pick tanh_norm lstm, and PAGE.
"""

from __future__ import annotations

from types import ModuleType

import torch  # noqa: F401  # first: the core borrows the OpenMP threads that torch loads

from asr_serve.config import native_wanted
from asr_serve.native import twins

PAGE = twins.PAGE


def core() -> ModuleType | None:
    """The compiled module, or None where it was not built (no compiler at install time) or not wanted."""
    if not native_wanted():
        return None
    try:
        import asr_serve.native._core as _core
    except ModuleNotFoundError as missing:
        if missing.name != "asr_serve.native._core":
            raise
        return None
    return _core  # type: ignore[no-any-return]


def kernels() -> ModuleType:
    """The fastest set of kernels for CPU tensors in this process."""
    return core() or twins
