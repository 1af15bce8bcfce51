"""Whisper's audio encoder: log-mel frames, two convolutions and a Transformer over windows of 30 s.

Whisper encodes a window with most of its silence merged; speech LLMs encode whole windows, and some have rotary
positions in place of learnt ones.

Source  arXiv:2212.04356; numbers match transformers' WhisperEncoder, GlmAsrEncoder and VoxtralEncoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.whisper_log_mel import PackedLogMel
from asr_serve.devices.interface import Device, LayerNorm, Linear
from asr_serve.devices.tensor_parallel import SINGLE_RANK, TensorParallelGroup, row_parallel
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.whisper.encoder_window import SILENCE_STRIDE, WhisperWindow
from asr_serve.models.causal_lm import RotaryConfig
from asr_serve.models.packing import PackedBatch, pack_clips, packed_buffer, tap_matrix


class WhisperEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the encoder, and what differs between the models that have one."""

    mel_bins: int
    layers: int
    heads: int
    window_positions: int
    """Positions of a window, 50 a second: 1500."""
    silence_stride: int = SILENCE_STRIDE
    """Stride of models/asr/whisper/encoder_window."""
    rotary: RotaryConfig | None = None
    """Rotary positions of queries and keys, in place of learnt positions."""
    rotary_dims: int = 0
    """First numbers of a head that are rotated; the others stay."""


class WhisperEncoder:
    """Log-mel features, convolutions and Transformer over packed windows."""

    def __init__(self, config: WhisperEncoderConfig, take: WhisperTensors) -> None:
        """`take`: tensors `encoder.conv1.weight` and so on. Raises WeightsCorrupt."""
        self.device = take.device
        self.window = WhisperWindow(config.window_positions, config.silence_stride)
        self.stem = _WhisperStem(config, take)
        self.layers = [WhisperEncoderLayer(take, f"encoder.layers.{i}", config.heads) for i in range(config.layers)]
        self.norm = take.norm("encoder.layer_norm")
        self.angles: tuple[Tensor, Tensor] | None = None
        """Cosines and sines (window_positions, rotary_dims / 2)."""
        if config.rotary is not None:
            cos, sin = config.rotary.angles(config.rotary_dims, config.window_positions)
            self.angles = cos.to(self.device.torch_device), sin.to(self.device.torch_device)

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, Tensor, PackedBatch]:
        """Encodes clips (samples,), of one window each at most, end to end.

        Returns: positions (packing.total, width), the logarithm of the number of positions that each stands for
            (packing.total,), and the packing.
        """
        whole_clips = whole or [False] * len(batch)
        real = [
            self.window.clip_positions(len(pcm), whole_clip) for pcm, whole_clip in zip(batch, whole_clips, strict=True)
        ]
        x, counts, packing = self.stem(batch, real, self.window)
        return self._layers(x, counts, packing), counts, packing

    def encode_windows(self, mels: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        """Encodes whole windows of log-mel frames (2 * window_positions, mel_bins), end to end: positions
        (packing.total, width), and the packing."""
        x, packing = self.stem.windows(mels)
        return self._layers(x, None, packing), packing

    def _layers(self, x: Tensor, counts: Tensor | None, packing: PackedBatch) -> Tensor:
        for layer in self.layers:
            x = layer(x, counts, packing, self.device, self.angles)
        return self.norm(x)


class WhisperTensors:
    """Tensors of a checkpoint by name, laid out for the device, and split over a group of ranks.

    Heads get `extra` dimensions where positions may stand for several. In the last one every query is 1, and a key
    that stands for n positions holds log(n) divided by the scale of the scores: so it weighs as much as n equal keys
    in any kernel.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: Device,
        *,
        weighted: bool = True,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        """`weighted`: whether a position may stand for several; without it heads have no extra dimensions. `group`: the
        device's for layers that are split over it."""
        self.device, self.group = device, group
        # Fused kernels need multiples of 8, but for the processor's.
        self.extra = (1 if device.torch_device.type == "cpu" else 8) if weighted else 0
        # Some checkpoints omit the prefix.
        self.tensors = {key.removeprefix("model."): value for key, value in tensors.items()}

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor model.{name}", "a Whisper checkpoint has it")
        return self.tensors[name].float()

    def vector(self, name: str) -> Tensor:
        return self.get(name).to(self.device.torch_device, self.device.dtype)

    def norm(self, name: str) -> LayerNorm:
        return LayerNorm(self.vector(f"{name}.weight"), self.vector(f"{name}.bias"))

    def linear(self, name: str) -> Linear:
        """Returns a linear layer, column-parallel in a group."""
        weight, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        part = self.group.part(len(weight))
        return self.device.linear(weight[part], bias[part], layer=name)

    def row_linear(self, name: str) -> Linear:
        """Returns a linear layer after a column-parallel one."""
        make = partial(self.device.linear, layer=name)
        return row_parallel(make, self.group, self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def heads(self, heads: int, *names: str, scale: float = 1.0) -> Linear:
        """Stacks queries, keys and values of the same input into one extended linear layer; queries are multiplied
        by `scale`. Keys have no bias. In a group it has this rank's part of the `heads`."""
        weights, biases = [], []
        for name in names:
            weight = self.get(f"{name}.weight")
            bias = weight.new_zeros(len(weight)) if name.endswith("k_proj") else self.get(f"{name}.bias")
            factor, extra_bias = (scale, 1.0) if name.endswith("q_proj") else (1.0, 0.0)
            part = self.group.part(heads)
            by_head = (weight * factor).view(heads, -1, weight.shape[1])[part]
            weights.append(F.pad(by_head, (0, 0, 0, self.extra)).flatten(0, 1))
            biases.append(F.pad((bias * factor).view(heads, -1)[part], (0, self.extra)))
            if self.extra:
                biases[-1][:, -1] = extra_bias
        return self.device.linear(torch.cat(weights), torch.cat(biases).flatten(), layer=names[0])

    def out(self, heads: int, name: str) -> Linear:
        """Returns the projection after attention, extended to ignore the extra dimensions."""
        weight = self.get(f"{name}.weight")
        by_head = F.pad(weight.view(len(weight), heads, -1), (0, self.extra))
        make = partial(self.device.linear, layer=name)
        return row_parallel(make, self.group, by_head.flatten(1), self.get(f"{name}.bias"))


class _WhisperStem:
    """Log-mel frames, 100 a second; two convolutions, as products over windows of three, to 50 positions a second."""

    def __init__(self, config: WhisperEncoderConfig, take: WhisperTensors) -> None:
        self.device, self.most = take.device, config.window_positions
        self.mel = PackedLogMel(config.mel_bins, 2 * self.most, take.device.torch_device)
        # The spectrogram stays in float32: bf16 has 8 bits.
        self.first = take.device.linear(
            tap_matrix(take.get("encoder.conv1.weight")), take.get("encoder.conv1.bias"), dtype=torch.float32
        )
        self.second = take.device.linear(tap_matrix(take.get("encoder.conv2.weight")), take.get("encoder.conv2.bias"))
        self.positions = None if config.rotary else take.vector("encoder.embed_positions.weight")

    def __call__(
        self, batch: Sequence[Tensor], real: list[int], window: WhisperWindow
    ) -> tuple[Tensor, Tensor, PackedBatch]:
        """Returns positions, the logarithm of how many each stands for (total,), and the packing: the first `real`
        of each clip one by one, then the silence as `window` encodes it."""
        assert self.positions is not None, "rotary positions are those of whole windows"
        # Two positions after a clip suffice: silence beyond the receptive field, and the window's end with its
        # zero padding.
        positions = [count if count == self.most else count + 2 for count in real]
        frames = [2 * count for count in positions]
        mels = torch.split(self.mel([clip[: self.mel.window_samples] for clip in batch], frames), frames)
        x, convolved = self._convolved(mels)
        sources, embeddings, span_sizes = [], [], []
        for offset, count in zip(convolved.offsets, real, strict=True):
            sources.append(torch.arange(offset, offset + count))
            embeddings.append(self.positions[:count])
            span_sizes.append(torch.ones(count))
            if count < self.most:
                starts, sizes = window.silence_spans(count)
                # Silence is the same everywhere, but for the window's last position: both were convolved.
                silence = torch.full_like(starts, offset + count)
                silence[-1] += 1
                sources.append(silence)
                # Merged positions get the mean of their embeddings: it is nearer to all of them than any single
                # one.
                merged = torch.arange(count, self.most, device=x.device)
                embeddings.append(F.embedding_bag(merged, self.positions, (starts - count).to(x.device), mode="mean"))
                span_sizes.append(sizes)
        packing = pack_clips([window.encoded(count) for count in real], self.device.frame_block)
        filler = packing.total - sum(packing.frames)
        index = F.pad(torch.cat(sources), (0, filler)).to(x.device)
        counts = F.pad(torch.cat(span_sizes), (0, filler), value=1.0).log_().to(x.device, self.device.dtype)
        return x[index] + F.pad(torch.cat(embeddings), (0, 0, 0, filler)), counts, packing

    def windows(self, mels: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        """Returns all positions of whole windows, and their packing."""
        x, packing = self._convolved(mels)
        if self.positions is not None:
            x = x + F.pad(self.positions.repeat(len(mels), 1), (0, 0, 0, packing.total - len(mels) * self.most))
        return x, packing

    def _convolved(self, mels: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        """Convolves the log-mel frames of clips, an even number of each, zeros before and after them."""
        positions = [len(mel) // 2 for mel in mels]
        counts = [2 * count + 1 for count in positions]
        windows, mel_packing = self._packed(counts, 3 * mels[0].shape[1], torch.float32)
        for offset, count, clip in zip(mel_packing.offsets, counts, mels, strict=True):
            padded = F.pad(clip, (0, 0, 1, count - len(clip)))
            width = padded.shape[1]
            windows[offset] = 0
            windows[offset + 1 : offset + count] = padded.as_strided((count - 1, 3 * width), (width, 1))
        x = self.first(windows, gelu=True).to(self.device.dtype)
        x[mel_packing.offsets] = 0  # the second convolution's padding
        width = x.shape[1]
        windows, packing = self._packed(positions, 3 * width, x.dtype)
        for start, offset, count in zip(mel_packing.offsets, packing.offsets, positions, strict=True):
            view = x.as_strided((count, 3 * width), (2 * width, 1), x.storage_offset() + start * width)
            windows[offset : offset + count] = view
        return self.second(windows, gelu=True), packing

    def _packed(self, counts: list[int], width: int, dtype: torch.dtype) -> tuple[Tensor, PackedBatch]:
        packing = pack_clips(counts, self.device.frame_block)
        return packed_buffer(packing, width, dtype, self.device.torch_device), packing


class WhisperEncoderLayer:
    """Self-attention and feed-forward, each after its norm."""

    def __init__(self, take: WhisperTensors, at: str, heads: int) -> None:
        self.heads = heads
        self.weighted = take.extra > 0
        self.norm1 = take.norm(f"{at}.self_attn_layer_norm")
        head_dim = len(self.norm1[0]) // heads
        self.extended = head_dim + take.extra
        # The device scales scores by the extended size of a head.
        self.qkv = take.heads(
            heads, *[f"{at}.self_attn.{p}_proj" for p in "qkv"], scale=(self.extended / head_dim) ** 0.5
        )
        self.out = take.out(heads, f"{at}.self_attn.out_proj")
        self.norm2 = take.norm(f"{at}.final_layer_norm")
        self.up, self.down = take.linear(f"{at}.fc1"), take.linear(f"{at}.fc2")

    def __call__(
        self,
        x: Tensor,
        counts: Tensor | None,
        packing: PackedBatch,
        device: Device,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`counts`: the logarithm of how many positions each stands for (total,), None for one each. `angles`: see
        `Device.attention`."""
        qkv = self.qkv(self.norm1(x)).view(-1, 3, self.heads, self.extended)
        if self.weighted:
            qkv[:, 1, :, -1] = 0.0 if counts is None else counts[:, None] * self.extended**0.5
        x = self.out(device.attention(qkv, packing, angles), add=x)
        return self.down(self.up(self.norm2(x), gelu=True), add=x)
