"""Subsampling of mel spectrograms to encoder frames in streaming FastConformers: causal strided convolutions."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.models.asr.nemo.lstm_transducer import Tools
from asr_serve.models.interfaces import State, StateSpec

Count = TypeVar("Count", int, Tensor)


class Subsampling:
    """Convolutions of three by three with stride two; those after the first are depthwise, followed by a pointwise
    one.

    Each reads one frame of the past beside its input. Before the session and after its end every layer's input is
    zero, rather than the previous layer's output for zeros.

    In      mel (n, factor * frames, bins) float32: from frame factor * (seen - 1) + 1 of the session on
            seen (n,) int64: encoder frames before; counts (n,) int64: mel frames of the session; rows of the state
    Out     (n, frames, width)
    State   stem.*: the last frame at the input of each layer
    Source  arXiv:2305.05084; numbers match NeMo's ConvSubsampling, causal dw_striding, with lengths

    tools   as in LstmTransducer; tensors are encoder.pre_encode.*
    scale   factor of the output
    """

    def __init__(self, tools: Tools, *, factor: int, bins: int, channels: int, width: int, scale: float) -> None:
        get, put, linear = tools
        self.factor, self.channels = factor, channels
        layers = factor.bit_length() - 1
        self.bins = [bins]
        for _ in range(layers):
            self.bins.append(self.bins[-1] // 2 + 1)

        def both(index: int) -> tuple[Tensor, Tensor]:
            return get(f"encoder.pre_encode.conv.{index}.weight"), get(f"encoder.pre_encode.conv.{index}.bias")

        # NeMo's sequence: convolution, ReLU, then triples of depthwise, pointwise, ReLU. The first stays in
        # float32: log-mel has a wide range, and the product is small.
        first, *depthwise = (both(i) for i in (0, *range(2, 3 * layers - 1, 3)))
        self.convolutions = [
            (put(first[0], torch.float32), put(first[1], torch.float32)),
            *((put(weight, None), put(bias, None)) for weight, bias in depthwise),
        ]
        self.dtype = self.convolutions[-1][0].dtype
        self.pointwise = [
            linear(weight.flatten(1), bias) for weight, bias in (both(i) for i in range(3, 3 * layers, 3))
        ]
        out = get("encoder.pre_encode.out.weight").view(width, channels, self.bins[-1])
        out = out.transpose(1, 2).flatten(1)  # channels are last here
        self.out = linear(out * scale, get("encoder.pre_encode.out.bias") * scale)

    def counts(self, mels: Count) -> list[Count]:
        """Returns the frames at the input of each layer, and after the last, for that many mel frames."""
        counts = [mels]
        for _ in self.convolutions:
            counts.append(counts[-1] // 2 + 1)
        return counts

    def first(self, layer: int, seen: Tensor) -> Tensor:
        """Returns the index in the session of the first frame that a chunk adds to a layer."""
        stride = self.factor >> layer
        return seen * stride - (stride - 1)

    def state(self) -> dict[str, StateSpec]:
        specs = {"stem.0": StateSpec((self.bins[0], 1))}
        for layer in range(1, len(self.convolutions)):
            specs[f"stem.{layer}"] = StateSpec((self.bins[layer], self.channels), self.dtype)
        return specs

    def __call__(self, mel: Tensor, seen: Tensor, counts: Tensor, rows: Tensor, tails: State) -> Tensor:
        x, after = mel[..., None], self.counts(counts)
        for layer, (weight, bias) in enumerate(self.convolutions):
            n, steps, bins, channels = x.shape
            wide = x.new_zeros(n, steps + 1, bins + 3, channels)  # in frequency: two zeros below, one above
            tail = tails[f"stem.{layer}"]
            wide[:, 0, 2:-1], wide[:, 1:, 2:-1] = tail[rows], x
            tail[rows] = x[:, -1]
            x = F.conv2d(wide.permute(0, 3, 1, 2), weight, bias, stride=2, groups=channels)
            x = x.permute(0, 2, 3, 1).contiguous().to(self.dtype)
            if layer:
                x = self.pointwise[layer - 1](x)
            frame = self.first(layer + 1, seen)[:, None] + torch.arange(x.shape[1], device=x.device)
            inside = (frame >= 0) & (frame < after[layer + 1][:, None])
            # A product: on a CPU a mask costs five times as much.
            x = F.relu(x, inplace=True).mul_(inside[:, :, None, None].to(x.dtype))
        hidden: Tensor = self.out(x.flatten(2))
        return hidden
