"""Tensors of a Whisper checkpoint, whose heads are extended by dimensions for the number of positions a key stands
for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt


class WhisperTensors:
    """Tensors of a checkpoint by name, laid out for the device.

    Heads get `extra` dimensions. In the last one every query is 1, and a key that stands for n positions holds
    log(n) divided by the scale of the scores: so it weighs as much as n equal keys in any kernel.
    """

    def __init__(self, tensors: dict[str, Tensor], device: Device) -> None:
        self.device = device
        self.extra = 1 if device.torch_device.type == "cpu" else 8  # fused kernels elsewhere need multiples of 8
        # Some checkpoints omit the prefix.
        self.tensors = {key.removeprefix("model."): value for key, value in tensors.items()}

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor model.{name}", "a Whisper checkpoint has it")
        return self.tensors[name].float()

    def vector(self, name: str) -> Tensor:
        return self.get(name).to(self.device.torch_device, self.device.dtype)

    def norm(self, name: str) -> tuple[Tensor, Tensor]:
        return self.vector(f"{name}.weight"), self.vector(f"{name}.bias")

    def linear(self, name: str) -> Linear:
        return self.device.linear(self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def heads(self, heads: int, *names: str, scale: float = 1.0) -> Linear:
        """Stacks queries, keys and values of the same input into one extended linear layer; queries are multiplied
        by `scale`. Keys have no bias."""
        weights, biases = [], []
        for name in names:
            weight = self.get(f"{name}.weight")
            bias = weight.new_zeros(len(weight)) if name.endswith("k_proj") else self.get(f"{name}.bias")
            factor, extra_bias = (scale, 1.0) if name.endswith("q_proj") else (1.0, 0.0)
            by_head = (weight * factor).view(heads, -1, weight.shape[1])
            weights.append(F.pad(by_head, (0, 0, 0, self.extra)).flatten(0, 1))
            biases.append(F.pad((bias * factor).view(heads, -1), (0, self.extra)))
            biases[-1][:, -1] = extra_bias
        return self.device.linear(torch.cat(weights), torch.cat(biases).flatten())

    def out(self, heads: int, name: str) -> Linear:
        """Returns the projection after attention, extended to ignore the extra dimensions."""
        weight = self.get(f"{name}.weight")
        by_head = F.pad(weight.view(len(weight), heads, -1), (0, self.extra))
        return self.device.linear(by_head.flatten(1), self.get(f"{name}.bias"))
