"""The CPU: oneDNN products with weights packed once, our native kernels, every core of the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import native
from asr_serve.config import threads_wanted


def bf16_supported() -> bool:
    """Whether the CPU multiplies bf16 itself (AVX512-BF16, AMX, Arm BF16); emulation is slower than fp32."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


class PackedLinear:
    """Linear over a weight that oneDNN has reordered for this CPU, with GELU and the sum fused in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.product = torch.ops.mkldnn._linear_pointwise.default
        self.product_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        if add is not None:
            out: Tensor = self.product_add(x, add, self.weight, self.bias, "add")
        elif gelu:
            out = self.product(x, self.weight, self.bias, "gelu", [], "none")
        else:
            out = self.product(x, self.weight, self.bias, "none", [], "")
        return out


class PlainLinear:
    """Linear by torch alone: for CPUs without oneDNN, and for CUDA."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if gelu:
            out = F.gelu(out)
        return out if add is None else out + add


class CpuDevice:
    """See devices/base.py. Sets torch's thread count for the process."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.chosen_because = "asked for"
        if dtype is None:
            native_bf16 = bf16_supported()
            dtype = torch.bfloat16 if native_bf16 else torch.float32
            self.chosen_because = f"this CPU {'multiplies' if native_bf16 else 'does not multiply'} bf16 itself"
        self.dtype = dtype
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads_wanted() or cores
        torch.set_num_threads(self.threads)
        self.kernels = native.kernels()
        self.packs = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    @property
    def dtype_name(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Any:
        dtype = dtype or self.dtype
        bias = None if bias is None else bias.to(dtype)
        return (PackedLinear if self.packs else PlainLinear)(weight.to(dtype), bias)

    def attention(self, qkv: Tensor, lengths: Tensor) -> Tensor:
        rows, frames, _, heads, head_dim = qkv.shape
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        if qkv.dtype == torch.bfloat16 and self.kernels is not native.twins:
            # oneDNN's batched product and our softmax: four times torch's fused kernel on AVX512-BF16,
            # which converts to float32 first.
            scores = torch.matmul(q, k.transpose(2, 3))
            self.kernels.softmax(scores, lengths, head_dim**-0.5)
            # 0 * NaN is NaN: frames past the end must be numbers, and the encoder keeps them so.
            out = torch.matmul(scores, v)
        else:
            mask = None
            if int(lengths.min()) < frames:
                mask = (torch.arange(frames) < lengths[:, None])[:, None, None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).reshape(rows, frames, heads * head_dim)

    def rows(self, live: int) -> int:
        return live

    def width(self, used: int, limit: int) -> int:
        # Native kernels read what a row uses; the twins gather the whole width.
        return limit if self.kernels is not native.twins else used

    def step(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return function

    def describe(self) -> dict[str, Any]:
        core = native.core()
        return {
            "device": self.name,
            "dtype": self.dtype_name,
            "dtype_because": self.chosen_because,
            "threads": self.threads,
            "native": core.isa() if core else "not built: Python twins",
            "onednn": self.packs,
        }
