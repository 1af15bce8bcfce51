"""The CPU's products over weights of 8 bits, and which arithmetic each shape of them gets.

Weights are int8 with one scale for each output; nothing else of them is kept. Activations are integers too while
they are multiplied: of 16 bits (`int8`: only the weights lose anything), or of 8 (`dynamic`), where that was
measured faster. Sums are whole numbers in both, so that a row comes out the same in any batch.
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
"""Rows that a shape is timed with: one caller's decoding step, many callers', and an encode batch."""
ROUNDS = 5
GAIN = 1.15
"""How many times faster 8-bit activations must be than 16-bit ones, over all probes, to be worth their rounding.
Between what processors with instructions for them gain and what others do: noise does not turn a choice over."""


SHAPES = ((288, 864), (288, 288), (1_152, 288), (288, 32_768), (384, 1_536), (1_536, 384), (512, 2_048))
"""Inputs and outputs of common products, for whoever asks before a model is there: Moonshine tiny, Whisper tiny
and base."""


class ActivationBits(NamedTuple):
    """What a shape gets, and why."""

    bits: int
    gain: float
    """16-bit activations' time by 8-bit ones', the geometric mean over PROBES."""


class Int8Selector:
    """Which activations a product of a shape gets. Timed once for each shape: in the calling thread alone and by
    its own clock, which others that use the machine are not on."""

    def __init__(self, kernels: ModuleType, threads: int) -> None:
        """`threads`: those that the calling thread is to have again afterwards."""
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
            for _ in range(ROUNDS):  # turn about: whatever disturbs meets both
                for bits, taken in seconds.items():
                    taken.append(_timed(partial(product, x, out, None, False, bits)))
            gain *= min(seconds[16]) / min(seconds[8])
        gain **= 1 / len(PROBES)
        return ActivationBits(8 if gain >= GAIN else 16, gain)

    def shapes(self) -> dict[str, str]:
        """`288x864` (inputs x outputs) -> which activations, and why."""
        return {
            f"{inputs}x{outputs}": f"{choice.bits}-bit activations, 8-bit ones are {choice.gain:.1f} x as fast"
            for (inputs, outputs), choice in sorted(self.choices.items())
        }

    def describe(self) -> str:
        """`8-bit activations for 12 of 12 shapes, 1.6 to 1.9 x faster`."""
        chosen = [choice.gain for choice in self.choices.values() if choice.bits == 8]
        told = f"8-bit activations for {len(chosen)} of {len(self.choices)} shapes"
        return f"{told}, {min(chosen):.1f} to {max(chosen):.1f} x faster" if chosen else told


def _timed(call: Callable[[], None]) -> float:
    call()
    start = time.thread_time()
    call()
    return time.thread_time() - start


class CpuInt8Linear:
    """Linear over a weight of 8 bits, with GELU and the sum fused in."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: ModuleType,
        bits: int,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """weight (out, in), bias (out,) in any float dtype; bits of the activations: 8 or 16. `out_dtype`: of what
        comes out, that of x unless told."""
        self.outputs, self.inputs = weight.shape
        self.bits, self.out_dtype = bits, out_dtype
        integers, self.scale = int8_reference.quantise(weight)
        self.packed = int8_reference.pack(integers)
        bias = None if bias is None else bias.float().contiguous()
        self.product = kernels.Int8Linear(self.packed, self.scale, bias, self.inputs)

    @property
    def nbytes(self) -> int:
        held: int = self.product.nbytes
        return held

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=self.out_dtype or x.dtype)
        self.product(x.contiguous(), out, None if add is None else add.contiguous(), gelu, self.bits)
        return out


OUTLYING = 4.0
"""A dimension that reaches so many times further than the middle one makes every vector's step as coarse."""


def outlying(weight: Tensor) -> Tensor | None:
    """By how much each dimension (in,) of vectors `weight` (out, in) is to be divided before they are rounded, so
    that none reaches further than the middle one; None where none does much. Whisper's have one or two that do.

    Source: arXiv:2211.10438, by the weights alone.
    """
    reach = weight.float().abs().amax(dim=0)
    times = reach / reach.median().clamp(min=int8_reference.SMALLEST)
    return times.clamp(min=1.0) if float(times.max()) > OUTLYING else None


class Int8Vocabulary(CpuInt8Linear):
    """A Vocabulary of 8 bits: what is looked up is what is multiplied. Logits come in float32, where near ties
    need no second look."""

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
