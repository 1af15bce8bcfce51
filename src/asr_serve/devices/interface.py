"""Protocols of devices and their linear layers, as models and engine use them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.models.packing import PackedBatch
from asr_serve.types import Quantize


class LayerNorm(NamedTuple):
    """Layer norm over the last axis."""

    weight: Tensor
    """(width,)"""
    bias: Tensor | None = None
    eps: float = 1e-5

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Linear(Protocol):
    """y = act(x W^T + b) (+ add). The weight is laid out for the device once, on construction."""

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        """x (..., in) -> (..., out). `gelu` is the exact one; `add` (..., out) is summed in after."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""


class GatedLinear(Protocol):
    """y = act(x G^T + b) * (x U^T + c): the first half of a gated feed-forward. Source: arXiv:2002.05202."""

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""


class VocabularyMatrix(Protocol):
    """Embedding matrix of a vocabulary, for both ends of a decoder: token lookup and output projection."""

    @property
    def weight(self) -> Tensor | None:
        """(vocab, dim) in the dtype of the logits, for `pick` to decide near ties by; None where logits are
        float32 and need no recomputation."""

    def __len__(self) -> int:
        """Number of vectors."""

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (rows,) int64 -> (rows, dim)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, dim) -> logits (rows, vocab)."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""


class Device(Protocol):
    """Device that runs the networks. Implementations: devices/cpu.py, devices/cuda.py."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    threads: int
    encode_frames: int
    """Frames of an encode batch beyond which a larger one is not faster."""
    frame_block: int
    """Batches of frames are padded to a multiple of this, so that few shapes occur."""
    packs_clips: bool
    """Whether a clip of an encode batch costs the time of its own frames. False: that of the longest clip's."""
    encoder_threads: int
    """Encode batches that may run beside the decoder, each on its own thread; 0 where the device does one at a time."""
    rows_cost_time: bool
    """Whether a step takes the time that its rows need. False: about as long with one row as with all of them."""
    computes_on_host: bool
    """Whether models are computed on the cores of the host, as voice activity is."""
    language_models: bool
    """Whether causal language models are computed on it. False: another engine computes them (engine/vllm), and they
    keep their tensors for it as they came."""
    group: TensorParallelGroup
    """Ranks that share a decoder's weights, this one among them; a group of one where nothing is split."""
    kernels: ModuleType
    """Module with the functions of asr_serve.kernels.reference, which it may be: else native."""

    @property
    def quantize(self) -> Quantize:
        """Quantization of the weights; `auto` only where 8 bits are faster."""

    @property
    def int8_cross_kv(self) -> bool:
        """Returns whether keys and values of cross-attention are kept in 8 bits (kernels/paging)."""

    @property
    def dtype_name(self) -> str:
        """fp32 or bf16."""

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        layer: str | None = None,
        norm: LayerNorm | None = None,
    ) -> Linear:
        """Returns a Linear of `weight` (out, in) and `bias` (out,), by default in the device's dtype. A device
        that quantizes does so here, except where the model names a dtype. `layer`: name of one that quantize=auto may
        quantize, which is that of the first of its tensors in the checkpoint, without `model.` and `.weight`. `norm`:
        of the input, on the device in its dtype, as part of the layer."""

    def vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        """Returns the matrix of `weight` (vocab, dim). Call it once for a tied embedding and output projection."""

    def decoder_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Returns a Linear like `linear`, for a causal language model: laid out for the few rows of its decoding
        steps."""

    def gated_linear(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: str
    ) -> GatedLinear:
        """Returns the GatedLinear of `gate`, `up` (out, in) and their `biases` (out,), for a causal language model.
        `activation`: silu or gelu_tanh."""

    def decoder_vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        """Returns a matrix like `vocabulary`, for the few rows of a decoding step."""

    def attention(self, qkv: Tensor, packing: PackedBatch, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Full self-attention within each clip of qkv (total, 3, heads, head_dim); returns (total, heads *
        head_dim). Past the last clip qkv must be finite, and so is the result. `angles`: cosines and sines (positions,
        half) float32, by which queries and keys are rotated in their first 2 * half numbers, halves apart, for their
        position in the clip; qkv may be overwritten then."""

    def causal_attention(self, qkv: Tensor, packing: PackedBatch, scale: float) -> Tensor:
        """Like `attention`, but causal: each position to those not after it; scores are products times `scale`."""

    def set_threads(self, threads: int) -> None:
        """Sets the number of host threads that the calling thread computes with."""

    def decode_threads(self, beside: bool) -> int:
        """Number of threads that decode: all, or those that encoders `beside` leave."""

    def padded_rows(self, live: int) -> int:
        """Number of rows that a decoding step of `live` rows runs with: more where shapes must repeat."""

    def padded_pages(self, used: int, limit: int) -> int:
        """Width of a step's block tables in pages, at least `used`."""

    def allocate(self, *shape: int) -> Tensor:
        """Allocates a large, long-lived, uninitialized tensor in the device's dtype."""

    def pin_memory(self, memory: memoryview) -> Callable[[], None]:
        """Pins host memory, so that the device may access it directly, until the returned function is called: by
        any thread, before the memory is freed. Raises OptionError where so much cannot be pinned."""

    def capture(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """Returns the same function, recorded for each shape of its arguments where the device can replay it."""

    def utilization(self) -> float | None:
        """Share of the last moments, 0..1, in which an accelerator computed anything; None where there is none, or
        nothing that measures it. Any thread may call it."""

    def describe(self) -> dict[str, Any]:
        """Description for `doctor` and logs."""
