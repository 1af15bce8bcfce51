"""Products with int8 weights in plain torch: the oracle of `int8.cpp`, and its fallback.

A weight is int8 with one scale for each output. Each row of x is rounded to integers with its own scale, of 16
bits (only the weights lose precision: the row stays finer than bf16) or of 8 (both do). Sums are integers, so the
result of a row does not depend on its batch.

Source: symmetric quantization as in arXiv:2004.09602, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

OUTPUTS, INPUTS = 16, 4
"""Outputs and inputs of a block of a packed weight."""
LIMITS = {8: 127, 16: 32_767}
SMALLEST = 1e-30
"""Rows whose largest number is below this count as zero."""
SLAB = 1_024
"""Outputs that are quantized at a time."""
SAMPLES = 16
"""Weights of an output that are searched for a step."""
ON_GRID = 0.02
"""Largest distance from an integer, in steps, of weights that were quantized before."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `weight` (out, in) as int8 in -127..127, and the scale (out,) float32 of each output: its largest
    weight becomes 127. An output whose weights are multiples of one step already, as in a checkpoint that was
    quantized before, keeps them as they are."""
    parts = [_quantised(part) for part in torch.split(weight.float(), SLAB)]
    return torch.cat([integers for integers, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    top = weight.abs().amax(dim=1, keepdim=True)
    # Searched on a sample of the weights, then confirmed on all. What fits with the largest weight at n also fits
    # at 2 n: none below 64 need be tried.
    sample = weight[:, :: max(1, weight.shape[1] // SAMPLES)][:, :SAMPLES]
    candidates = torch.arange(127, 63, -1, device=weight.device, dtype=torch.float32)
    errors = _off_grid((sample / top.clamp(min=SMALLEST))[:, None] * candidates[:, None])
    highest = candidates[errors.argmin(dim=1)][:, None]
    levels = weight * (highest / top.clamp(min=SMALLEST))
    highest = torch.where(_off_grid(levels)[:, None] < ON_GRID, highest, 127.0)
    scale = top / highest
    return (weight / scale.clamp(min=SMALLEST)).round().to(torch.int8), scale[:, 0]


def _off_grid(levels: Tensor) -> Tensor:
    """Largest distance from an integer along the last dimension."""
    return (levels - levels.round()).abs().amax(dim=-1)


def pack(weight: Tensor) -> Tensor:
    """Packs int8 (out, in) as the kernels read it: (out / 16, in / 4, 16, 4), padded with zeros."""
    full = F.pad(weight, (0, -weight.shape[1] % INPUTS, 0, -weight.shape[0] % OUTPUTS))
    blocks = full.view(full.shape[0] // OUTPUTS, OUTPUTS, full.shape[1] // INPUTS, INPUTS)
    return blocks.transpose(1, 2).contiguous()


def rows_of(packed: Tensor, inputs: int, rows: Tensor) -> Tensor:
    """Returns outputs `rows` (n,) int64 of a packed weight: int8 (n, inputs)."""
    return packed[rows // OUTPUTS, :, rows % OUTPUTS].flatten(1)[:, :inputs]


def round_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds rows of x (rows, in) to integers of so many bits, in float64; returns them and their scales (rows, 1)
    float32, which are not finite where the row is not."""
    limit = LIMITS[bits]
    top = x.float().abs().amax(dim=1, keepdim=True)
    # A tensor divided by a tensor: `limit / top` would round twice.
    inverse = torch.where(top > SMALLEST, torch.full_like(top, limit) / top, 0.0)
    integers = (x.float() * inverse).round().clamp(-limit, limit).nan_to_num(0.0)
    return integers.double(), torch.where(top.isfinite(), top / torch.full_like(top, limit), torch.nan)


class Int8Linear:
    """y = act(norm(x) W^T + b) + add, over a packed weight."""

    def __init__(
        self,
        packed: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        inputs: int,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """`packed`: from `pack`; `scale`, `bias`: (out,) float32. `norm_weight`, `norm_bias` (in,) float32, `eps`: of a
        layer norm of each row before it is rounded; without a weight there is none."""
        self.packed, self.scale, self.bias, self.inputs = packed, scale, bias, inputs
        self.norm_weight, self.norm_bias, self.eps = norm_weight, norm_bias, eps

    def __call__(self, x: Tensor, out: Tensor, add: Tensor | None, gelu: bool, bits: int) -> None:
        """x (..., in) float32 or bf16; out (..., out) of the same, or float32; add (..., out) of x's, or None."""
        x = x.reshape(-1, self.inputs)
        if self.norm_weight is not None:
            x = F.layer_norm(x.float(), (self.inputs,), self.norm_weight, self.norm_bias, self.eps)
        integers, row_scale = round_rows(x, bits)
        outputs = torch.arange(len(self.scale), device=x.device)
        # Exact: float64 represents all integers up to 2^53.
        sums = integers @ rows_of(self.packed, self.inputs, outputs).double().T
        y = sums.float() * (row_scale * self.scale)
        if self.bias is not None:
            y = y + self.bias
        if gelu:
            y = F.gelu(y)
        if add is not None:
            y = y + add.reshape(y.shape).float()
        out.copy_(y.view(out.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = (self.packed, self.scale, self.bias, self.norm_weight, self.norm_bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
