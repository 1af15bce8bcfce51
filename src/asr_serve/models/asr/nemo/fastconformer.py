"""FastConformer with caches: NeMo's streaming encoder with a CTC head, a transducer, or both.

Source  Noroozi et al. 2023 (arXiv:2312.17279), Rekesh et al. 2023 (arXiv:2305.05084); numbers match NeMo's
        ConformerEncoder, offline under its streaming mask and with cache_aware_stream_step.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features import nemo_mel
from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.asr.nemo import archive
from asr_serve.models.asr.nemo.lstm_transducer import LstmTransducer
from asr_serve.models.asr.nemo.subsampling import Subsampling
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.registry import AsrCard

_SHARED: dict[str, Any] = {
    "task": "asr",
    "kind": "fastconformer",
    "languages": ("en",),
    "source": "arXiv:2312.17279",
    "files": ("*.nemo",),
    "max_segment_ms": 20_000,
    "min_segment_ms": 100,
    "tokens_per_s": 12.5,
    "frame_samples": 1_280,
    "lookahead_samples": -1_080,
}
CARDS = (
    AsrCard(
        name="fastconformer-streaming-large-en",
        parameters=114_000_000,
        licence="CC-BY-4.0",
        hub="nvidia/stt_en_fastconformer_hybrid_large_streaming_multi",
        heads=("rnnt", "ctc"),
        chunk=14,
        **_SHARED,
    ),
    AsrCard(
        name="fastconformer-streaming-medium-en",
        parameters=32_000_000,
        licence="CC-BY-4.0",
        hub="nvidia/stt_en_fastconformer_hybrid_medium_streaming_80ms_pc",
        heads=("rnnt", "ctc"),
        chunk=2,
        **_SHARED,
    ),
    AsrCard(
        name="nemotron-streaming-en",
        parameters=600_000_000,
        licence="NVIDIA Open Model License",
        hub="nvidia/nemotron-speech-streaming-en-0.6b",
        heads=("rnnt",),
        chunk=14,
        **_SHARED,
    ),
)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes, under the names of a checkpoint's section `encoder` where they come from there."""

    feat_in: int = 80
    d_model: int = 512
    n_layers: int = 17
    n_heads: int = 8
    ff_expansion_factor: int = 4
    subsampling_factor: int = 8
    subsampling_conv_channels: int = 256
    conv_kernel_size: int = 9
    conv_norm_type: str = "layer_norm"
    xscaling: bool = True
    use_bias: bool = True
    att_context_size: tuple[tuple[int, int], ...] = ((70, 13),)
    """Encoder frames to the left of a block, and in the block after its first. The first pair is used."""
    vocab_size: int = 1024
    """Number of tokens, without the blank."""
    heads: tuple[str, ...] = ("rnnt", "ctc")
    pred_hidden: int = 640
    pred_rnn_layers: int = 1
    joint_hidden: int = 640
    joint_activation: str = "relu"
    durations: tuple[int, ...] = ()

    @property
    def ctc_blank_id(self) -> int | None:
        return self.vocab_size if "ctc" in self.heads else None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads our config.json, or the settings of NeMo's model_config.yaml. Raises WeightsCorrupt."""
        if "encoder" in settings:
            nemo_mel.check(settings.get("preprocessor") or {})
            settings = archive.flatten_settings(settings)
        try:
            config = msgspec.convert(
                {k: settings[k] for k in cls.__struct_fields__ if settings.get(k) is not None}, cls
            )
        except msgspec.ValidationError as wrong:
            raise WeightsCorrupt(f"the checkpoint's settings: {wrong}") from wrong
        allowed = "one or more [left, right], neither of them -1, and left a multiple of right + 1"
        for left, right in config.att_context_size or [(-1, -1)]:
            if left < 0 or right < 0 or left % (right + 1):
                raise WeightsCorrupt(f"att_context_size=[{left}, {right}]", allowed)
        return config

    def with_right_context(self, right: int) -> Config:
        """Returns the settings with another of the contexts that the model was trained for: the one with `right`
        frames of look-ahead. Raises OptionError."""
        for pair in self.att_context_size:
            if pair[1] == right:
                others = tuple(other for other in self.att_context_size if other != pair)
                return msgspec.structs.replace(self, att_context_size=(pair, *others))
        allowed = ", ".join(str(right) for right in sorted(pair[1] for pair in self.att_context_size))
        raise OptionError(
            f"lookahead_frames={right}", f"this model was trained for {allowed}", param="lookahead_frames"
        )


def distances(width: int, left: int, steps: int) -> Tensor:
    """Returns sines and cosines of the distances from a frame to its visible keys, (left + 2 * steps - 1, width):
    from the last of `steps` frames back to `left` frames before the first, down to the first frame that attends to
    the last."""
    offsets = torch.arange(left + steps - 1, -steps, -1, dtype=torch.float64)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = offsets[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


class RelativePositionKeys(NamedTuple):
    """Projected position encodings of one layer, by distance in the order of `distances`: attention scores have a term
    for the distance between query and key, beside the content term.

    Source: Transformer-XL, arXiv:1901.02860, appendix B.
    """

    keys: Tensor
    """(heads, head_dim, distances)."""
    constant: Tensor
    """(heads, 1, distances): the part of the score that is the same for every query."""

    def steps(self, left: int) -> int:
        return (self.keys.shape[2] - left + 1) // 2

    def cut(self, steps: int, left: int) -> RelativePositionKeys:
        """Returns the part for fewer steps."""
        begin = self.steps(left) - steps
        end = begin + left + 2 * steps - 1
        return RelativePositionKeys(self.keys[:, :, begin:end], self.constant[:, :, begin:end])

    def bias(self, q: Tensor, left: int) -> Tensor:
        """Computes position scores of queries (n, steps, heads, head_dim) at each key: (n, heads, steps, left +
        steps), whose first `left` keys are those before the first query."""
        n, steps, heads, head_dim = q.shape
        by_distance = torch.baddbmm(self.constant, q.permute(2, 0, 1, 3).reshape(heads, -1, head_dim), self.keys)
        # For the next query every key is one step further away: its row begins one column further left.
        row = by_distance.shape[2]
        return by_distance.as_strided(
            (n, heads, steps, left + steps), (steps * row, n * steps * row, row - 1, 1), steps - 1
        )


class Model(StreamingModel):
    """Encoder with its heads: StreamingModel of models/interfaces.py, with a `transducer` for rnnt and tdt.

    State   stem.*: the last frame at the input of each subsampling layer; for each layer keys.* and values.*,
            rings of the attention's left context, and conv.*, the last inputs of the depthwise convolution
    """

    def __init__(self, config: Config, weights: dict[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        self.frame_samples = nemo_mel.HOP_SAMPLES * config.subsampling_factor
        self.left, self.frame_block = config.att_context_size[0][0], config.att_context_size[0][1] + 1
        self.vocab_size, self.blank_id = config.vocab_size + 1, config.vocab_size
        self.heads = config.heads
        take = _FastConformerTensors(config, weights, device)
        self.mel = nemo_mel.NemoMel(config.feat_in, device.torch_device)
        tools = take.get, take.to_device, device.linear
        self.stem = Subsampling(
            tools,
            factor=config.subsampling_factor,
            bins=config.feat_in,
            channels=config.subsampling_conv_channels,
            width=config.d_model,
            scale=config.d_model**0.5 if config.xscaling else 1.0,
        )
        self.layers = [_FastConformerLayer(take, i) for i in range(config.n_layers)]
        self.angles: list[RelativePositionKeys] = []
        """Relative position keys of each layer, for the longest chunk so far."""
        if "ctc" in self.heads:
            self.head = take.linear("ctc")
        if self.heads[0] != "ctc":
            self.transducer = LstmTransducer(
                tools, config.pred_rnn_layers, config.joint_activation, self.vocab_size, config.durations
            )

    def count_frames(self, samples: int) -> int:
        """Returns the encoder frames of a finished session, as NeMo counts them; 0 for no audio."""
        return self.stem.counts(samples // nemo_mel.HOP_SAMPLES)[-1] if samples else 0

    def audio_window(self, chunk: int) -> AudioWindow:
        before = nemo_mel.HOP_SAMPLES * (self.config.subsampling_factor - 1) + nemo_mel.BEFORE_SAMPLES
        past_last = nemo_mel.BEFORE_SAMPLES + nemo_mel.WINDOW_SAMPLES // 2 - nemo_mel.HOP_SAMPLES
        return AudioWindow(before, chunk * self.frame_samples + past_last)

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        self._angles_for(chunk)  # not inside a step: steps may be recorded
        config, dtype = self.config, self.device.dtype
        ring = (config.n_heads, self.left + chunk, config.d_model // config.n_heads)
        specs = self.stem.state()
        for i in range(config.n_layers):
            specs[f"keys.{i}"] = specs[f"values.{i}"] = StateSpec(ring, dtype, None)
            specs[f"conv.{i}"] = StateSpec((config.conv_kernel_size - 1, config.d_model), dtype)
        return specs

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        rows, frames, kernels = chunk.rows, chunk.frames, self.device.kernels
        positions = rows, chunk.start_frames, frames
        x = self._front(chunk.pcm, chunk.start_frames, chunk.total_samples, rows, state)
        mixed = torch.empty_like(x)
        for i, (layer, angles) in enumerate(zip(self.layers, self._angles_for(x.shape[1]), strict=True)):
            rings = state[f"keys.{i}"], state[f"values.{i}"]
            x, qkv = layer.attention_inputs(x)
            bias = angles.bias(qkv[0], self.left)
            kernels.window_attention(*qkv, *rings, *positions, bias, self.left, self.frame_block, mixed)
            x, gated = layer.conv_input(x, mixed)
            taps, tail = (layer.depthwise, layer.depthwise_bias), state[f"conv.{i}"]
            kernels.causal_conv(gated, *taps, tail, rows, frames, mixed)
            x = layer.finish(x, mixed)
        return x

    def encode_utterance(self, pcm: Tensor) -> Tensor:
        """Encodes a whole utterance (samples,) at once, without state, under the mask that steps imply: (1,
        frames, width). Reference for tests: memory grows with the square of the length."""
        frames, device = self.count_frames(len(pcm)), self.device.torch_device
        if not frames:
            return torch.empty(1, 0, self.config.d_model, dtype=self.device.dtype, device=device)
        window = self.audio_window(frames)
        end = window.samples - window.left_samples
        wide = F.pad(pcm[:end].to(device), (window.left_samples, end - min(len(pcm), end)))[None]
        zero, ends = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([len(pcm)], device=device)
        tails = {k: torch.zeros(1, *s.shape, dtype=s.dtype, device=device) for k, s in self.stem.state().items()}
        x = self._front(wide, zero, ends, zero, tails)
        frame = torch.arange(frames, device=device)
        begin = (frame // self.frame_block * self.frame_block)[:, None]
        visible = (frame >= begin - self.left) & (frame < begin + self.frame_block)
        for layer in self.layers:
            x, (q, k, v) = layer.attention_inputs(x)
            angles = layer.angles(distances(self.config.d_model, 0, frames))
            scores = torch.einsum("nqhd,nkhd->nhqk", q, k) + angles.bias(q, 0)
            scores = (scores.float() * q.shape[3] ** -0.5).masked_fill(~visible, float("-inf"))
            weights = scores.softmax(dim=-1)
            mixed = torch.einsum("nhqk,nkhd->nqhd", weights.to(v.dtype), v).flatten(2)
            x, gated = layer.conv_input(x, mixed)
            past = F.pad(gated.transpose(1, 2), (self.config.conv_kernel_size - 1, 0))
            convolved = F.conv1d(past, layer.depthwise[:, None], layer.depthwise_bias, groups=gated.shape[2])
            x = layer.finish(x, convolved.transpose(1, 2))
        return x

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.head(hidden).float(), dim=-1)

    def _front(self, pcm: Tensor, seen: Tensor, ends: Tensor, rows: Tensor, tails: State) -> Tensor:
        mel = self.mel(pcm, self.stem.first(0, seen), ends)
        return self.stem(mel, seen, ends // nemo_mel.HOP_SAMPLES, rows, tails)

    def _angles_for(self, steps: int) -> list[RelativePositionKeys]:
        """Returns the relative position keys of each layer for chunks of that many frames."""
        steps_ready = self.angles[0].steps(self.left) if self.angles else 0
        if steps_ready < steps:
            waves = distances(self.config.d_model, self.left, steps)
            self.angles = [layer.angles(waves) for layer in self.layers]
        return self.angles if steps_ready == steps else [angles.cut(steps, self.left) for angles in self.angles]


class _FastConformerTensors:
    """Tensors of a checkpoint by name, laid out for the device."""

    def __init__(self, config: Config, tensors: dict[str, Tensor], device: Device) -> None:
        self.config, self.tensors, self.device = config, tensors, device

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a FastConformer's checkpoint has it")
        return self.tensors[name].float()

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(self.device.torch_device, dtype or self.device.dtype).contiguous()

    def bias(self, name: str) -> Tensor | None:
        """Returns a layer's bias; None where the checkpoint was trained without."""
        return self.get(f"{name}.bias") if self.config.use_bias else None

    def norm(self, name: str) -> tuple[Tensor, Tensor]:
        return self.to_device(self.get(f"{name}.weight")), self.to_device(self.get(f"{name}.bias"))

    def linear(self, name: str, scale: float = 1.0, biased: bool = True) -> Linear:
        weight = self.get(f"{name}.weight")
        bias = self.get(f"{name}.bias") * scale if biased else None
        return self.device.linear(weight.flatten(1) * scale, bias)


class _FastConformerLayer:
    """Layer of half a feed-forward, attention, convolution, half a feed-forward; the caller computes attention and
    depthwise convolution, which need state."""

    def __init__(self, take: _FastConformerTensors, index: int) -> None:
        at, config = f"encoder.layers.{index}", take.config
        self.heads, self.width = config.n_heads, config.d_model
        biased = config.use_bias
        names = "norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out"
        self.norm1, self.norm_look, self.norm_gate, self.norm2, self.norm_out = (
            take.norm(f"{at}.{name}") for name in names
        )
        self.up1, self.up2 = (take.linear(f"{at}.feed_forward{i}.linear1", biased=biased) for i in (1, 2))
        self.down1, self.down2 = (take.linear(f"{at}.feed_forward{i}.linear2", 0.5, biased) for i in (1, 2))
        attention = f"{at}.self_attn"
        # The bias u of the content scores is part of the query's bias; the bias v of the position scores differs
        # from it by a constant for all frames.
        u, v = (take.get(f"{attention}.pos_bias_{kind}") for kind in "uv")
        biases = torch.zeros(3, self.width)
        if biased:
            biases = torch.stack([take.get(f"{attention}.linear_{kind}.bias") for kind in "qkv"])
        biases[0] += u.flatten()
        weights = torch.cat([take.get(f"{attention}.linear_{kind}.weight") for kind in "qkv"])
        self.qkv = take.device.linear(weights, biases.flatten())
        self.query_bias = (v - u).to(take.device.torch_device)
        self.of_distances = take.to_device(take.get(f"{attention}.linear_pos.weight"), torch.float32)
        self.out = take.linear(f"{attention}.linear_out", biased=biased)
        self.into_gate = take.linear(f"{at}.conv.pointwise_conv1", biased=biased)
        self.close_gate = take.linear(f"{at}.conv.pointwise_conv2", biased=biased)
        weight, bias = take.get(f"{at}.conv.depthwise_conv.weight")[:, 0], take.bias(f"{at}.conv.depthwise_conv")
        self.norm_conv: tuple[Tensor, Tensor] | None = None
        if config.conv_norm_type == "layer_norm":
            self.norm_conv = take.norm(f"{at}.conv.batch_norm")
        else:
            mean, variance, scale, shift = (
                take.get(f"{at}.conv.batch_norm.{name}") for name in ("running_mean", "running_var", "weight", "bias")
            )
            scale = scale * (variance + 1e-5).rsqrt()
            weight, bias = weight * scale[:, None], shift + ((0.0 if bias is None else bias) - mean) * scale
        self.depthwise, self.depthwise_bias = (take.to_device(weight), None if bias is None else take.to_device(bias))

    def angles(self, waves: Tensor) -> RelativePositionKeys:
        """Projects position encodings to the keys of this layer."""
        keys = F.linear(waves.to(self.of_distances), self.of_distances)
        keys = keys.view(-1, self.heads, self.width // self.heads).permute(1, 2, 0)
        dtype = self.norm_out[0].dtype
        return RelativePositionKeys(keys.contiguous().to(dtype), (self.query_bias[:, None] @ keys).to(dtype))

    def attention_inputs(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Returns x after the first half feed-forward; queries, keys and values (n, frames, heads, head_dim)."""
        x = self.down1(F.silu(self.up1(_normed(x, self.norm1)), inplace=True), add=x)
        qkv = self.qkv(_normed(x, self.norm_look)).view(*x.shape[:2], 3, self.heads, -1)
        return x, (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])

    def conv_input(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x after attention, and the input of the depthwise convolution."""
        x = self.out(mixed, add=x)
        return x, F.glu(self.into_gate(_normed(x, self.norm_gate)), dim=-1)

    def finish(self, x: Tensor, convolved: Tensor) -> Tensor:
        if self.norm_conv is not None:
            convolved = _normed(convolved, self.norm_conv)
        x = self.close_gate(F.silu(convolved), add=x)
        x = self.down2(F.silu(self.up2(_normed(x, self.norm2)), inplace=True), add=x)
        return _normed(x, self.norm_out)


def _normed(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), *norm)


# --- NeMo's archives, read once ------------------------------------------------------------------------


def rename(key: str) -> str | None:
    """Converts a tensor's name to ours; None for what is no weight. Raises WeightsCorrupt for an unsupported part."""
    if key.startswith(("preprocessor.", "spec_augment", "encoder.pos_enc.")) or key.endswith("num_batches_tracked"):
        return None
    # The output layer's index is 2 where the model was trained with dropout, else 1.
    key = re.sub(r"^joint\.joint_net\.[12]\.", "joint.out.", key)
    key = re.sub(r"^(ctc_)?decoder\.decoder_layers\.0\.", "ctc.", key)
    if key.startswith(("encoder.pre_encode.", "encoder.layers.", "decoder.prediction.", "joint.", "ctc.")):
        return key
    raise WeightsCorrupt(f"the checkpoint has a tensor {key}", "those of a FastConformer with CTC or a transducer")


def is_package_folder(folder: Path) -> bool:
    """Returns whether `folder` holds one NeMo archive, or is one."""
    return archive.find_archive(folder) is not None


def convert(source: Path, target: Path) -> None:
    """Converts the archive at `source` into a checkpoint in `target`: config.json, pieces.json, model.safetensors."""
    path = archive.find_archive(source)
    assert path is not None
    settings = archive.settings(path)
    config = {"model_type": "fastconformer", **msgspec.to_builtins(Config.of(settings))}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "pieces.json").write_text(json.dumps(archive.pieces(settings), ensure_ascii=False))
    # Layers may share a tensor: safetensors needs copies.
    ours = {ours: tensor.clone() for name, tensor in archive.tensors(path, target).items() if (ours := rename(name))}
    save_file(ours, target / "model.safetensors")


CONVERTER = WeightsConverter(is_package_folder, convert)
