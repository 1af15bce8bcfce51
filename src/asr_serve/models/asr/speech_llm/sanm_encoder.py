"""SenseVoice's encoder, of SANM blocks: self-attention beside an FSMN memory, over filter banks of a low frame rate.

Clips lie end to end in one batch, and each is encoded as if it were alone.

Source: SAN-M, arXiv:2006.01713; FSMN, arXiv:1512.08301; numbers match funasr 1.4.16's WavFrontend and
SenseVoiceEncoderSmall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.kaldi_fbank import Fbank, FbankOptions, WindowKind
from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.packing import PackedBatch, pack_clips, packed_buffer

NORM_EPS = 1e-5
INT16_SCALE = 32_768.0


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Features, under the names of `frontend_conf` in FunASR's config.yaml."""

    window: WindowKind = "hamming"
    n_mels: int = 80
    frame_length: int = 25
    """Length of a frame in ms."""
    frame_shift: int = 10
    """Time from one frame to the next in ms."""
    lfr_m: int = 7
    """Frames that are stacked."""
    lfr_n: int = 6
    """Frames from one stack to the next."""
    dither: float = 1.0
    """Standard deviation of the noise that FunASR adds to 16-bit samples; its expected power is added here."""
    snip_edges: bool = True
    upsacle_samples: bool = True
    """Whether samples are scaled to 16 bits. The name is FunASR's."""
    fs: Literal[16_000] = 16_000

    @property
    def width(self) -> int:
        """Numbers of a feature frame."""
        return self.n_mels * self.lfr_m


class LowFrameRateFbank:
    """Kaldi's filter bank with `lfr_m` neighbouring frames stacked, every `lfr_n` frames.

    In      clips (samples,) float32, 16 kHz
    Out     (frames, n_mels * lfr_m) float32; frames beyond the ends of a clip are its first and its last
    """

    def __init__(self, config: FrontendConfig, shift: Tensor | None, scale: Tensor | None, device: Device) -> None:
        """`shift`, `scale`: (width,) float32, added to features, and multiplied with the sum; None: neither."""
        self.config, self.device = config, device.torch_device
        options = FbankOptions(
            mels=config.n_mels,
            window=config.window,
            snip_edges=config.snip_edges,
            scale=INT16_SCALE if config.upsacle_samples else 1.0,
            dither=config.dither,
            window_samples=config.frame_length * config.fs // 1_000,
            hop_samples=config.frame_shift * config.fs // 1_000,
        )
        self.fbank = Fbank(options, self.device)
        self.shift, self.scale = (None if each is None else each.to(self.device) for each in (shift, scale))

    @property
    def frame_samples(self) -> int:
        """Samples from one frame to the next."""
        return self.fbank.hop_samples * self.config.lfr_n

    def count_frames(self, samples: int) -> int:
        """Number of frames of a clip, one at least: shorter ones are filled with silence."""
        return -(-max(1, self.fbank.count_frames(samples)) // self.config.lfr_n)

    def __call__(self, pcm: Tensor) -> Tensor:
        pcm = F.pad(pcm, (0, max(0, self.fbank.window_samples - len(pcm)))).to(self.device)
        mels = self.fbank(pcm[None])[0]
        first = torch.arange(self.count_frames(len(pcm)), device=self.device) * self.config.lfr_n
        stacked = torch.arange(self.config.lfr_m, device=self.device) - (self.config.lfr_m - 1) // 2
        index = (first[:, None] + stacked).clamp_(0, len(mels) - 1)
        features = mels[index].flatten(1)
        if self.shift is not None:
            features = features + self.shift
        return features if self.scale is None else features * self.scale


class SanmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, under the names of `audio_encoder_conf` in FunASR's config.yaml."""

    output_size: int = 256
    attention_heads: int = 4
    linear_units: int = 2_048
    num_blocks: int = 6
    tp_blocks: int = 0
    """Blocks after the first norm."""
    kernel_size: int = 11
    """Frames that the memory reads."""
    sanm_shfit: int = 0
    """Frames by which the memory reaches further back. The name is FunASR's."""


class EncoderTensors:
    """Tensors of an encoder and an adaptor by FunASR's names, laid out for the device."""

    def __init__(self, tensors: Mapping[str, Tensor], device: Device) -> None:
        self.tensors, self.device = tensors, device

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor as float32; `shape`: what it must have. Raises WeightsCorrupt."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a model with this config has it")
        if tensor.shape != shape:
            raise WeightsCorrupt(f"{name} has shape {tuple(tensor.shape)}", f"{shape}, by its config")
        return tensor.float()

    def linear(self, outputs: int, inputs: int, *names: str) -> Linear:
        """Stacks matrices with the same input, of `outputs` rows each, into one linear layer."""
        weight = torch.cat([self.get(f"{name}.weight", outputs, inputs) for name in names])
        return self.device.linear(weight, torch.cat([self.get(f"{name}.bias", outputs) for name in names]))

    def norm(self, name: str, width: int, eps: float) -> Callable[[Tensor], Tensor]:
        """Layer norm, computed in float32 and returned in the input's dtype."""
        weight, bias = (self.get(f"{name}.{part}", width).to(self.device.torch_device) for part in ("weight", "bias"))
        return partial(layer_norm, weight=weight, bias=bias, eps=eps)


def check_heads(heads: int, width: int) -> None:
    """Raises WeightsCorrupt for a number of heads that does not divide the width."""
    if heads < 1 or width % heads:
        raise WeightsCorrupt(f"attention_heads={heads}", f"a divisor of {width}, the width")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


class SanmEncoder:
    """Features and encoder.

    In      clips (samples,) float32, 16 kHz, on the host
    Out     frames (packing.total, output_size) of one in `lfr_n` feature frames, and the packing
    """

    def __init__(self, take: EncoderTensors, at: str, config: SanmConfig, frontend: FrontendConfig) -> None:
        """`at`: prefix of its tensors' names."""
        self.config, self.device = config, take.device
        if not 0 <= config.sanm_shfit <= config.kernel_size // 2:
            raise WeightsCorrupt(f"sanm_shfit={config.sanm_shfit}", f"0 to {config.kernel_size // 2}")
        check_heads(config.attention_heads, config.output_size)
        cmvn = [
            take.get(f"frontend.cmvn.{name}", frontend.width) if f"frontend.cmvn.{name}" in take.tensors else None
            for name in ("shift", "scale")
        ]
        self.features = LowFrameRateFbank(frontend, cmvn[0], cmvn[1], take.device)
        self.frame_samples, self.count_frames = self.features.frame_samples, self.features.count_frames
        self.width = config.output_size
        inputs = frontend.width
        main = [f"{at}encoders0.0", *(f"{at}encoders.{i}" for i in range(config.num_blocks - 1))]
        self.main = [_SanmBlock(take, name, inputs if i == 0 else self.width, config) for i, name in enumerate(main)]
        self.main_norm = take.norm(f"{at}after_norm", self.width, NORM_EPS)
        self.last = [_SanmBlock(take, f"{at}tp_encoders.{i}", self.width, config) for i in range(config.tp_blocks)]
        self.last_norm = take.norm(f"{at}tp_norm", self.width, NORM_EPS)
        self.inputs = inputs

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        packing = pack_clips([self.count_frames(len(pcm)) for pcm in batch], self.device.frame_block)
        features = packed_buffer(packing, self.inputs, torch.float32, self.device.torch_device)
        for pcm, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
            features[offset : offset + count] = self.features(pcm)
        return self.encode_features(features, packing), packing

    def encode_features(self, features: Tensor, packing: PackedBatch) -> Tensor:
        """Frames of features (packing.total, inputs) float32."""
        positions = packing.positions(features.device)
        x = features * self.width**0.5 + sinusoids(positions + 1, self.inputs)
        x, memory = x.to(self.device.dtype), MemoryLayout(packing, self.config, features.device)
        for block in self.main:
            x = block(x, packing, memory)
        x = self.main_norm(x)
        for block in self.last:
            x = block(x, packing, memory)
        return self.last_norm(x)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Encodings (n, width) float32 of positions (n,): sines, then cosines, of speeds from 1 down to 1 / 10000."""
    half = width // 2
    speeds = torch.exp(torch.arange(half, device=positions.device) * (-math.log(10_000.0) / (half - 1)))
    angles = positions[:, None].float() * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class MemoryLayout:
    """Places of the frames of a batch while the memory is computed: with zeros between clips, so that none is read by
    another."""

    def __init__(self, packing: PackedBatch, config: SanmConfig, device: torch.device) -> None:
        before = (config.kernel_size - 1) // 2 + config.sanm_shfit
        after = config.kernel_size - 1 - before
        gap = max(before, after)
        clip = torch.arange(len(packing.frames)).repeat_interleave(torch.tensor(packing.frames))
        frames = torch.arange(sum(packing.frames))
        self.frames = len(frames)
        """Frames of all clips."""
        self.before = before
        self.spaced = (frames + before + clip * gap).to(device)
        """Place of each."""
        self.total = self.frames + len(packing.frames) * gap + before + after


class _SanmBlock:
    def __init__(self, take: EncoderTensors, at: str, inputs: int, config: SanmConfig) -> None:
        width, hidden = config.output_size, config.linear_units
        self.device, self.heads, self.residual = take.device, config.attention_heads, inputs == width
        self.norm1, self.norm2 = take.norm(f"{at}.norm1", inputs, NORM_EPS), take.norm(f"{at}.norm2", width, NORM_EPS)
        self.qkv = take.linear(3 * width, inputs, f"{at}.self_attn.linear_q_k_v")
        self.out = take.linear(width, width, f"{at}.self_attn.linear_out")
        self.up = take.linear(hidden, width, f"{at}.feed_forward.w_1")
        self.down = take.linear(width, hidden, f"{at}.feed_forward.w_2")
        memory = take.get(f"{at}.self_attn.fsmn_block.weight", width, 1, config.kernel_size)
        self.taps = memory[:, 0].T.to(take.device.torch_device).contiguous()
        """(kernel_size, width) float32"""

    def __call__(self, x: Tensor, packing: PackedBatch, memory: MemoryLayout) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        value = qkv[:, 2 * qkv.shape[1] // 3 :]
        added = self._memory(value, memory)
        if self.residual:
            added += x
        x = self.out(self.device.attention(qkv.view(len(x), 3, self.heads, -1), packing), add=added)
        return self.down(self.up(self.norm2(x)).relu_(), add=x)

    def _memory(self, value: Tensor, memory: MemoryLayout) -> Tensor:
        """`value` (total, width), each frame with a weighted sum of those around it added."""
        frames = memory.frames
        spaced = torch.zeros(memory.total, value.shape[1], device=value.device)
        spaced[memory.spaced] = value[:frames].float()
        summed = spaced.clone()
        rows = memory.total - len(self.taps) + 1
        for i, tap in enumerate(self.taps):
            summed[memory.before : memory.before + rows].addcmul_(spaced[i : i + rows], tap)
        out = value.clone()
        out[:frames] = summed[memory.spaced].to(value.dtype)
        return out
