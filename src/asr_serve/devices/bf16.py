"""Products of the CPU over bf16 weights that decoders multiply the few rows of a step with.

oneDNN's, which all other layers use, read weights at two thirds of the memory's speed where rows are few, and sum in
an order that depends on their number.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.huge_pages import in_huge_pages
from asr_serve.kernels import bf16_reference


def fits(kernels: ModuleType, weight: Tensor) -> bool:
    """Returns whether the CPU has products of bf16, and they take a weight (out, in)."""
    return (
        hasattr(kernels, "bf16_products") and kernels.bf16_products() and weight.shape[1] % bf16_reference.INPUTS == 0
    )


class CpuBf16Linear:
    """Linear over a packed bf16 weight, with the sum fused in."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: ModuleType, out_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """`weight` (out, in), `bias` (out,) in any float dtype; `out_dtype`: of the result, bf16 or float32."""
        self.outputs, self.out_dtype = weight.shape[0], out_dtype
        self.packed = in_huge_pages(bf16_reference.pack(weight))
        padded = None if bias is None else F.pad(bias.float(), (0, -self.outputs % bf16_reference.OUTPUTS))
        self.product = kernels.Bf16Linear(self.packed.view(torch.int16), padded, self.outputs)

    @property
    def nbytes(self) -> int:
        nbytes: int = self.product.nbytes
        return nbytes

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=self.out_dtype)
        if gelu:
            self.product(x.contiguous(), out, None)
            out = F.gelu(out)
            return out if add is None else out + add
        self.product(x.contiguous(), out, None if add is None else add.contiguous())
        return out


class CpuBf16GatedLinear:
    """GatedLinear over packed bf16 weights, the gate and its counterpart in one product."""

    def __init__(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: str, kernels: ModuleType
    ) -> None:
        self.outputs = gate.shape[0]
        packed = in_huge_pages(bf16_reference.pack_gates(gate, up)).view(torch.int16)
        bias = None
        if biases is not None:
            size = bf16_reference.OUTPUTS
            bias = torch.stack([F.pad(each.float(), (0, -self.outputs % size)).view(-1, size) for each in biases], 1)
            bias = bias.flatten()
        self.product = kernels.Bf16Linear(packed, bias, self.outputs, activation)

    @property
    def nbytes(self) -> int:
        nbytes: int = self.product.nbytes
        return nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.outputs)
        self.product(x.contiguous(), out, None)
        return out


class Bf16Vocabulary(CpuBf16Linear):
    """VocabularyMatrix of bf16 weights: lookup and product use the same numbers. Logits are float32, so near ties need
    no recomputation."""

    weight: Tensor | None = None

    def __init__(self, weight: Tensor, kernels: ModuleType) -> None:
        super().__init__(weight, None, kernels, torch.float32)

    def __len__(self) -> int:
        return self.outputs

    def embed(self, tokens: Tensor) -> Tensor:
        return bf16_reference.rows_of(self.packed, tokens)
