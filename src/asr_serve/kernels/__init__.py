"""Native modules, and the Python references that replace them where they were not built or are disabled.

`kernels` returns the compiled core where it was built and `ASR_SERVE_NATIVE=0` is not set, else
`asr_serve.kernels.reference`. Both have the same names: rope softmax store append attend store_int8 attend_int8
rms_norm rotate_append gate pick tanh_norm lstm attend_clips window_attention causal_conv Int8Linear FrameLayers
DecoderLayers VoiceActivityEncoder, and PAGE. `ring` returns the compiled ring, or `asr_serve.kernels.ring_reference`,
by the same rule: layout format Ring. Only the kernels need torch: importing this package does not load it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from asr_serve.config import native_kernels_enabled
from asr_serve.errors import StaleBuild

if TYPE_CHECKING:
    from asr_serve.kernels import reference as reference

INTERFACES = {"asr_serve.kernels._packets": 1, "asr_serve.kernels._core": 1}
"""Interface numbers of native modules whose functions change together with their callers."""
PAGE = 16
"""Positions in one page of keys and values."""


def __getattr__(name: str) -> ModuleType:
    """Imports `kernels.reference` on first use, since it needs torch."""
    if name == "reference":
        return importlib.import_module("asr_serve.kernels.reference")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def core() -> ModuleType | None:
    """Compiled kernels, or None where they were not built (no compiler at install time) or are disabled."""
    import torch  # noqa: F401  # first: the core uses the OpenMP threads that torch loads

    return _built("asr_serve.kernels._core")


def kernels() -> ModuleType:
    """Fastest kernels for CPU tensors in this process."""
    return core() or importlib.import_module("asr_serve.kernels.reference")


def gpu_kernels() -> ModuleType:
    """Kernels for CUDA tensors: in Triton, which comes with torch for CUDA, or in torch where it is absent or
    ASR_SERVE_NATIVE=0 is set."""
    triton = native_kernels_enabled() and importlib.util.find_spec("triton") is not None
    return importlib.import_module(f"asr_serve.kernels.{'triton_kernels' if triton else 'reference'}")


def ring() -> ModuleType:
    """Shared-memory ring: compiled, or in Python."""
    return _built("asr_serve.kernels._ring") or importlib.import_module("asr_serve.kernels.ring_reference")


def search() -> ModuleType:
    """CTC search: compiled, or in Python."""
    return _built("asr_serve.kernels._search") or importlib.import_module("asr_serve.kernels.ctc_search_reference")


def wfst() -> ModuleType:
    """Search of decoding graphs: compiled, or in Python."""
    return _built("asr_serve.kernels._wfst") or importlib.import_module("asr_serve.kernels.wfst_reference")


def align() -> ModuleType:
    """CTC forced alignment: compiled, or in numpy."""
    return _built("asr_serve.kernels._align") or importlib.import_module("asr_serve.kernels.ctc_alignment_reference")


def dtw() -> ModuleType:
    """Dynamic time warping: compiled, or in numpy."""
    return _built("asr_serve.kernels._dtw") or importlib.import_module("asr_serve.kernels.dtw_reference")


def disk() -> ModuleType | None:
    """Reads and writes by io_uring, or None: `transfer.disk` has other backends."""
    return _built("asr_serve.kernels._disk")


def copy() -> ModuleType | None:
    """Copies that bypass the caches, or None: numpy copies through them."""
    return _built("asr_serve.kernels._copy")


def packets() -> ModuleType:
    """Datagrams in batches: by recvmmsg where it was built and the system has it, or one by one."""
    return native_packets() or importlib.import_module("asr_serve.kernels.packets_reference")


def native_packets() -> ModuleType | None:
    """Datagrams by recvmmsg and AF_XDP, or None where it was not built or the system has neither."""
    return _built("asr_serve.kernels._packets") if sys.platform == "linux" else None


def _built(name: str) -> ModuleType | None:
    """Returns the native module of that name, or None. Raises StaleBuild for one that was built from other sources."""
    if not native_kernels_enabled():
        return None
    try:
        built = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        return None
    expected, found = INTERFACES.get(name), getattr(built, "INTERFACE", None)
    if found != expected:
        raise StaleBuild(
            f"{name} was built from other sources: its interface is {found}",
            f"interface {expected}",
            "build it again: make setup; or go without: ASR_SERVE_NATIVE=0",
        )
    return built
