"""Int8 products of the CPU, and the choice of arithmetic for each shape.

Weights are int8 with one scale for each output, and exist in no other form. Activations are integers too during
the product: 16-bit (`int8`: only the weights lose precision), or 8-bit (`auto`, `dynamic`), where that was measured
faster. Sums are integers in both, so the result of a row does not depend on its batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.devices.interface import Linear
from asr_serve.devices.product_table import ProductTable, machine_key
from asr_serve.kernels import int8_reference

PROBES = (1, 16, 256)
"""Rows that a shape is timed with: one client's decoding step, many clients', and an encode batch."""
STEP_PROBES, FRAME_PROBES = (1, 8, 64), (256, 1_024)
"""Rows that layers of decoding steps and of encoder frames are timed with."""
ROUNDS = 5
GAIN = 1.15
"""Least speedup of 8-bit activations, over all probes, that is worth their rounding. It lies between the gains of
processors with and without instructions for them, so that noise does not change a choice."""


SHAPES = ((288, 864), (288, 288), (1_152, 288), (288, 32_768), (384, 1_536), (1_536, 384), (512, 2_048))
"""Inputs and outputs of common products, for callers without a model: Moonshine tiny, Whisper tiny and base."""


class ActivationBits(NamedTuple):
    """Choice for a shape, and its reason."""

    bits: int
    gain: float
    """Time of 16-bit activations over that of 8-bit ones, the geometric mean over PROBES."""


class Int8Selector:
    """Choice of arithmetic for each shape. A shape is timed once on a machine: in the calling thread alone, and by its
    CPU time, which other processes do not affect."""

    def __init__(self, kernels: ModuleType, set_threads: Callable[[int], None], threads: int) -> None:
        """`set_threads`: sets the threads of torch and of the kernels; `threads`: how many to restore afterwards."""
        self.kernels, self.set_threads, self.threads = kernels, set_threads, threads
        self.choices: dict[tuple[int, int], ActivationBits] = {}
        self.layers: dict[str, float] = {}
        """Gain of 8-bit weights and activations for each shape and use of `is_faster`, like `288x864 frames`."""
        self._table: ProductTable | None = None

    def bits(self, inputs: int, outputs: int) -> int:
        shape = inputs, outputs
        if shape not in self.choices:
            self.choices[shape] = self._choose(inputs, outputs)
        return self.choices[shape].bits

    def _choose(self, inputs: int, outputs: int) -> ActivationBits:
        if not self.has_dots:
            return ActivationBits(16, 1.0)  # the same instructions for both
        gain = self._known(f"{inputs}x{outputs} 8-bit to 16-bit rows", partial(self._measure_bits, inputs, outputs))
        return ActivationBits(8 if gain >= GAIN else 16, gain)

    def is_faster(
        self, inputs: int, outputs: int, frames: bool, dtype: torch.dtype, linear: Callable[[Tensor], Linear]
    ) -> bool:
        """Whether 8-bit weights and activations are faster for a layer than `linear`, which makes the layer of a
        weight (out, in) that the device would take otherwise, in `dtype`. `frames`: see interface.LayerUse."""
        if not self.has_dots:
            return False
        shape = f"{inputs}x{outputs} {'frames' if frames else 'steps'}"
        if shape not in self.layers:
            probes = FRAME_PROBES if frames else STEP_PROBES
            name = f"{shape} 8-bit to {str(dtype).removeprefix('torch.')}"
            measure = partial(self._measure_layer, inputs, outputs, probes, dtype, linear)
            self.layers[shape] = self._known(name, measure)
        return self.layers[shape] >= GAIN

    @property
    def quantizes_layers(self) -> bool:
        """Whether 8 bits are faster for any of the layers that `is_faster` was called for."""
        return any(gain >= GAIN for gain in self.layers.values())

    @property
    def has_dots(self) -> bool:
        """Whether the kernels have 8-bit instructions of this CPU; without them 8 bits are never faster."""
        return bool(getattr(self.kernels, "int8_dots", bool)())

    def _known(self, product: str, measure: Callable[[], float]) -> float:
        """Returns the gain in the machine's table, where the product is measured if it is not in it."""
        if self._table is None:
            self._table = ProductTable(
                machine_key(Path(str(self.kernels.__file__)), self.kernels.isa(), self.kernels.int8_isa())
            )

        def measured() -> float:
            self.set_threads(1)
            try:
                return measure()
            finally:
                self.set_threads(self.threads)

        return self._table.gain(product, measured)

    def _measure_bits(self, inputs: int, outputs: int) -> float:
        outputs = min(outputs, MOST_OUTPUTS)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        product = self.kernels.Int8Linear(int8_reference.pack(weight), torch.ones(outputs), None, inputs)

        def calls(rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
            x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
            return partial(product, x, out, None, False, 16), partial(product, x, out, None, False, 8)

        return _gain(PROBES, calls)

    def _measure_layer(
        self, inputs: int, outputs: int, probes: Sequence[int], dtype: torch.dtype, linear: Callable[[Tensor], Linear]
    ) -> float:
        weight = torch.randn(min(outputs, MOST_OUTPUTS), inputs)
        plain, quantized = linear(weight), CpuInt8Linear(weight, None, self.kernels, 8)

        def calls(rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
            x = torch.randn(rows, inputs).to(dtype)
            return partial(plain, x), partial(quantized, x)

        return _gain(probes, calls)

    def shapes(self) -> dict[str, str]:
        """Returns the choice and its reason by shape, `288x864` (inputs x outputs)."""
        return {
            f"{inputs}x{outputs}": f"{choice.bits}-bit activations, 8-bit ones are {choice.gain:.1f} x as fast"
            for (inputs, outputs), choice in sorted(self.choices.items())
        }

    def describe(self) -> str:
        """Returns a summary like `8-bit activations for 12 of 12 shapes, 1.6 to 1.9 x faster`."""
        gains = self.layers.values() if self.layers else [choice.gain for choice in self.choices.values()]
        chosen = [gain for gain in gains if gain >= GAIN]
        summary = f"8-bit activations for {len(chosen)} of {len(gains)} shapes"
        return f"{summary}, {min(chosen):.1f} to {max(chosen):.1f} x faster" if chosen else summary


MOST_OUTPUTS = 4_096
"""Outputs of a product that is timed: as many behave as many more do, and take less time."""


def _gain(probes: Sequence[int], calls: Callable[[int], tuple[Callable[[], object], Callable[[], object]]]) -> float:
    """Geometric mean, over numbers of rows, of the time of the first of `calls` over that of the second."""
    gain = 1.0
    for rows in probes:
        pair = calls(rows)
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(ROUNDS):  # alternating: disturbances affect both
            for call, durations in zip(pair, seconds, strict=True):
                durations.append(_timed(call))
        gain *= max(min(seconds[0]), 1e-9) / max(min(seconds[1]), 1e-9)
    return float(gain ** (1 / len(probes)))


def _timed(call: Callable[[], object]) -> float:
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
