"""Products of bf16 rows with packed bf16 weights in plain torch: the oracle of `bf16.cpp`.

A number is one float32 sum over its inputs, so the result of a row does not depend on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.kernels.decoder_reference import activate

OUTPUTS, INPUTS = 16, 2
"""Outputs and inputs of a block of a packed weight."""


def pack(weight: Tensor) -> Tensor:
    """Packs (out, in) as the kernels read it: bf16 (out / 16, in / 2, 16, 2), outputs padded with zeros; `in` is
    even."""
    full = F.pad(weight.bfloat16(), (0, 0, 0, -weight.shape[0] % OUTPUTS))
    blocks = full.view(-1, OUTPUTS, full.shape[1] // INPUTS, INPUTS)
    return blocks.transpose(1, 2).contiguous()


def pack_gates(gate: Tensor, up: Tensor) -> Tensor:
    """Packs the matrices of a gate and of its counterpart, both (out, in): their blocks in turn."""
    blocks = torch.stack([pack(gate), pack(up)], dim=1)
    return blocks.flatten(0, 1).contiguous()


def rows_of(packed: Tensor, rows: Tensor) -> Tensor:
    """Returns outputs `rows` (n,) int64 of a packed weight: bf16 (n, inputs)."""
    return packed[rows // OUTPUTS, :, rows % OUTPUTS].flatten(1)


class Bf16Linear:
    """y = x W^T + b + add, or act(gate) * counterpart + add, over a packed weight."""

    def __init__(self, packed: Tensor, bias: Tensor | None, outputs: int, activation: str = "") -> None:
        """`packed`: from `pack`, or with an activation (silu, gelu_tanh) from `pack_gates`, as int16; `bias`: (blocks *
        16,) float32."""
        self.packed, self.bias, self.outputs, self.activation = packed.view(torch.bfloat16), bias, outputs, activation

    def __call__(self, x: Tensor, out: Tensor, add: Tensor | None) -> None:
        """x (..., in) bf16; out (..., out) bf16 or float32; add (..., out) bf16, or None."""
        weight = self.packed.transpose(1, 2).flatten(2).flatten(0, 1).float()
        y = x.float() @ weight.T
        if self.bias is not None:
            y = y + self.bias
        if self.activation:
            gate, up = y.view(*y.shape[:-1], -1, 2, OUTPUTS).unbind(-2)
            y = (activate(gate, self.activation) * up).flatten(-2)
        y = y[..., : self.outputs]
        out.copy_(y if add is None else y + add.float())
