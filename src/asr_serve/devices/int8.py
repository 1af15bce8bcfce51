"""Int8 products of the CPU, and where they are faster.

Weights are int8 with one scale for each output, and exist in no other form. Activations are integers too during the
product: 16-bit (`int8`: only the weights lose precision), or 8-bit (`auto`, `dynamic`). Sums are integers in both, so
the result of a row depends neither on its batch nor on the number of threads.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from asr_serve.devices.interface import LayerNorm
from asr_serve.kernels import int8_reference


def has_dots(kernels: ModuleType) -> bool:
    """Returns whether the kernels have 8-bit instructions of this CPU (VNNI, Arm's dot product)."""
    return bool(getattr(kernels, "int8_dots", bool)())


def eight_bits_are_faster(kernels: ModuleType, dtype: torch.dtype, bf16_matrices: bool) -> bool:
    """Returns whether 8-bit weights and activations are faster than `dtype` for the layers of a model.

    An 8-bit instruction multiplies twice as many numbers as one of bf16, and four times as many as one of float32; an
    instruction for matrices of bf16 (`bf16_matrices`: Intel AMX, Arm) multiplies as many as an 8-bit one or more. So
    the processor decides: all engines on it choose the same, whatever their number of threads and the machine's load,
    and give the same words. bench/roofline.py measures what the choice is worth.
    """
    return has_dots(kernels) and not (dtype == torch.bfloat16 and bf16_matrices)


class CpuInt8Linear:
    """Linear over an int8 weight, with GELU and the sum fused in."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: ModuleType,
        bits: int,
        out_dtype: torch.dtype | None = None,
        norm: LayerNorm | None = None,
    ) -> None:
        """`weight` (out, in), `bias` (out,) in any float dtype; `bits` of the activations: 8 or 16. `out_dtype`:
        of the result, by default that of x. `norm`: of x, without a rounding between it and that to integers."""
        self.outputs, self.inputs = weight.shape
        self.bits, self.out_dtype = bits, out_dtype
        integers, self.scale = int8_reference.quantise(weight)
        self.packed = int8_reference.pack(integers)
        bias = None if bias is None else bias.float().contiguous()
        if norm is None:
            self.product = kernels.Int8Linear(self.packed, self.scale, bias, self.inputs)
        else:
            shift = None if norm.bias is None else norm.bias.float()
            self.product = kernels.Int8Linear(
                self.packed, self.scale, bias, self.inputs, norm.weight.float(), shift, norm.eps
            )

    @property
    def nbytes(self) -> int:
        nbytes: int = self.product.nbytes
        return nbytes

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=self.out_dtype or x.dtype)
        self.product(x.contiguous(), out, None if add is None else add.contiguous(), gelu, self.bits)
        return out


OUTLYING = 4.0
"""Range of a dimension, relative to the median one, from which on it makes the rounding of all vectors coarse."""


def outlying(weight: Tensor) -> Tensor | None:
    """Returns the divisor of each dimension (in,) of `weight` (out, in) before rounding, so that none has a larger
    range than the median one; None where none is much larger. Whisper's vocabularies have one or two that are.

    Source: arXiv:2211.10438, by the weights alone.
    """
    ranges = weight.float().abs().amax(dim=0)
    factors = ranges / ranges.median().clamp(min=int8_reference.SMALLEST)
    return factors.clamp(min=1.0) if float(factors.max()) > OUTLYING else None


class Int8Vocabulary(CpuInt8Linear):
    """VocabularyMatrix of int8 weights: lookup and product use the same integers. Logits are float32, so near ties
    need no recomputation."""

    weight: Tensor | None = None

    def __init__(self, weight: Tensor, kernels: ModuleType, bits: int, dtype: torch.dtype) -> None:
        """`dtype`: of looked-up vectors."""
        self.times = outlying(weight)
        super().__init__(
            weight if self.times is None else weight.float() / self.times, None, kernels, bits, torch.float32
        )
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.times is None else self.times.nbytes)

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        return super().__call__(x if self.times is None else x.float() * self.times, gelu=gelu, add=add)

    def __len__(self) -> int:
        return self.outputs

    def embed(self, tokens: Tensor) -> Tensor:
        vectors = int8_reference.rows_of(self.packed, self.inputs, tokens)
        vectors = vectors * self.scale[tokens][:, None]
        return (vectors if self.times is None else vectors * self.times).to(self.dtype)
