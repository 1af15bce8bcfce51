"""CPU device: oneDNN products with weights packed once, native kernels, every core of the process."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import kernels
from asr_serve.config import thread_limit
from asr_serve.cores import usable_cores
from asr_serve.devices import bf16
from asr_serve.devices.huge_pages import ask_for_huge_pages
from asr_serve.devices.int8 import CpuInt8Linear, Int8Vocabulary, eight_bits_are_faster, has_dots
from asr_serve.devices.interface import Device, GatedLinear, LayerNorm, Linear, VocabularyMatrix
from asr_serve.devices.tensor_parallel import SINGLE_RANK, TensorParallelGroup
from asr_serve.models.packing import PackedBatch
from asr_serve.types import Int8Calibration, Quantize

log = logging.getLogger(__name__)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Names of the processor's instruction sets, as Linux has them; none elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            return frozenset(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
    except OSError:
        return frozenset()


def bf16_supported() -> bool:
    """Returns whether the CPU multiplies bf16 itself (AVX512-BF16, AMX, Arm BF16); emulation is slower than fp32."""
    return bool(cpu_flags() & {"avx512_bf16", *BF16_MATRICES})


BF16_MATRICES = frozenset({"amx_bf16", "bf16"})
"""Instruction sets that multiply matrices of bf16: Intel AMX, and Arm's BF16."""


def packed_dtypes() -> frozenset[torch.dtype]:
    """Types of weights that oneDNN packs on this CPU: bf16 only where it has AVX-512 or more."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return frozenset()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if bf16 else {torch.float32})


def keep_memory() -> None:
    """Makes glibc keep the memory of freed tensors, on one heap for all threads, in huge pages.

    By default every activation of a few megabytes is mapped, zeroed page by page and unmapped again, and the heaps
    of other threads than the first cannot hold large blocks at all. A thread that has a heap keeps it: call this
    before the computing thread is started.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return  # not glibc
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    library.mallopt(m_arena_max, 1)
    library.mallopt(m_mmap_threshold, 32 << 20)  # the most it takes
    library.mallopt(m_trim_threshold, 512 << 20)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(KEPT_BLOCK_BYTES) for _ in range(KEPT_BLOCKS)]
    for block in blocks:
        if block:
            ask_for_huge_pages(block, KEPT_BLOCK_BYTES)
    for block in blocks:
        library.free(block)  # untouched: only the advice stays


KEPT_BLOCK_BYTES, KEPT_BLOCKS = 31 << 20, 4
"""Memory for activations, in blocks small enough for the heap."""
ATTENTION_BLOCK = 64
"""Keys of one clip are padded to a multiple of this."""
CROSS_KV = "decoder.cross_keys_values"
"""Name of the keys and values of cross-attention among the layers of a calibration."""
ROW_BLOCK = 8
"""Rows of a decoding step are padded to a multiple of this."""


def decodes(layer: str) -> bool:
    """Returns whether a layer of that name multiplies the few rows of a decoding step, and not frames of the
    encoder."""
    return layer.startswith("decoder.") and not layer.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))


class PackedLinear:
    """Linear over a weight that oneDNN has reordered for this CPU, with GELU and the sum fused in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.nbytes = packed_bytes(weight, bias)
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
        self.nbytes = packed_bytes(weight, bias)

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if gelu:
            out = F.gelu(out)
        return out if add is None else out + add


class NormedLinear:
    """Linear after a layer norm of its input."""

    def __init__(self, norm: LayerNorm, linear: Linear) -> None:
        self.norm, self.linear = norm, linear
        self.nbytes = linear.nbytes + packed_bytes(norm.weight, norm.bias)

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        return self.linear(self.norm(x), gelu=gelu, add=add)


class StackedGatedLinear:
    """GatedLinear as one Linear over both matrices, and the kernel that multiplies its halves."""

    def __init__(self, linear: Linear, activation: str, kernels: ModuleType) -> None:
        """`linear`: over the gate, then its counterpart."""
        self.linear, self.activation, self.kernels = linear, activation, kernels
        self.nbytes = linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        both = self.linear(x)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        self.kernels.gate(both, out, self.activation)
        return out


def stacked_gated_linear(
    device: Device, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: str
) -> GatedLinear:
    """Returns a GatedLinear of the device's own linear layer."""
    linear = device.linear(torch.cat([gate, up]), None if biases is None else torch.cat(biases))
    return StackedGatedLinear(linear, activation, device.kernels)


class PlainVocabulary:
    """VocabularyMatrix in one dtype: rows to look up, and the Linear over them."""

    def __init__(self, weight: Tensor, linear: Linear) -> None:
        self.weight: Tensor | None = weight
        self.vectors, self.linear = weight, linear
        self.nbytes = weight.nbytes + linear.nbytes

    def __len__(self) -> int:
        return len(self.vectors)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.vectors)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)


def packed_bytes(*tensors: Tensor | None) -> int:
    """Total bytes of the tensors."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def set_host_threads(threads: int) -> None:
    """Sets the threads that torch and the native kernels use for what the calling thread computes on the CPU."""
    torch.set_num_threads(threads)
    if core := kernels.core():
        core.set_threads(threads)


class CpuDevice:
    """CPU device, see devices/interface.py. Sets torch's thread count for the process."""

    name = "cpu"
    torch_device = torch.device("cpu")
    encode_frames = 1_280
    frame_block = 128
    packs_clips = True
    rows_cost_time = True
    computes_on_host = True
    language_models = True

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        quantize: Quantize = "none",
        group: TensorParallelGroup = SINGLE_RANK,
        calibration: Int8Calibration | None = None,
    ) -> None:
        """`group`: ranks on this machine, among which its cores are divided. `calibration`: layers that `auto` may
        quantize; None: none."""
        self.group, self.calibration = group, calibration
        self.chosen_because = "asked for"
        if dtype is None:
            native_bf16 = bf16_supported()
            dtype = torch.bfloat16 if native_bf16 else torch.float32
            self.chosen_because = f"this CPU {'multiplies' if native_bf16 else 'does not multiply'} bf16 itself"
        elif dtype == torch.bfloat16 and cpu_flags() and not bf16_supported():
            log.warning(
                "dtype=bf16 was asked for, and this CPU has no instructions for bf16: products are emulated, "
                "slower than fp32; dtype=auto chooses what this CPU computes fastest"
            )
        self.dtype = dtype
        self.threads = max(1, (thread_limit() or usable_cores()) // group.size)
        self.encoder_threads = 0 if self.threads == 1 else self.threads - self.threads // 4
        self.kernels = kernels.kernels()
        self.fused_attention = self.kernels is not kernels.reference and bool(self.kernels.prefers_attend_clips())
        """Whether bf16 clips are attended to in one kernel."""
        self.set_threads(self.threads)
        self.packed_dtypes = packed_dtypes()
        if quantize == "auto" and not eight_bits_are_faster(
            self.kernels, dtype, bf16_matrices=bool(cpu_flags() & BF16_MATRICES)
        ):
            quantize = "none"
        self.quantize: Quantize = quantize

    @property
    def int8_cross_kv(self) -> bool:
        return self.quantize == "auto" and self._quantizes(CROSS_KV)

    @property
    def dtype_name(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        layer: str | None = None,
        norm: LayerNorm | None = None,
    ) -> Linear:
        if dtype is None and self._quantizes(layer):
            return CpuInt8Linear(weight, bias, self.kernels, self._bits, norm=norm)
        linear = self._float_linear(weight, bias, dtype, layer)
        return linear if norm is None else NormedLinear(norm, linear)

    def _float_linear(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, layer: str | None
    ) -> Linear:
        if dtype is None and layer is not None and decodes(layer) and self._packs_bf16(weight):
            return bf16.CpuBf16Linear(weight, bias, self.kernels)
        dtype = dtype or self.dtype
        bias = None if bias is None else bias.to(dtype)
        return (PackedLinear if dtype in self.packed_dtypes else PlainLinear)(weight.to(dtype), bias)

    def _quantizes(self, layer: str | None) -> bool:
        if self.quantize != "auto":
            return self.quantize != "none"
        return layer is not None and self.calibration is not None and self.calibration.quantizes(layer)

    def vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        if self.quantize in ("int8", "dynamic"):
            return Int8Vocabulary(weight, self.kernels, self._bits, self.dtype)
        weight = weight.to(self.dtype)
        return PlainVocabulary(weight, self.linear(weight))

    def decoder_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self._packs_bf16(weight):
            return bf16.CpuBf16Linear(weight, bias, self.kernels)
        return self.linear(weight, bias)

    def gated_linear(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: str
    ) -> GatedLinear:
        if self._packs_bf16(gate):
            return bf16.CpuBf16GatedLinear(gate, up, biases, activation, self.kernels)
        return stacked_gated_linear(self, gate, up, biases, activation)

    def decoder_vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        return bf16.Bf16Vocabulary(weight, self.kernels) if self._packs_bf16(weight) else self.vocabulary(weight)

    def _packs_bf16(self, weight: Tensor) -> bool:
        return self.quantize in ("none", "auto") and self.dtype == torch.bfloat16 and bf16.fits(self.kernels, weight)

    @property
    def _bits(self) -> int:
        """Bits of the activations in int8 products: 16 where 8 are not faster."""
        return 16 if self.quantize == "int8" or not has_dots(self.kernels) else 8

    def attention(self, qkv: Tensor, packing: PackedBatch, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        total, _, heads, head_dim = qkv.shape
        out = torch.empty(total, heads * head_dim, dtype=qkv.dtype)
        if qkv.dtype == torch.bfloat16 and self.kernels is not kernels.reference and not self.fused_attention:
            if angles is not None:
                self.kernels.rope(qkv, packing.positions(qkv.device), *angles)
            self._attend_by_products(qkv, packing, out.view(total, heads, head_dim))
        else:
            cos, sin = angles or (None, None)
            self.kernels.attend_clips(qkv, packing.frames, cos, sin, head_dim**-0.5, out)
        return out

    def _attend_by_products(self, qkv: Tensor, packing: PackedBatch, out: Tensor) -> None:
        """Attends by oneDNN's batched products in bf16, which torch's fused kernel converts to float32 first."""
        out[sum(packing.frames) :] = 0
        for offset, frames in zip(packing.offsets, packing.frames, strict=True):
            # Each new shape costs a millisecond of compiling: read on into the next clip up to a round length,
            # where there is that much; softmax gives those keys no weight and those queries are dropped.
            end = min(offset + -(-frames // ATTENTION_BLOCK) * ATTENTION_BLOCK, len(qkv))
            q, k, v = (qkv[offset:end, i].transpose(0, 1) for i in range(3))
            scores = torch.matmul(q, k.transpose(1, 2))
            self.kernels.softmax(scores[None], torch.tensor([frames]), qkv.shape[3] ** -0.5)
            out[offset : offset + frames] = torch.matmul(scores, v).transpose(0, 1)[:frames]

    def causal_attention(self, qkv: Tensor, packing: PackedBatch, scale: float) -> Tensor:
        total, _, heads, head_dim = qkv.shape
        out = qkv.new_zeros(total, heads, head_dim)
        for offset, count in zip(packing.offsets, packing.frames, strict=True):
            q, k, v = (qkv[None, offset : offset + count, i].transpose(1, 2) for i in range(3))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            out[offset : offset + count] = mixed[0].transpose(0, 1)
        return out.view(total, heads * head_dim)

    def set_threads(self, threads: int) -> None:
        set_host_threads(threads)

    def decode_threads(self, beside: bool) -> int:
        return max(1, self.threads // 4) if beside else self.threads

    def padded_rows(self, live: int) -> int:
        return live if live <= 4 else -(-live // ROW_BLOCK) * ROW_BLOCK

    def padded_pages(self, used: int, limit: int) -> int:
        # Native kernels read what a row uses; the reference ones gather the whole width.
        return limit if self.kernels is not kernels.reference else used

    def allocate(self, *shape: int) -> Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype)
        ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def pin_memory(self, memory: memoryview) -> Callable[[], None]:
        return lambda: None  # it is the device's memory

    def capture(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return function

    def utilization(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        core = kernels.core()
        both = f"8-bit weights, {self._bits}-bit activations"
        automatic = f"{both}; {self.dtype_name} in the layers that need it"
        products = {"none": self.dtype_name, "int8": both, "dynamic": both, "auto": automatic}
        return {
            "device": self.name,
            "dtype": self.dtype_name,
            "dtype_because": self.chosen_because,
            "threads": self.threads,
            "native": core.isa() if core else "not built: Python reference",
            "native_threads": (self.threads if core.shares_threads() else 1) if core else None,
            "onednn": bool(self.packed_dtypes),
            "quantize": self.quantize,
            "tensor_parallel_size": self.group.size,
            "products": products[self.quantize],
            "int8": core.int8_isa() if core else "Python reference",
        }
