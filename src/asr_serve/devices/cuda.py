"""CUDA device: the same code, with decoding steps recorded as CUDA graphs, one for each batch bucket."""

from __future__ import annotations

import bisect
import logging
import subprocess
import threading
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.cpu import (
    NormedLinear,
    PlainLinear,
    PlainVocabulary,
    packed_bytes,
    set_host_threads,
    stacked_gated_linear,
)
from asr_serve.devices.int8 import outlying
from asr_serve.devices.interface import GatedLinear, LayerNorm, Linear, VocabularyMatrix
from asr_serve.devices.tensor_parallel import SINGLE_RANK, TensorParallelGroup
from asr_serve.errors import OptionError
from asr_serve.kernels import PAGE, gpu_kernels, int8_reference, reference
from asr_serve.models.packing import PackedBatch
from asr_serve.types import Quantize

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts that a decoding step is padded to, so that its graph is recorded once and replayed."""


_RECORDING = threading.Lock()
"""Held while a graph is recorded. torch records on one stream for all threads and waits for the device before, which
would break the recording of another model's thread."""


class CudaGraphFunction:
    """Function of tensors with static shapes, recorded as a CUDA graph for each shape. Arguments are copied in;
    results are valid until the next call."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple[Any, ...], tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        key = tuple((a.shape, a.dtype) for a in arguments)
        if key not in self.graphs:
            with _RECORDING:
                self.graphs[key] = self._record(arguments)
        graph, inputs, outputs = self.graphs[key]
        for target, argument in zip(inputs, arguments, strict=True):
            target.copy_(argument, non_blocking=True)
        graph.replay()
        return outputs

    def _record(self, arguments: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = tuple(a.to("cuda", copy=True) for a in arguments)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces outside the recording
            for _ in range(2):
                self.function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all shapes: a step's results are read before the next one is replayed. Other threads, of
        # another model or the caller's own, may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            outputs = self.function(*inputs)
        return graph, inputs, outputs


SLAB_OUTPUTS = 8_192
"""Outputs of an int8 weight that are widened at a time: a vocabulary is never widened as a whole."""


class WidenedLinear:
    """Linear over an int8 weight, one scale for each output, widened slab by slab inside the product. Integers up
    to 127 are exact in bf16; sums are float32; the scale is applied afterwards.

    Not yet run on a CUDA device: the tests run it on the CPU's tensors.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        """`weight` (out, in) in any float dtype, on its final device; `bias` (out,); `out_dtype`: of the result."""
        self.integers, self.scale = int8_reference.quantise(weight)
        self.bias = None if bias is None else bias.float()
        self.out_dtype = out_dtype
        self.nbytes = packed_bytes(self.integers, self.scale, self.bias)

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        slabs = torch.split(self.integers, SLAB_OUTPUTS)
        out = torch.cat([_float32_product(x, slab.to(x.dtype)) for slab in slabs], dim=-1) * self.scale
        if self.bias is not None:
            out += self.bias
        if gelu:
            out = F.gelu(out)
        if add is not None:
            out += add
        return out.to(self.out_dtype)


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in) times the transpose of `weight` (out, in), in float32 as the product sums it. Only CUDA's products of
    16 bits have such a result: elsewhere it is rounded to x's dtype before."""
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return F.linear(x, weight).float()
    return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)


class WidenedVocabulary(WidenedLinear):
    """VocabularyMatrix of int8 weights; logits are float32."""

    weight: Tensor | None = None

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        """`dtype`: of looked-up vectors."""
        self.times = outlying(weight)
        super().__init__(weight if self.times is None else weight.float() / self.times, None, torch.float32)
        self.nbytes += 0 if self.times is None else self.times.nbytes
        self.dtype = dtype

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        return super().__call__(x if self.times is None else (x * self.times).to(x.dtype), gelu=gelu, add=add)

    def __len__(self) -> int:
        return len(self.integers)

    def embed(self, tokens: Tensor) -> Tensor:
        vectors = self.integers[tokens] * self.scale[tokens][:, None]
        return (vectors if self.times is None else vectors * self.times).to(self.dtype)


class Float32LogitsVocabulary(PlainVocabulary):
    """VocabularyMatrix in bf16 whose logits are float32, as the product sums them: in bf16 many would be equal."""

    def __init__(self, weight: Tensor) -> None:
        self.vectors, self.weight, self.nbytes = weight, None, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return _float32_product(x, self.vectors)


class CudaDevice:
    """CUDA device, see devices/interface.py."""

    encode_frames = 16_384
    frame_block = 256
    encoder_threads = 0
    rows_cost_time = False
    computes_on_host = False
    language_models = True

    def __init__(
        self,
        name: str = "cuda",
        dtype: torch.dtype | None = None,
        quantize: Quantize = "none",
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        """Raises OptionError for `dynamic`, which only the CPU supports."""
        if quantize == "dynamic":
            raise OptionError("quantize=dynamic", "on a CUDA device: none or int8", param="quantize")
        self.name, self.quantize, self.group = name, quantize, group
        number = torch.device(name).index
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
        self.dtype = dtype or torch.bfloat16
        self.threads = _threads()
        self.set_threads(self.threads)
        self.kernels: ModuleType = _working_kernels(self.torch_device)
        # Flash attention needs 16 bits and compute capability 8.0, and takes clips end to end.
        flash = torch.backends.cuda.is_flash_attention_available()
        ampere = torch.cuda.get_device_capability(self.torch_device) >= (8, 0)
        self.packs_clips = flash and ampere and self.dtype == torch.bfloat16

    @property
    def int8_cross_kv(self) -> bool:
        return False

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
        if norm is not None:
            return NormedLinear(norm, self.linear(weight, bias, dtype, layer))
        if self.quantize == "int8" and dtype is None:
            device_bias = None if bias is None else bias.to(self.torch_device)
            return WidenedLinear(weight.to(self.torch_device), device_bias, self.dtype)
        dtype = dtype or self.dtype
        device_bias = None if bias is None else bias.to(self.torch_device, dtype)
        return PlainLinear(weight.to(self.torch_device, dtype).contiguous(), device_bias)

    def vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        if self.quantize == "int8":
            return WidenedVocabulary(weight.to(self.torch_device), self.dtype)
        weight = weight.to(self.torch_device, self.dtype)
        if self.dtype == torch.bfloat16:
            return Float32LogitsVocabulary(weight)
        return PlainVocabulary(weight, self.linear(weight))

    def decoder_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self.linear(weight, bias)

    def gated_linear(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: str
    ) -> GatedLinear:
        return stacked_gated_linear(self, gate, up, biases, activation)

    def decoder_vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        return self.vocabulary(weight)

    def attention(self, qkv: Tensor, packing: PackedBatch, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if angles is not None:
            self.kernels.rope(qkv, packing.positions(qkv.device), *angles)
        return self._attention(qkv, packing)

    def causal_attention(self, qkv: Tensor, packing: PackedBatch, scale: float) -> Tensor:
        return self._attention(qkv, packing, scale, causal=True)

    def _attention(
        self, qkv: Tensor, packing: PackedBatch, scale: float | None = None, *, causal: bool = False
    ) -> Tensor:
        if self.packs_clips:
            return _flash_attention(qkv, packing, scale, causal)
        total, _, heads, head_dim = qkv.shape
        # Padded to the longest clip for one fused kernel; the scheduler batches similar lengths.
        frames = torch.tensor(packing.frames, device=qkv.device)
        offsets = torch.tensor(packing.offsets, device=qkv.device)
        steps = torch.arange(max(packing.frames), device=qkv.device)
        live = steps < frames[:, None]
        rows = (offsets[:, None] + steps).clamp(max=total - 1)
        q, k, v = (qkv[:, i][rows].transpose(1, 2) for i in range(3))
        mask = live[:, None, None, :]
        if causal:
            mask = mask & (steps <= steps[:, None])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = torch.zeros(total, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        out[rows[live]] = mixed.transpose(1, 2)[live]
        return out.view(total, heads * head_dim)

    def set_threads(self, threads: int) -> None:
        """Sets the threads of what the host computes: voice activity, turn models. The device itself has one queue; it
        becomes that of the calling thread, where Triton launches kernels."""
        torch.cuda.set_device(self.torch_device)
        torch.get_num_threads()  # a thread that first asks later would get what another thread set last
        set_host_threads(threads)

    def decode_threads(self, beside: bool) -> int:
        return self.threads

    def padded_rows(self, live: int) -> int:
        if live > BUCKETS[-1]:
            return -(-live // 128) * 128
        return BUCKETS[bisect.bisect_left(BUCKETS, live)]

    def padded_pages(self, used: int, limit: int) -> int:
        if self.kernels is not reference:
            return limit  # a graph for all: kernels read what is used, however wide the tables are
        return min(limit, 1 << (used - 1).bit_length())  # powers of two: few graphs, at most twice the reads

    def allocate(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.torch_device)

    def pin_memory(self, memory: memoryview) -> Callable[[], None]:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        try:
            with torch.cuda.device(self.torch_device):
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
        except torch.cuda.CudaError as error:
            raise OptionError(
                f"host_bytes={memory.nbytes}: CUDA cannot pin so much memory of the host ({error})",
                "as much as is free there, and as the system lets a process lock (ulimit -l)",
                "set engine.host_bytes to less, or to 0",
                param="engine.host_bytes",
            ) from error
        return partial(_unpin, self.torch_device, address)

    def capture(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        return CudaGraphFunction(function)

    def utilization(self) -> float | None:
        return _utilization(self.torch_device)

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "device": self.name,
            "gpu": properties.name,
            "memory_mib": properties.total_memory >> 20,
            "dtype": self.dtype_name,
            "threads": self.threads,
            "native": "not used: torch kernels" if self.kernels is reference else "Triton kernels",
            "quantize": self.quantize,
            "tensor_parallel_size": self.group.size,
            "products": "8-bit weights, widened in the product" if self.quantize == "int8" else self.dtype_name,
        }


def _working_kernels(device: torch.device) -> ModuleType:
    """Returns the Triton kernels, or the references where Triton is absent or cannot launch one: its first launch on a
    machine compiles a module, which takes a C compiler, Python's headers and a cache that code may be loaded from."""
    kernels = gpu_kernels()
    if kernels is reference:
        return reference
    pool, qkv = torch.zeros(1, 1, 2, 1, 8 * PAGE, device=device), torch.ones(1, 3, 8, device=device)
    table, position = (
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    try:
        kernels.append(pool, 0, qkv, table, position)
        torch.cuda.synchronize(device)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        log.warning("Triton cannot launch a kernel on %s, so torch's compute, which are slower: %s", device, error)
        return reference
    return kernels


FLASH_HEAD_MULTIPLE = 8
"""Flash attention takes heads whose size is a multiple of this."""


def _flash_attention(qkv: Tensor, packing: PackedBatch, scale: float | None, causal: bool) -> Tensor:
    """Attention within clips end to end, without padding; what follows the last clip is one of its own.

    Source: FlashAttention-2, arXiv:2307.08691. The operator is called itself: `torch.nn.attention.varlen` needs torch
    2.10, and its arguments have changed since.
    """
    total, _, heads, head_dim = qkv.shape
    scale = head_dim**-0.5 if scale is None else scale
    padded = F.pad(qkv, (0, -head_dim % FLASH_HEAD_MULTIPLE)) if head_dim % FLASH_HEAD_MULTIPLE else qkv
    boundaries = packing.boundaries(qkv.device)
    longest = max(*packing.frames, packing.total - sum(packing.frames))
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        *padded.unbind(1), boundaries, boundaries, longest, longest, 0.0, causal, False, scale=scale
    )[0]
    return mixed[..., :head_dim].reshape(total, heads * head_dim)


def _utilization(device: torch.device) -> float | None:
    """Utilization of a device by NVML; None without pynvml (nvidia-ml-py), which is optional, and where NVML does not
    measure, as of a part of a device (MIG)."""
    try:
        from pynvml import NVMLError  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (NVMLError, RuntimeError):
        return None


@cache
def _threads() -> int:
    """Number of host threads as torch found it. Cached: a new thread begins with the number that any other has set
    last, which may have been 1 for a turn model."""
    return torch.get_num_threads()


def _unpin(device: torch.device, address: int) -> None:
    """Unpins memory that is being freed; errors are logged, since no caller could handle them."""
    try:
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # CudaError, or an earlier error that broke the device
        log.error("CUDA does not let go of the host's memory at %#x: %s", address, error)
