"""Light source-filter vocoder: a network shapes the spectra of pulses and noise frame by frame; inverse Fourier
transforms overlap and add.

The sources are pulses at F0, whose phase is carried from chunk to chunk, white noise, and noise modulated by the
pulses, which is breath. For each frame the network predicts the magnitude of every bin for the three sources, a
phase shift of the pulses, and a gain curve within the window, for events shorter than that. Its look-ahead is two
frames, which the pulses under a window need anyway; with the windows' overlap a sample is known four frames after
its own.

Chunks of any size give the same samples, and a whole sentence is one long chunk.

Source   harmonic plus noise: Wang et al. 2019 (arXiv:1904.12088), Engel et al. 2020 (arXiv:2001.04643), HiFTNet
         (arXiv:2309.09493); ConvNeXt at the frame rate and the inverse transform: Vocos (arXiv:2306.00814)
Weights  our own, made by asr_serve_tools/train/vocoder.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.slaney_mel import AROUND_SAMPLES, HIGH_HZ, HOP_SAMPLES, MELS, RATE_HZ, WINDOW_SAMPLES
from asr_serve.audio.features.whisper_log_mel import mel_filters
from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.interfaces import State, StateSpec, Vocoder
from asr_serve.models.registry import VocoderCard

CARDS = (
    VocoderCard(
        name="source-filter-22k",
        task="vocoder",
        kind="source_filter",
        languages=(),
        parameters=3_976_212,
        licence="Apache-2.0",
        source="arXiv:2306.00814, arXiv:1904.12088",
        hub="",
        files=("config.json", "model.safetensors"),
        shipped="models/tts/vocoders/weights/source_filter",
        rate_hz=RATE_HZ,
    ),
)
BINS = WINDOW_SAMPLES // 2 + 1
OVERLAP = WINDOW_SAMPLES // HOP_SAMPLES
AHEAD = 2
"""Look-ahead of the network in frames. The window of a frame ends in the middle of the second frame after it."""
DELAY = AHEAD + 2
"""Delay in frames: the last window over a sample belongs to the second frame after the sample's."""
SOURCE_TAIL = WINDOW_SAMPLES - HOP_SAMPLES
SUM_TAIL = SOURCE_TAIL + HOP_SAMPLES // 2
INPUT_WIDTH = MELS + 2
"""Input of a frame: mel, logarithm of F0, whether it is voiced."""
MIDDLE_HZ = 200.0
LOUDEST = 6.5
"""Limit of a bin, as a natural logarithm; a sine at full scale has 5.5."""
SOURCES = 3
"""Pulses, noise, breath."""
PARTS = SOURCES + 1
"""Outputs of the head for a bin: magnitude for each source, and phase shift of the pulses."""
KNOTS = 16
"""Knots of a gain curve over a window: one curve for the pulses, one for both noises."""
STEEPEST = 3.0
"""Largest distance of a knot from 0, as a natural logarithm."""
EPSILON = 1e-5
VOICED_HZ = 30.0
"""Lowest F0 of voiced frames."""
TOP_HZ = RATE_HZ / 2
BREATH = math.sqrt(128 / 35)
"""Factor that normalizes the power of a squared raised cosine to 1."""
NEAR_PULSE = 3e-4
"""Angle in radians below which the pulse's sum of cosines is taken as their number."""
LEAST = 1e-5


def pulses(f0: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Generates pulses from F0 in Hz of frames (n, 1 + T) and the phase (n, 1) in cycles at the first one's
    middle. Returns samples from there to the last one's middle (n, 256 T), a gain of power 1 that peaks at each
    pulse, and the phase at the end.

    In pieces of any size the samples are the same: the phase is carried. The pulses are all harmonics up to half the
    rate as cosines of equal amplitude; F0 and loudness are linear between frames.
    """
    share = (torch.arange(HOP_SAMPLES, device=f0.device) + 0.5) / HOP_SAMPLES
    voiced = (f0 > VOICED_HZ).float()
    weight_before, weight_after = voiced[:, :-1, None] * (1 - share), voiced[:, 1:, None] * share
    loud = weight_before + weight_after
    height = (f0[:, :-1, None] * weight_before + f0[:, 1:, None] * weight_after) / loud.clamp(min=LEAST)
    height, loud = height.flatten(1), loud.flatten(1)
    cycles = phase + (height.double() / RATE_HZ).cumsum(1)
    half = math.pi * (cycles - cycles.round()).float()
    harmonics = (TOP_HZ / height.clamp(min=VOICED_HZ)).floor()
    # sum of cos(2 h x) for h = 1 .. H = sin((2 H + 1) x) / (2 sin x) - 1/2
    middle = half.abs() < NEAR_PULSE
    below = torch.where(middle, 1.0, 2 * half.sin())
    sums = torch.where(middle, harmonics, ((2 * harmonics + 1) * half).sin() / below - 0.5)
    swell = half.cos().square().square() * BREATH
    return sums * loud, swell * loud, cycles[:, -1:] - cycles[:, -1:].round()


def white_noise(seeds: Tensor, first: Tensor, count: int) -> Tensor:
    """Generates noise of variance 1 that depends only on a row's seed (n,) and the position of a sample: (n,
    count) from `first` (n,) on."""
    position = (first[:, None] + torch.arange(count, device=first.device)) & 0xFFFFFFFF
    mixed = hash_bits(hash_bits(position) ^ hash_bits(seeds & 0xFFFFFFFF)[:, None])
    return (mixed.float() * 2**-32 - 0.5) * math.sqrt(12)


def hash_bits(x: Tensor) -> Tensor:
    """Hashes 32 bits, in int64; its products fit. Source: C. Wellons, hash-prospector, 2018."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, and mean and scale that normalize the features."""

    width: int = 256
    inner: int = 768
    blocks: int = 8
    kernel: int = 7
    mel_mean: float = -5.0
    mel_scale: float = 2.5

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads a checkpoint's config.json; unknown keys are ignored."""
        return cls(**{name: settings[name] for name in cls.__struct_fields__ if settings.get(name) is not None})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's tensors, by name."""
        shapes: dict[str, tuple[int, ...]] = {
            "enter.weight": (self.width, self.kernel * INPUT_WIDTH),
            "enter.bias": (self.width,),
            "base.weight": (SOURCES * BINS, MELS),
            "head.weight": (PARTS * BINS + 2 * KNOTS, self.width),
            "head.bias": (PARTS * BINS + 2 * KNOTS,),
        }
        for i in range(self.blocks):
            shapes |= {
                f"blocks.{i}.along.weight": (self.kernel, self.width),
                f"blocks.{i}.along.bias": (self.width,),
                f"blocks.{i}.up.weight": (self.inner, self.width),
                f"blocks.{i}.up.bias": (self.inner,),
                f"blocks.{i}.down.weight": (self.width, self.inner),
                f"blocks.{i}.down.bias": (self.width,),
            }
        return shapes


def initial_tensors(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """Returns initial weights for training: bins as loud as the mel bands over them, pulses louder than noise."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        tensor = torch.zeros(shape)
        if name.endswith("along.weight"):
            tensor.normal_(0, config.kernel**-0.5, generator=generator)
        elif name.endswith("weight"):
            std = shape[-1] ** -0.5
            tensor.normal_(0, std * (0.2 if "down" in name or "head" in name else 1.0), generator=generator)
        tensors[name] = tensor
    tensors["base.weight"] = (spread() * config.mel_scale).repeat(SOURCES, 1)
    # A mel value is the mean magnitude under its triangle, times that triangle's sum.
    level = config.mel_mean + math.log(RATE_HZ / WINDOW_SAMPLES)
    for source, softer in enumerate((0.0, 1.0, 1.0)):
        tensors["head.bias"][source * BINS :][:BINS] = level - softer
    return tensors


def spread() -> Tensor:
    """Returns (bins, mels): each bin interpolated between the two bands around it, rows that sum to 1."""
    filters = mel_filters(MELS, WINDOW_SAMPLES, RATE_HZ, HIGH_HZ)
    middles = (filters * torch.arange(BINS, dtype=torch.float64)).sum(1) / filters.sum(1)
    bins = torch.arange(BINS, dtype=torch.float64).clamp(middles[0], middles[-1])
    above = torch.searchsorted(middles, bins).clamp(1, MELS - 1)
    share = (bins - middles[above - 1]) / (middles[above] - middles[above - 1])
    rows = torch.arange(BINS)
    weights = torch.zeros(BINS, MELS, dtype=torch.float64)
    weights[rows, above - 1], weights[rows, above] = 1 - share, share
    return weights.float()


def lines() -> Tensor:
    """Returns (KNOTS, 1024): linear interpolation between knots in the middles of as many segments."""
    size = WINDOW_SAMPLES // KNOTS
    at = ((torch.arange(WINDOW_SAMPLES) + 0.5) / size - 0.5).clamp(0, KNOTS - 1)
    return (1 - (at - torch.arange(KNOTS)[:, None]).abs()).clamp(min=0)


def load(folder: Path, card: VocoderCard, device: Device) -> Model:
    """Loads the vocoder from a checkpoint folder. Raises WeightsCorrupt."""
    config = read_config(folder, "source_filter", Config.of)
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as failure:
        raise WeightsCorrupt(f"{folder} holds no source-filter vocoder: {failure}", todo="get it again") from failure
    return Model(config, tensors, device)


class SourceFilterState(NamedTuple):
    """State of rows between steps."""

    features: Tensor
    """(n, kernel - 1, 82)"""
    layers: Tensor
    """(n, blocks, kernel - 1, width): last inputs of each block."""
    f0: Tensor
    """(n, 1) Hz, of the last frame."""
    phase: Tensor
    """(n, 1) float64, cycles."""
    source: Tensor
    """(n, 3, 768): the end of each source."""
    sums: Tensor
    """(n, 896): samples to which later windows will add."""


class SpectralEnvelope(NamedTuple):
    """Predictions of the network for frames."""

    loud: Tensor
    """(n, frames, sources, bins): magnitude for each source."""
    turn: Tensor
    """(n, frames, bins) radians: phase shift of the pulses."""
    course: Tensor
    """(n, frames, 2, KNOTS), natural logarithm: gain within the window, of pulses and of noise."""


class Model(Vocoder):
    """Network with its weights.

    In      frames (n, T, 81): natural-log mel of audio/features/slaney_mel, F0 in Hz, 0 where unvoiced
    Out     (n, 256 T) float32 in -1..1, 22.05 kHz
    State   `SourceFilterState`, float32 but for the phase
    """

    rate_hz, hop_samples, delay_frames = RATE_HZ, HOP_SAMPLES, DELAY

    def __init__(self, config: Config, tensors: Mapping[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        torch_device = device.torch_device
        for name, shape in config.shapes().items():
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a source-filter vocoder has it")
            if tensors[name].shape != shape:
                raise WeightsCorrupt(f"{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}")

        def there(name: str) -> Tensor:
            return tensors[name].float().to(torch_device)

        # Mel bands have a wide range, and an exponential follows: rounding to bf16 would be audible.
        self.base = device.linear(there("base.weight"), None, torch.float32)
        self.enter = device.linear(there("enter.weight"), there("enter.bias"), torch.float32)
        self.along = [
            (there(f"blocks.{i}.along.weight"), there(f"blocks.{i}.along.bias")) for i in range(config.blocks)
        ]
        self.up, self.down = (
            [
                device.linear(there(f"blocks.{i}.{kind}.weight"), there(f"blocks.{i}.{kind}.bias"))
                for i in range(config.blocks)
            ]
            for kind in ("up", "down")
        )
        # The bias is several units, of which bf16 has two digits: added after, in float32.
        self.head, self.head_bias = device.linear(there("head.weight")), there("head.bias")
        self.hann = torch.hann_window(WINDOW_SAMPLES, device=torch_device)
        noise = self.hann / self.hann.square().sum().sqrt()
        self.windows = torch.stack([self.hann / (WINDOW_SAMPLES / 4), noise, noise])[:, None]
        """Windows for which a cosine in the middle of a bin has magnitude 1, and white noise in the mean square."""
        self.lines = lines().to(torch_device)
        square = F.pad(self.hann.square(), (0, 1))
        distance = torch.arange(AROUND_SAMPLES + 1, device=torch_device)
        self.missing = square[AROUND_SAMPLES - distance]
        self.missing[: HOP_SAMPLES // 2] += square[HOP_SAMPLES // 2 - distance[: HOP_SAMPLES // 2]]
        """Weight that the windows beyond a sentence's edge would have added, by the distance from the edge."""

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        config = self.config
        return {
            "features": StateSpec((config.kernel - 1, INPUT_WIDTH)),
            "layers": StateSpec((config.blocks, config.kernel - 1, config.width)),
            "f0": StateSpec((1,)),
            "phase": StateSpec((1,), torch.float64),
            "source": StateSpec((SOURCES, SOURCE_TAIL)),
            "sums": StateSpec((SUM_TAIL,)),
        }

    def step(self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State) -> Tensor:
        """Vocodes `frames` (n, chunk, 81) after `seen` (n,) earlier ones: (n, chunk * 256), from the sample of
        frame seen - 4 on. `ends` (n,): frames of the sentences, beyond which none is read; samples outside are
        0."""
        carried = SourceFilterState(*(state[name][rows] for name in SourceFilterState._fields))
        f0, features = self._features(frames, seen, ends)
        features, layers, envelope = self._network(features, carried)
        pcm, phase, source, sums = self._sound(envelope, f0, carried, seen, ends, seeds)
        after = SourceFilterState(features, layers, f0[:, -1:], phase, source, sums)
        for name, tensor in after._asdict().items():
            state[name][rows] = tensor
        return pcm

    def vocode(self, frames: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Vocodes whole sentences (n, T, 81) of one length, with the noise of `seeds` (n,): (n, 256 T)."""
        zero = torch.zeros(len(frames), dtype=torch.int64, device=frames.device)
        return self.takes(frames, [zero if seeds is None else seeds])[0]

    def takes(self, frames: Tensor, seeds: Sequence[Tensor]) -> list[Tensor]:
        """Vocodes whole sentences once for each noise of `seeds`. Differentiable."""
        n, count, _ = frames.shape
        specs = self.state_specs(count + DELAY).values()
        carried = SourceFilterState(
            *(torch.zeros(n, *spec.shape, dtype=spec.dtype, device=frames.device) for spec in specs)
        )
        seen = torch.zeros(n, dtype=torch.int64, device=frames.device)
        ends = seen + count
        f0, features = self._features(F.pad(frames, (0, 0, 0, DELAY)), seen, ends)
        envelope = self._network(features, carried)[2]
        takes = [self._sound(envelope, f0, carried, seen, ends, each)[0] for each in seeds]
        return [pcm[:, DELAY * HOP_SAMPLES :] for pcm in takes]

    def _features(self, frames: Tensor, seen: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Returns F0 (n, frames) and the network's input (n, frames, 82): zeros after the sentence's end."""
        position = seen[:, None] + torch.arange(frames.shape[1], device=frames.device)
        inside = (position < ends[:, None])[..., None]
        frames = torch.where(inside, frames.float(), 0.0)
        f0 = frames[..., MELS]
        voiced = f0 > VOICED_HZ
        height = torch.where(voiced, (f0.clamp(min=VOICED_HZ) / MIDDLE_HZ).log2(), 0.0)
        mel = (frames[..., :MELS] - self.config.mel_mean) / self.config.mel_scale
        return f0, torch.where(inside, torch.cat([mel, torch.stack([height, voiced.float()], -1)], -1), 0.0)

    def _sound(
        self,
        envelope: SpectralEnvelope,
        f0: Tensor,
        carried: SourceFilterState,
        seen: Tensor,
        ends: Tensor,
        seeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Generates samples; also returns the new state of phase, source and sums."""
        count = f0.shape[1]
        pulse, swell, phase = pulses(torch.cat([carried.f0, f0], 1), carried.phase)
        noise = white_noise(seeds, seen * HOP_SAMPLES - HOP_SAMPLES // 2, count * HOP_SAMPLES)
        source = torch.cat([carried.source, torch.stack([pulse, noise, noise * swell], 1)], 2)
        frame = seen[:, None] - AHEAD + torch.arange(count, device=f0.device)
        valid = (frame >= 0) & (frame < ends[:, None])
        pieces = torch.fft.irfft(self._spectrum(envelope, source) * valid[..., None], WINDOW_SAMPLES)
        sums = self._sum(pieces * self.hann, carried.sums)
        pcm = sums[:, :-SUM_TAIL] / self._weight(seen, ends, count)
        sample = (seen[:, None] - DELAY) * HOP_SAMPLES + torch.arange(count * HOP_SAMPLES, device=f0.device)
        inside = (sample >= 0) & (sample < ends[:, None] * HOP_SAMPLES)
        pcm = torch.where(inside, pcm.clamp(-1.0, 1.0), 0.0)
        return pcm, phase, source[..., -SOURCE_TAIL:], sums[:, -SUM_TAIL:]

    def _network(self, features: Tensor, carried: SourceFilterState) -> tuple[Tensor, Tensor, SpectralEnvelope]:
        """Runs the network. Returns the new state of features and layers, and the predictions of as many frames,
        from AHEAD before the chunk on."""
        n, count, _ = features.shape
        kernel, dtype = self.config.kernel, self.device.dtype
        features = torch.cat([carried.features, features], 1)
        x = self.enter(features.unfold(1, kernel, 1).transpose(2, 3).reshape(n, count, -1))
        tails = []
        for i, (weight, bias) in enumerate(self.along):
            inputs = torch.cat([carried.layers[:, i], x], 1)
            tails.append(inputs[:, count:])
            y = bias + inputs[:, :count] * weight[0]
            for k in range(1, kernel):
                y = torch.addcmul(y, inputs[:, k : k + count], weight[k])
            y = F.layer_norm(y, y.shape[-1:], eps=EPSILON).to(dtype)
            x = x + self.down[i](self.up[i](y, gelu=True)).float()
        x = F.layer_norm(x, x.shape[-1:], eps=EPSILON).to(dtype)
        outputs = self.head(x).float() + self.head_bias
        own = features[:, kernel - 1 - AHEAD : kernel - 1 - AHEAD + count, :MELS]
        base = self.base(own.reshape(n * count, MELS)).view(n, count, -1)
        loud = (outputs[..., : SOURCES * BINS] + base).clamp(max=LOUDEST).exp().view(n, count, SOURCES, BINS)
        turn = outputs[..., SOURCES * BINS : PARTS * BINS].tanh() * math.pi
        course = (STEEPEST * outputs[..., PARTS * BINS :].tanh()).view(n, count, 2, KNOTS)
        return features[:, count:], torch.stack(tails, 1), SpectralEnvelope(loud, turn, course)

    def _spectrum(self, envelope: SpectralEnvelope, source: Tensor) -> Tensor:
        """Computes the frames' spectra, (n, frames, bins) complex, from windows of `source` (n, 3, samples)."""
        loud, turn, course = envelope
        course = (course @ self.lines).exp().transpose(1, 2)
        windowed = source.unfold(2, WINDOW_SAMPLES, HOP_SAMPLES) * self.windows
        spectra: Tensor = torch.fft.rfft(windowed * course[:, [0, 1, 1]])
        pulse, noise, breath = spectra.unbind(1)
        shaped = torch.polar(loud[:, :, 0], turn) * pulse
        return shaped + loud[:, :, 1] * noise + loud[:, :, 2] * breath

    def _sum(self, pieces: Tensor, before: Tensor) -> Tensor:
        """Overlaps and adds windows (n, frames, 1024), each 256 samples after the last, and the end of earlier ones."""
        n, count, _ = pieces.shape
        parts = pieces.view(n, count, OVERLAP, HOP_SAMPLES)
        sums: Tensor = F.pad(parts[:, :, 0], (0, 0, 0, OVERLAP - 1))
        for k in range(1, OVERLAP):
            sums = sums + F.pad(parts[:, :, k], (0, 0, k, OVERLAP - 1 - k))
        sums = F.pad(sums.reshape(n, -1), (HOP_SAMPLES // 2, 0))
        return sums + F.pad(before, (0, sums.shape[1] - SUM_TAIL))

    def _weight(self, seen: Tensor, ends: Tensor, count: int) -> Tensor:
        """Returns the sum of the windows' weights: 1.5, less at a sentence's edges."""
        sample = (seen[:, None] - DELAY) * HOP_SAMPLES + torch.arange(count * HOP_SAMPLES, device=seen.device)
        remaining = ends[:, None] * HOP_SAMPLES - sample
        weight = 1.5 - self.missing[sample.clamp(0, AROUND_SAMPLES)] - self.missing[remaining.clamp(0, AROUND_SAMPLES)]
        return weight.clamp(min=0.5)
