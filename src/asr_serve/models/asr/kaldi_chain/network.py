"""Compiled nnet3 network over many sessions, block by block of frames, with the left context of its layers in state.

Frames are the first dimension and sessions the second, so that the frames at an offset are one slice of memory and
need no copy. A layer runs only at the frames that the output needs: every one near the input, every third above
the layer from which offsets are multiples of three. Layers see ahead of the output by their right context.

One plan serves two ways to compute: tensor operations, on every device, and on the CPU one native call a block while
sessions are few: then the start of each operation costs more than the operation. With bf16, on a processor that
multiplies it (Intel AMX, AVX512-BF16), it is one call for any number of sessions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.kaldi_chain.nnet3 import INPUT

BLOCK_OUTPUTS = 16
"""Outputs of a block of a packed weight."""
TILE = 32
"""Outputs and inputs to whose multiples a weight for the processor's bf16 products is padded."""
NATIVE_SESSIONS = {torch.float32: 32, torch.bfloat16: 3}
"""Sessions of a step up to which the native call is faster, by the dtype of weights. Where the processor does not
multiply bf16, the call widens the numbers, and with many rows oneDNN's products win; where it does, the call is faster
for any number of sessions."""


class LayerSpec(msgspec.Struct, frozen=True):
    """Layer of a network, as config.json has it; its tensors are layers.<name>.weight, .bias and .ivector."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    """Layers, or `input`, and the offsets in frames at which they are read."""
    width: int
    scales: tuple[float, ...] = ()
    """Factor of each input of a weighted sum; () for a matrix, whose columns are the inputs end to end."""
    relu: bool = False
    ivector: bool = False
    """Whether the matrix of the layer has columns for the i-vector, in a tensor of their own."""


class _Read(NamedTuple):
    """Frames of a layer that another reads: those up to `lag` before the newest, every `step`-th."""

    source: str
    lag: int
    step: int

    def of(self, frames: Tensor, count: int) -> Tensor:
        end = len(frames) - self.lag
        return frames[end - (count - 1) * self.step - 1 : end : self.step]


class _Plan(NamedTuple):
    """Places of a layer's frames."""

    stride: int
    """Input frames from one of its frames to the next."""
    ahead: int
    """Input frames by which its newest frame lies after the newest output."""
    reads: tuple[_Read, ...]
    history: int
    """Frames that the next block reads."""


class _Group(NamedTuple):
    """Product of a layer's matrix with some of its inputs."""

    linear: Linear
    reads: tuple[_Read, ...]
    ivector: bool
    """Whether the i-vector follows them."""
    dtype: torch.dtype
    """Dtype of the product."""


class ChainNetwork:
    """Layers of a chain model.

    A block of output frames takes `subsampling` input frames for each. Its input frames end `right_frames` after
    its last output frame; its first output depends on `left_frames` before it. `prime` makes the state of a session
    from the frames that precede its first block, of which there are `priming_frames` at least.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        tensors: Mapping[str, Tensor],
        device: Device,
        *,
        input_width: int,
        ivector_width: int,
        subsampling: int,
    ) -> None:
        self.device, self.subsampling = device, subsampling
        self.layers = tuple(layers)
        self.output_width = self.layers[-1].width if self.layers else 0
        widths = {INPUT: input_width} | {layer.name: layer.width for layer in self.layers}
        _validate(self.layers, widths, tensors, ivector_width)
        self._plans, self.left_frames = _plan(self.layers, subsampling)
        self.right_frames = self._plans[INPUT].ahead
        self.input_history = self._plans[INPUT].history
        """Input frames before a block's that it reads too."""
        self._groups = {
            layer.name: _groups(layer, self._plans[layer.name].reads, tensors, device, widths)
            for layer in self.layers
            if not layer.scales
        }
        self._state: dict[str, slice] = {}
        """Part of a session's state that holds each layer's history."""
        start = 0
        for layer in self.layers:
            size = self._plans[layer.name].history * layer.width
            if size:
                self._state[layer.name] = slice(start, start + size)
            start += size
        self.state_width = start
        readers = [source for layer in self.layers for source, _ in layer.inputs]
        self._temporary = {
            name for name, plan in self._plans.items() if readers.count(name) == 1 and not plan.history
        } - {INPUT}
        """Layers that one other reads, in the same step: it may write over them."""
        self._primed = self._needed_for_state()
        self._tiled = False
        self._native = self._compile(tensors, input_width, ivector_width)
        limit = sys.maxsize if self._tiled else NATIVE_SESSIONS[device.dtype]
        self.native_sessions = 0 if self._native is None else limit
        """Sessions of a step up to which it is one native call."""

    @property
    def priming_frames(self) -> int:
        """Input frames before a session's first block from which its state is made."""
        frames = self.left_frames + self.right_frames
        return -(-frames // self.subsampling) * self.subsampling

    def initial_state(self, sessions: int) -> Tensor:
        """State of sessions (sessions, state_width) before their first frame."""
        return torch.zeros(sessions, self.state_width, dtype=self.device.dtype, device=self.device.torch_device)

    def prime(self, frames: Tensor, ivectors: Tensor) -> Tensor:
        """State after the frames that precede the first block.

        Args:
            frames: (input_history + n * subsampling, sessions, input width) float32, n * subsampling at least
                priming_frames; the last of them stands before those that the first step adds.
            ivectors: (sessions, i-vector width) float32.

        Returns: (sessions, state_width) in the device's dtype.
        """
        state = self.initial_state(frames.shape[1])
        self._run(frames, ivectors, ivectors, state, self._primed)
        return state

    def step(self, frames: Tensor, before: Tensor, after: Tensor, state: Tensor, block_frames: int) -> Tensor:
        """Scores of one block, and the state after it, in place.

        Args:
            frames: (input_history + block_frames, sessions, input width) float32; the last of them `right_frames`
                after the block's last output frame.
            before, after: (sessions, i-vector width) float32: i-vectors of the input frames before the newest
                multiple of block_frames, and from there on.
            state: (sessions, state_width).

        Returns: (block_frames / subsampling, sessions, output_width).
        """
        assert len(frames) == self.input_history + block_frames
        scores = self._run(frames, before, after, state, None)
        assert scores is not None
        return scores

    def _run(
        self, frames: Tensor, before: Tensor, after: Tensor, state: Tensor, only: frozenset[str] | None
    ) -> Tensor | None:
        block_frames, sessions = len(frames) - self.input_history, frames.shape[1]
        if 0 < sessions <= self.native_sessions:
            return self._run_native(frames, before, after, state, block_frames, only is None)
        values = {INPUT: frames}
        made: Tensor | None = None
        for layer in self.layers:
            if only is not None and layer.name not in only:
                continue
            plan = self._plans[layer.name]
            count = block_frames // plan.stride
            part = self._state.get(layer.name)
            whole: Tensor | None = None
            if part is not None:
                whole = torch.empty(plan.history + count, sessions, layer.width, dtype=state.dtype, device=state.device)
                whole[: plan.history] = state[:, part].view(sessions, plan.history, -1).transpose(0, 1)
            into = None if whole is None else whole[plan.history :]
            if layer.scales:
                made = self._sum(layer, plan, values, count, into)
            else:
                made = self._multiply(layer, plan, values, count, block_frames, before, after, into)
            values[layer.name] = made if whole is None else whole
            if whole is not None and part is not None:
                state[:, part].view(sessions, plan.history, -1).copy_(whole[count:].transpose(0, 1))
        return made

    def _run_native(
        self, frames: Tensor, before: Tensor, after: Tensor, state: Tensor, block_frames: int, scored: bool
    ) -> Tensor | None:
        assert self._native is not None
        scores = None
        if scored:
            shape = block_frames // self.subsampling, frames.shape[1], self.output_width
            scores = torch.empty(shape, dtype=self.device.dtype)
        rows = state.contiguous()
        self._native.run(frames.contiguous(), before.contiguous(), after.contiguous(), rows, scores)
        if rows is not state:
            state.copy_(rows)
        return scores

    def _compile(self, tensors: Mapping[str, Tensor], input_width: int, ivector_width: int) -> Any:
        """Returns the plan for the native call, with its weights; None where there is no such call."""
        kernel = self.device.kernels.FrameLayers
        if kernel is None or self.device.quantize != "none":
            return None
        native = kernel(input_width, ivector_width, self.subsampling, self.input_history)
        # Beside tiles, frames of layers are bf16: float32 matrices must read the input alone, and others none of it.
        exact = [not layer.scales and _exact_dtype(layer) is not None for layer in self.layers]
        apart = all(
            (source == INPUT) == reads
            for layer, reads in zip(self.layers, exact, strict=True)
            for source, _ in layer.inputs
        )
        self._tiled = tiles = apart and self.device.dtype == torch.bfloat16 and self.device.kernels.has_tiles()
        numbers = {name: number for number, name in enumerate([INPUT, *(layer.name for layer in self.layers)])}
        for layer in self.layers:
            plan = self._plans[layer.name]
            reads = [(numbers[read.source], read.lag, read.step) for read in plan.reads]
            weight = bias = None
            if not layer.scales:
                dtype = _exact_dtype(layer) or self.device.dtype
                tiled = tiles and dtype == torch.bfloat16
                weight = _packed(layer, tensors, dtype, tiled)
                padding = -layer.width % (TILE if tiled else BLOCK_OUTPUTS)
                bias = F.pad(tensors[f"layers.{layer.name}.bias"].float(), (0, padding))
            places = layer.width, plan.stride, plan.ahead, plan.history, layer.relu, layer.name in self._primed
            native.add(*places, reads, layer.scales, weight, bias, layer.ivector)
        assert native.state_width == self.state_width
        return native

    def _sum(self, layer: LayerSpec, plan: _Plan, values: dict[str, Tensor], count: int, into: Tensor | None) -> Tensor:
        parts = [read.of(values[read.source], count) for read in plan.reads]
        total: Tensor
        if len(parts) == 2 and layer.scales[1] == 1:
            if into is None and plan.reads[1].source in self._temporary and plan.reads[1].step == 1:
                total = parts[1].add_(parts[0], alpha=layer.scales[0])
            else:
                total = torch.add(parts[1], parts[0], alpha=layer.scales[0], out=into)
        else:
            total = torch.mul(parts[0], layer.scales[0], out=into)
            for part, scale in zip(parts[1:], layer.scales[1:], strict=True):
                total.add_(part, alpha=scale)
        return total.clamp_(min=0) if layer.relu else total

    def _multiply(
        self,
        layer: LayerSpec,
        plan: _Plan,
        values: dict[str, Tensor],
        count: int,
        block_frames: int,
        before: Tensor,
        after: Tensor,
        into: Tensor | None,
    ) -> Tensor:
        total: Tensor | None = None
        for linear, reads, ivector, dtype in self._groups[layer.name]:
            parts = [read.of(values[read.source], count) for read in reads]
            if ivector:
                newest = block_frames - self.subsampling + plan.ahead
                early = _frames_before(newest, plan.stride, count, block_frames)
                spoken = [before.expand(early, -1, -1), after.expand(count - early, -1, -1)]
                parts.append(torch.cat(spoken))
            x = (parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=-1)).to(dtype)
            total = linear(x) if total is None else linear(x, add=total)
        assert total is not None
        total = total.to(self.device.dtype)
        if into is None:
            return total.clamp_(min=0) if layer.relu else total
        if layer.relu:
            return torch.clamp(total, min=0, out=into)
        return into.copy_(total)

    def _needed_for_state(self) -> frozenset[str]:
        """Layers whose frames a session's state holds or is computed from."""
        needed: set[str] = set()
        for layer in reversed(self.layers):
            if layer.name in needed or layer.name in self._state:
                needed |= {layer.name, *(source for source, _ in layer.inputs)}
        return frozenset(needed)


def _frames_before(newest: int, stride: int, count: int, block_frames: int) -> int:
    """Number of a layer's `count` frames, the last at position `newest`, that lie before the newest multiple of
    `block_frames`."""
    boundary = newest // block_frames * block_frames
    return sum(newest - i * stride < boundary for i in range(count))


def _plan(layers: Sequence[LayerSpec], subsampling: int) -> tuple[dict[str, _Plan], int]:
    """Places of each layer's frames, and how many input frames before an output frame it depends on."""
    # Frames of each layer that output frame 0 depends on, and those that are computed beside them.
    names = [INPUT, *(layer.name for layer in layers)]
    needed: dict[str, set[int]] = {name: set() for name in names}
    computed: dict[str, set[int]] = {name: set() for name in names}
    needed[layers[-1].name] = {0}
    strides, aheads = {}, {}
    for name, layer in reversed([(INPUT, None), *((layer.name, layer) for layer in layers)]):
        frames = needed[name] | computed[name]
        if not frames:
            raise WeightsCorrupt(f"the layer {name}, which nothing reads", "layers that the last one depends on")
        ahead = aheads[name] = max(frames)
        stride = strides[name] = subsampling if len({frame % subsampling for frame in frames}) == 1 else 1
        beside = {ahead - i for i in range(0, subsampling, stride)}
        for source, offset in layer.inputs if layer is not None else ():
            needed[source] |= {frame + offset for frame in needed[name]}
            computed[source] |= {frame + offset for frame in beside | computed[name]}
    plans, histories = {}, dict.fromkeys(needed, 0)
    for layer in layers:
        reads = []
        for source, offset in layer.inputs:
            step = strides[layer.name] // strides[source]
            lag = (aheads[source] - aheads[layer.name] - offset) // strides[source]
            reads.append(_Read(source, lag, step))
            histories[source] = max(histories[source], lag - step + 1)
        plans[layer.name] = tuple(reads)
    return (
        {name: _Plan(strides[name], aheads[name], plans.get(name, ()), histories[name]) for name in needed},
        -min(needed[INPUT]),
    )


def _groups(
    layer: LayerSpec, reads: Sequence[_Read], tensors: Mapping[str, Tensor], device: Device, widths: Mapping[str, int]
) -> list[_Group]:
    """Products of a layer's matrix. Narrow inputs are copied end to end for one product; wide ones have a product
    each, which reads them where they are."""
    weight, bias = tensors[f"layers.{layer.name}.weight"], tensors[f"layers.{layer.name}.bias"]
    columns = list(torch.split(weight, [widths[source] for source, _ in layer.inputs], dim=1))
    exact = _exact_dtype(layer)
    dtype = exact or device.dtype

    def linear(parts: Iterable[Tensor], bias: Tensor | None) -> Linear:
        matrix = torch.cat(list(parts), dim=1).float().to(device.torch_device)
        return device.linear(matrix, None if bias is None else bias.float().to(device.torch_device), exact)

    if layer.ivector or weight.shape[1] <= layer.width:
        spoken = [tensors[f"layers.{layer.name}.ivector"]] if layer.ivector else []
        return [_Group(linear([*columns, *spoken], bias), tuple(reads), layer.ivector, dtype)]
    return [
        _Group(linear([part], None if i else bias), (read,), False, dtype)
        for i, (part, read) in enumerate(zip(columns, reads, strict=True))
    ]


def _exact_dtype(layer: LayerSpec) -> torch.dtype | None:
    """Returns float32 for a matrix that needs it. Features and i-vectors are large, and differences between them are
    small: bf16's 8 bits are too few."""
    return torch.float32 if layer.ivector or any(source == INPUT for source, _ in layer.inputs) else None


def _packed(layer: LayerSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, tiled: bool) -> Tensor:
    """Matrix of a layer as the native call reads it, padded with zeros: (outputs / 16, inputs, 16), and for matrix
    tiles (outputs / 16, inputs / 2, 16, 2)."""
    matrix = tensors[f"layers.{layer.name}.weight"].float()
    if layer.ivector:
        matrix = torch.cat([matrix, tensors[f"layers.{layer.name}.ivector"].float()], dim=1)
    if tiled:
        matrix = F.pad(matrix, (0, -matrix.shape[1] % TILE, 0, -layer.width % TILE)).to(dtype)
        return matrix.view(-1, BLOCK_OUTPUTS, matrix.shape[1] // 2, 2).transpose(1, 2).contiguous()
    matrix = F.pad(matrix, (0, 0, 0, -layer.width % BLOCK_OUTPUTS)).to(dtype)
    return matrix.view(-1, BLOCK_OUTPUTS, matrix.shape[1]).transpose(1, 2).contiguous()


def _validate(
    layers: Sequence[LayerSpec], widths: Mapping[str, int], tensors: Mapping[str, Tensor], ivector_width: int
) -> None:
    """Raises WeightsCorrupt for layers that do not fit together or tensors that do not fit them."""
    if not layers:
        raise WeightsCorrupt("a network without layers", "one layer at least")
    known = {INPUT}
    for layer in layers:
        unknown = [source for source, _ in layer.inputs if source not in known]
        if unknown or not layer.inputs or layer.name in known:
            raise WeightsCorrupt(f"the layer {layer.name} of {layer.inputs}", "layers that stand before it")
        known.add(layer.name)
        columns = [widths[source] for source, _ in layer.inputs]
        if layer.scales:
            if len(layer.scales) != len(columns) or set(columns) != {layer.width} or layer.ivector:
                raise WeightsCorrupt(f"the sum {layer.name} of {columns} numbers", f"{layer.width} of each, scaled")
            continue
        shapes = {"weight": (layer.width, sum(columns)), "bias": (layer.width,)}
        if layer.ivector:
            shapes["ivector"] = (layer.width, ivector_width)
        for part, shape in shapes.items():
            tensor = tensors.get(f"layers.{layer.name}.{part}")
            if tensor is None or tensor.shape != shape:
                has = "missing" if tensor is None else tuple(tensor.shape)
                raise WeightsCorrupt(f"layers.{layer.name}.{part} is {has}", f"config.json makes it {shape}")
