"""Linear layers, convolutions and rotary positions of FastPitch's encoder and decoder.

A network gets its layers and vectors by name from a `TensorSource`: a device's layers for synthesis, trainable
ones for training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Linear

MASKED = -1e4
"""Added to a masked score; bf16 can represent it."""


LoraChanges = Mapping[str, tuple[Tensor, Tensor]]
"""Low-rank changes of voices by the names of linear layers: a pair of matrices for each row (LoRA,
arXiv:2106.09685), (rows, in, rank) and (rows, rank, out) float32."""


class TensorSource(Protocol):
    """Source of a network's layers and vectors by name."""

    def linear(self, name: str) -> Linear: ...
    def vector(self, name: str) -> Tensor: ...


class AdaptedLinear:
    """Linear layer over (rows, frames, in), with a low-rank change for each row's voice."""

    def __init__(self, parts: TensorSource, name: str) -> None:
        self._name, self._linear = name, parts.linear(name)

    def __call__(
        self, x: Tensor, changes: LoraChanges | None = None, *, gelu: bool = False, add: Tensor | None = None
    ) -> Tensor:
        """Applies the layer. `changes`: None where no row has any."""
        flat = x.reshape(-1, x.shape[-1])
        if changes is None or self._name not in changes:
            added = None if add is None else add.reshape(-1, add.shape[-1])
            return self._linear(flat, gelu=gelu, add=added).view(*x.shape[:-1], -1)
        out = self._linear(flat).view(*x.shape[:-1], -1)
        down, up = changes[self._name]
        out = out + torch.bmm(torch.bmm(x.to(down.dtype), down), up).to(out.dtype)
        if gelu:
            out = F.gelu(out)
        return out if add is None else out + add


class Norm:
    """LayerNorm over the last axis."""

    def __init__(self, parts: TensorSource, name: str) -> None:
        self._weight, self._bias = parts.vector(f"{name}.weight"), parts.vector(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias)


def with_neighbours(x: Tensor, width: int) -> Tensor:
    """Concatenates each frame with its neighbours, zeros past the ends: (rows, frames, d) -> (rows, frames, width
    * d), the input of a convolution as a product."""
    return joined(F.pad(x, (0, 0, width // 2, width // 2)), width)


def joined(x: Tensor, width: int) -> Tensor:
    """Concatenates `width` consecutive frames: (rows, frames + width - 1, d) -> (rows, frames, width * d)."""
    frames = x.shape[1] - width + 1
    return torch.cat([x[:, at : at + frames] for at in range(width)], -1)


class RotaryAngles(NamedTuple):
    """Rotary positions (arXiv:2104.09864) of some frames: the same in all layers."""

    cos: Tensor
    """(frames, d / 2), or (rows, 1, frames, d / 2)."""
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, d: int, dtype: torch.dtype) -> RotaryAngles:
        """Computes the angles of `positions` (frames,) or (rows, frames); `d`: size of a head."""
        half = d // 2
        rates = torch.exp(-math.log(10_000.0) / half * torch.arange(half, device=positions.device, dtype=torch.float32))
        angles = positions[..., None].float() * rates
        if angles.dim() == 3:
            angles = angles[:, None]
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(x: Tensor, turns: RotaryAngles) -> Tensor:
    """Rotates x (rows, heads, frames, d)."""
    cos, sin = turns
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Computes softmax attention over the last two axes; `bias` broadcasts to the scores. Two products: on CPU
    their backward pass is faster than the fused kernel's in bf16."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    attended: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return attended
