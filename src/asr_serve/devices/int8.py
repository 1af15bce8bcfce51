"""Int8 products of the CPU, and the choice of arithmetic for each shape.

Weights are int8 with one scale for each output, and exist in no other form. Activations are integers too during
the product: 16-bit (`int8`: only the weights lose precision), or 8-bit (`dynamic`), where that was measured
faster. Sums are integers in both, so the result of a row does not depend on its batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.kernels import int8_reference

PROBES = (1, 16, 256)
"""Rows that a shape is timed with: one client's decoding step, many clients', and an encode batch."""
ROUNDS = 5
GAIN = 1.15
"""Least speedup of 8-bit over 16-bit activations, over all probes, that is worth their rounding. It lies between
the gains of processors with and without instructions for them, so that noise does not change a choice."""


SHAPES = ((288, 864), (288, 288), (1_152, 288), (288, 32_768), (384, 1_536), (1_536, 384), (512, 2_048))
"""Inputs and outputs of common products, for callers without a model: Moonshine tiny, Whisper tiny and base."""


class ActivationBits(NamedTuple):
    """Choice for a shape, and its reason."""

    bits: int
    gain: float
    """Time of 16-bit activations over that of 8-bit ones, the geometric mean over PROBES."""


class Int8Selector:
    """Choice of activation bits for each shape. A shape is timed once: in the calling thread alone, and by its CPU
    time, which other processes do not affect."""

    def __init__(self, kernels: ModuleType, threads: int) -> None:
        """`threads`: number of threads to restore afterwards."""
        self.kernels, self.threads = kernels, threads
        self.choices: dict[tuple[int, int], ActivationBits] = {}

    def bits(self, inputs: int, outputs: int) -> int:
        shape = inputs, outputs
        if shape not in self.choices:
            self.choices[shape] = self._choose(inputs, outputs)
        return self.choices[shape].bits

    def _choose(self, inputs: int, outputs: int) -> ActivationBits:
        if not getattr(self.kernels, "int8_dots", bool)():
            return ActivationBits(16, 1.0)  # the same instructions for both
        self.kernels.set_threads(1)
        try:
            return self._measure(inputs, outputs)
        finally:
            self.kernels.set_threads(self.threads)

    def _measure(self, inputs: int, outputs: int) -> ActivationBits:
        # A few thousand outputs behave as many more do, and take less time.
        outputs = min(outputs, 4_096)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        product = self.kernels.Int8Linear(int8_reference.pack(weight), torch.ones(outputs), None, inputs)
        gain = 1.0
        for rows in PROBES:
            x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
            seconds: dict[int, list[float]] = {16: [], 8: []}
            for _ in range(ROUNDS):  # alternating: disturbances affect both
                for bits, durations in seconds.items():
                    durations.append(_timed(partial(product, x, out, None, False, bits)))
            gain *= min(seconds[16]) / min(seconds[8])
        gain **= 1 / len(PROBES)
        return ActivationBits(8 if gain >= GAIN else 16, gain)

    def shapes(self) -> dict[str, str]:
        """Returns the choice and its reason by shape, `288x864` (inputs x outputs)."""
        return {
            f"{inputs}x{outputs}": f"{choice.bits}-bit activations, 8-bit ones are {choice.gain:.1f} x as fast"
            for (inputs, outputs), choice in sorted(self.choices.items())
        }

    def describe(self) -> str:
        """Returns a summary like `8-bit activations for 12 of 12 shapes, 1.6 to 1.9 x faster`."""
        chosen = [choice.gain for choice in self.choices.values() if choice.bits == 8]
        summary = f"8-bit activations for {len(chosen)} of {len(self.choices)} shapes"
        return f"{summary}, {min(chosen):.1f} to {max(chosen):.1f} x faster" if chosen else summary


def _timed(call: Callable[[], None]) -> float:
    call()
    start = time.thread_time()
    call()
    return time.thread_time() - start


class CpuInt8Linear:
    """Linear over an int8 weight, with GELU and the sum fused in."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: ModuleType, bits: int, out_dtype: torch.dtype | None = None
    ) -> None:
        """`weight` (out, in), `bias` (out,) in any float dtype; `bits` of the activations: 8 or 16. `out_dtype`:
        of the result, by default that of x."""
        self.outputs, self.inputs = weight.shape
        self.bits, self.out_dtype = bits, out_dtype
        integers, self.scale = int8_reference.quantise(weight)
        self.packed = int8_reference.pack(integers)
        bias = None if bias is None else bias.float().contiguous()
        self.product = kernels.Int8Linear(self.packed, self.scale, bias, self.inputs)

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
