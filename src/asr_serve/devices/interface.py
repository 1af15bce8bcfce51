"""What a device offers the models and the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from asr_serve.models.packing import PackedBatch


class Linear(Protocol):
    """y = act(x W^T + b) (+ add). Weights are laid out for the device once, when it is made."""

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        """x (..., in) -> (..., out). `gelu` is the exact one; `add` (..., out) is summed in after."""

    @property
    def nbytes(self) -> int:
        """What it holds."""


class VocabularyMatrix(Protocol):
    """A vocabulary's vectors, for both ends of a decoder: looked up for tokens that come in, multiplied with for
    those that go out."""

    @property
    def weight(self) -> Tensor | None:
        """(vocab, dim) in the dtype of the logits, for `pick` to decide near ties by; None where the logits come
        in float32 and need no second look."""

    def __len__(self) -> int:
        """How many vectors there are."""

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens (rows,) int64 -> (rows, dim)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x (rows, dim) -> logits (rows, vocab)."""

    @property
    def nbytes(self) -> int:
        """What it holds."""


class Device(Protocol):
    """Implementations: devices/cpu.py, devices/cuda.py."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    threads: int
    encode_frames: int
    """Frames in an encode batch, beyond which a larger one is not faster."""
    frame_block: int
    """Batches of frames are filled up to a multiple of this, so that few shapes occur."""
    encoder_threads: int
    """Encode batches that may run beside the decoder, on threads of their own that do not share; 0 where the
    device does one thing at a time."""
    kernels: ModuleType
    """rope softmax store append attend pick tanh_norm lstm: `asr_serve.kernels` or its twins."""

    @property
    def dtype_name(self) -> str:
        """fp32 or bf16."""

    def linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Linear:
        """A Linear of `weight` (out, in), `bias` (out,), in the device's dtype unless told. A device that
        quantises does so here, but for what a model names a dtype for."""

    def vocabulary(self, weight: Tensor) -> VocabularyMatrix:
        """The vectors `weight` (vocab, dim). Ask once for an embedding and an output projection that are one."""

    def attention(self, qkv: Tensor, packing: PackedBatch) -> Tensor:
        """Full self-attention within each clip of qkv (total, 3, heads, head_dim); out (total, heads *
        head_dim). Past the last clip, qkv must hold numbers, and out does."""

    def causal_attention(self, qkv: Tensor, packing: PackedBatch, scale: float) -> Tensor:
        """The same of a decoder, each position to those not after it; scores are products times `scale`."""

    def set_threads(self, threads: int) -> None:
        """Compute with so many of the host's threads, in the calling thread, from here on."""

    def decode_threads(self, beside: bool) -> int:
        """How many threads decode: all, or what encoders `beside` leave."""

    def padded_rows(self, live: int) -> int:
        """How many rows a decoding step of `live` rows runs with: more where shapes must repeat."""

    def padded_pages(self, used: int, limit: int) -> int:
        """How many pages wide a step's block tables are, `used` at least."""

    def allocate(self, *shape: int) -> Tensor:
        """A large tensor that is kept, not yet filled, in the device's dtype."""

    def pin_memory(self, memory: memoryview) -> Callable[[], None]:
        """Memory of the host that is kept: the device may read and write it by itself, until what this returns is
        called, by any thread, before the memory goes. Raises OptionError where so much cannot be pinned."""

    def capture(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """The same function, recorded per shape of its arguments where the device can replay it."""

    def describe(self) -> dict[str, Any]:
        """For `doctor` and logs."""
