"""U2++: WeNet's streaming Conformer. CTC decodes chunk by chunk; two attention decoders, one from left to right,
one from right to left, rescore its hypotheses at the end.

Attention has WeNet's relative positions without a shift: a query is scored against the position of a key, counted
from the session's start, and not against their distance. So a key can be cached with its position added, and the
rest of the position term is one number for each key and head.

Source  arXiv:2012.05481 (U2), arXiv:2106.05642 (U2++); numbers match WeNet's modules,
        tests/models/generate_u2pp.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.kaldi_fbank import Fbank, FbankOptions
from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.wenet import wenet
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.registry import AsrCard

WAVELENGTHS = 10_000.0
"""Wavelengths of the position encoding range from 2 pi frames to that many times this."""

_SHARED: dict[str, Any] = {
    "task": "asr",
    "kind": "u2pp",
    "source": "arXiv:2106.05642",
    "hub": "openspeech/wenet-models",
    "max_segment_ms": 30_000,
    "min_segment_ms": 100,
    "tokens_per_s": 12.0,
    "heads": ("ctc",),
    "chunk": 16,
    "frame_samples": 640,
    "lookahead_samples": 720,
}


def _card(corpus: str, language: str, parameters: int, licence: str) -> AsrCard:
    return AsrCard(
        name=f"u2pp-{corpus}-{language}",
        languages=(language,),
        parameters=parameters,
        licence=licence,
        files=(f"{corpus}_u2pp_conformer_exp.tar.gz",),
        **_SHARED,
    )


CARDS = (
    _card("librispeech", "en", 49_400_000, "CC-BY-4.0"),
    _card("gigaspeech", "en", 123_600_000, "not stated"),
    _card("wenetspeech", "zh", 122_600_000, "CC-BY-4.0"),
    _card("aishell", "zh", 48_300_000, "Apache-2.0"),
)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes, as `convert` writes them: WeNet stores them in a train.yaml."""

    vocab: int
    """Number of tokens, with the blank and the start and end of a sentence."""
    blank: int = 0
    sos: int
    eos: int
    mels: int = 80
    width: int = 256
    heads: int = 4
    inner: int = 2_048
    layers: int = 12
    kernel: int = 15
    conv_norm: str = "layer_norm"
    """layer_norm or batch_norm."""
    subsampling: int = 4
    norm_eps: float = 1e-5
    decoder_heads: int = 4
    decoder_inner: int = 2_048
    decoder_layers: int = 3
    reverse_layers: int = 3
    decoder_norm_eps: float = 1e-5
    chunk: int = 16
    """Encoder frames that attend to each other."""
    left_chunks: int = 4
    """Chunks before its own that a frame attends to."""
    ctc_weight: float = 0.3
    """Weight of the CTC score when hypotheses are rescored."""
    reverse_weight: float = 0.3
    """Weight of the right-to-left decoder; the left-to-right one has the rest."""

    @property
    def ctc_blank_id(self) -> int:
        return self.blank

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads a checkpoint's config.json. Raises WeightsCorrupt."""
        missing = [name for name in ("vocab", "sos", "eos") if settings.get(name) is None]
        if missing:
            raise WeightsCorrupt(f"config.json does not say {', '.join(missing)}", "convert writes it")
        config = super().of(settings)
        if config.subsampling not in wenet.STRIDED:
            raise WeightsCorrupt(f"subsampling={config.subsampling}", f"one of {sorted(wenet.STRIDED)}")
        if config.conv_norm not in ("layer_norm", "batch_norm"):
            raise WeightsCorrupt(f"conv_norm={config.conv_norm}", "layer_norm or batch_norm")
        return config


class Model(StreamingModel):
    """Encoder, CTC head and decoders: StreamingModel of models/interfaces.py.

    State   for each layer: keys and values of the last chunks, and the last inputs of its convolution.
    """

    heads = ("ctc",)

    def __init__(self, config: Config, tensors: dict[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        self.vocab_size, self.blank_id, self.frame_block = config.vocab, config.blank, config.chunk
        self.ctc_weight = config.ctc_weight
        self.left = config.left_chunks * config.chunk
        # WeNet reads 16-bit numbers, and cuts frames as Kaldi does.
        self.fbank = Fbank(FbankOptions(mels=config.mels, scale=32_768.0), device.torch_device)
        self.frame_samples = self.fbank.hop_samples * config.subsampling
        take = wenet.WenetTensors(tensors, device)
        self.stem = wenet.WenetStem(take, config.subsampling, config.mels, config.width)
        self.positions = _RelativePositions(config, take)
        self.layers = [_U2ppLayer(config, take, i) for i in range(config.layers)]
        self.after_norm = take.norm("encoder.after_norm", config.norm_eps)
        self.ctc_head = take.linear("ctc.ctc_lo")
        self.decoders = [
            wenet.WenetDecoder(
                take,
                f"decoder.{side}_decoder",
                layers=layers,
                heads=config.decoder_heads,
                eps=config.decoder_norm_eps,
                sos=config.sos,
                eos=config.eos,
            )
            for side, layers in (("left", config.decoder_layers), ("right", config.reverse_layers))
            if layers
        ]

    def count_frames(self, samples: int) -> int:
        return self.stem.frames(self.fbank.count_frames(samples))

    def audio_window(self, chunk: int) -> AudioWindow:
        features = self.stem.features(chunk)
        return AudioWindow(0, (features - 1) * self.fbank.hop_samples + self.fbank.window_samples)

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        config, dtype = self.config, self.device.dtype
        ring = StateSpec((config.heads, self.left + chunk, config.width // config.heads), dtype, None)
        tail = StateSpec((config.kernel - 1, config.width), dtype)
        specs = {"keys": ring, "values": ring, "tail": tail}
        return {f"{name}.{i}": spec for i in range(config.layers) for name, spec in specs.items()}

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        kernels, left, block = self.device.kernels, self.left, self.frame_block

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            mixed = torch.empty(*q.shape[:2], self.config.width, dtype=q.dtype, device=q.device)
            ring = state[f"keys.{i}"], state[f"values.{i}"]
            positions = chunk.rows, chunk.start_frames, chunk.frames
            kernels.window_attention(q, k, v, *ring, *positions, bias, left, block, mixed)
            return mixed

        def convolve(i: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            mixed = torch.empty_like(x)
            kernels.causal_conv(x, weight, bias, state[f"tail.{i}"], chunk.rows, chunk.frames, mixed)
            return mixed

        x = self.stem(self.fbank.frames_inside(chunk.pcm))
        return self._layers(x, self.positions(chunk.start_frames, left, x.shape[1]), attend, convolve)

    def encode_utterance(self, pcm: Tensor) -> Tensor:
        """Encodes a whole utterance (samples,) at once, under the mask that chunks imply: (1, frames, width).
        Reference for tests: memory grows with the square of the length."""
        frames = self.count_frames(pcm.shape[0])
        if not frames:
            return torch.empty(1, 0, self.config.width, dtype=self.device.dtype, device=self.device.torch_device)
        frame = torch.arange(frames, device=self.device.torch_device)
        first = frame[:, None] // self.frame_block * self.frame_block
        hidden = (frame < first - self.left) | (frame >= first + self.frame_block)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            query, key, value = (each.float().transpose(1, 2) for each in (q, k, v))
            scores = (query @ key.transpose(2, 3) + bias) * q.shape[3] ** -0.5
            mixed: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ value
            return mixed.transpose(1, 2).flatten(2).to(q.dtype)

        def convolve(i: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            wide = F.pad(x, (0, 0, weight.shape[1] - 1, 0)).transpose(1, 2)
            return F.conv1d(wide, weight[:, None], bias, groups=len(weight)).transpose(1, 2)

        x = self.stem(self.fbank(pcm[None].to(self.device.torch_device)))
        return self._layers(x, self.positions(frame[:1], 0, frames), attend, convolve)

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        return F.log_softmax(self.ctc_head(hidden).float(), dim=-1)

    @property
    def rescorer(self) -> Model:
        return self

    def rescore(self, hidden: Tensor, guesses: list[list[int]]) -> list[float]:
        """Scores several transcripts of one utterance with the decoders, natural log; the best has the greatest
        sum of this and `ctc_weight` times the CTC score.

        In      hidden (frames, width), at least one frame; guesses without start and end
        """
        if not guesses:
            return []
        forwards = self.decoders[0](hidden, guesses)
        if len(self.decoders) == 1 or not self.config.reverse_weight:
            return [float(score) for score in forwards.tolist()]
        backwards = self.decoders[1](hidden, [guess[::-1] for guess in guesses])
        return [float(score) for score in torch.lerp(forwards, backwards, self.config.reverse_weight).tolist()]

    def _layers(
        self,
        x: Tensor,
        positions: tuple[Tensor, Tensor],
        attend: Callable[..., Tensor],
        convolve: Callable[..., Tensor],
    ) -> Tensor:
        for layer, shift, bias in zip(self.layers, *self.positions.split(*positions), strict=True):
            x = layer(x, shift, bias, attend, convolve)
        return self.after_norm(x)


class _RelativePositions:
    """Position terms of the keys: shifts that each layer adds to its new keys, and biases of the scores of all
    keys.

    A score is (q + u) . k + (q + v) . p, with p the layer's projection of the key's position and u, v of the head.
    That is (q + u) . (k + p) + (v - u) . p, whose last part does not depend on the query.
    """

    def __init__(self, config: Config, take: wenet.WenetTensors) -> None:
        self.layers, self.heads, self.width = config.layers, config.heads, config.width
        steps = torch.arange(0, config.width, 2, dtype=torch.float64, device=take.device.torch_device)
        self.speeds = torch.exp(steps * (-math.log(WAVELENGTHS) / config.width))
        images, biases = [], []
        for i in range(config.layers):
            at = f"encoder.encoders.{i}.self_attn"
            # WeNet interleaves sines and cosines; here are all sines, then all cosines.
            image = take.get(f"{at}.linear_pos.weight")
            image = torch.cat([image[:, 0::2], image[:, 1::2]], dim=1)
            images.append(image)
            bias_difference = take.get(f"{at}.pos_bias_v") - take.get(f"{at}.pos_bias_u")
            biases.append(torch.einsum("hd,hdw->hw", bias_difference, image.view(*bias_difference.shape, -1)))
        self.image, self.dtype = take.device.linear(torch.cat(images)), take.device.dtype
        self.biases = torch.cat(biases).to(take.device.torch_device)

    def __call__(self, seen: Tensor, left: int, frames: int) -> tuple[Tensor, Tensor]:
        """Returns for rows at frame `seen` (n,): shifts (n, frames, layers * width) of their next keys, and biases
        (n, layers * heads, left + frames), the first of which belongs to frame seen - left."""
        # A session may last for days, which float32 angles cannot resolve: angles are added, in parts.
        start = (seen - left).double()[:, None] * self.speeds
        steps = torch.arange(left + frames, dtype=torch.float64, device=seen.device)[:, None] * self.speeds
        sin, cos = start.sin().float()[:, None], start.cos().float()[:, None]
        sin_step, cos_step = steps.sin().float(), steps.cos().float()
        waves = torch.cat([sin * cos_step + cos * sin_step, cos * cos_step - sin * sin_step], dim=-1)
        shifts: Tensor = self.image(waves[:, left:].to(self.dtype))
        return shifts, self.biases @ waves.transpose(1, 2)

    def split(self, shifts: Tensor, biases: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Splits by layer: shifts (n, frames, heads, head_dim), biases (n, heads, 1, left + frames)."""
        by_layer = shifts.view(*shifts.shape[:2], self.layers, self.heads, -1).unbind(2)
        return list(by_layer), list(biases.view(len(biases), self.layers, self.heads, 1, -1).unbind(1))


class _U2ppLayer:
    """Half a feed-forward, attention, convolution, the other half."""

    def __init__(self, config: Config, take: wenet.WenetTensors, i: int) -> None:
        at = f"encoder.encoders.{i}"
        self.index, self.heads = i, config.heads
        self.norms = [
            take.norm(f"{at}.norm_{name}", config.norm_eps) for name in ("ff_macaron", "mha", "conv", "ff", "final")
        ]
        self.up, self.down = _feed_forward(take, f"{at}.feed_forward_macaron")
        self.up2, self.down2 = _feed_forward(take, f"{at}.feed_forward")
        weights, biases = (
            [take.get(f"{at}.self_attn.linear_{name}.{part}") for name in "qkv"] for part in ("weight", "bias")
        )
        biases[0] = biases[0] + take.get(f"{at}.self_attn.pos_bias_u").flatten()
        self.qkv = take.device.linear(torch.cat(weights), torch.cat(biases))
        self.mix = take.linear(f"{at}.self_attn.linear_out")

        conv = f"{at}.conv_module"
        weight, bias = (take.get(f"{conv}.pointwise_conv1.{part}") for part in ("weight", "bias"))
        self.gated = take.device.linear(weight[:, :, 0], bias)
        # WeNet pads before the gate: the input before a session's start is not zero but the gate of zero. That
        # constant is subtracted from everything that the convolution reads, and its sum is in the bias.
        rest = F.glu(bias, dim=0)
        weight, bias = take.get(f"{conv}.depthwise_conv.weight")[:, 0], take.get(f"{conv}.depthwise_conv.bias")
        bias = bias + weight.sum(1) * rest
        self.conv_norm = None
        if config.conv_norm == "layer_norm":
            self.conv_norm = take.norm(f"{conv}.norm", 1e-5)
        else:
            scale = take.get(f"{conv}.norm.weight") * (take.get(f"{conv}.norm.running_var") + 1e-5).rsqrt()
            weight = weight * scale[:, None]
            bias = (bias - take.get(f"{conv}.norm.running_mean")) * scale + take.get(f"{conv}.norm.bias")
        self.rest, self.weight, self.bias = (take.to_device(each) for each in (rest, weight, bias))
        self.point = take.device.linear(
            take.get(f"{conv}.pointwise_conv2.weight")[:, :, 0], take.get(f"{conv}.pointwise_conv2.bias")
        )

    def __call__(
        self, x: Tensor, shift: Tensor, bias: Tensor, attend: Callable[..., Tensor], convolve: Callable[..., Tensor]
    ) -> Tensor:
        before, attention, convolution, after, final = self.norms
        x = self.down(F.silu(self.up(before(x)), inplace=True), add=x)

        q, k, v = self.qkv(attention(x)).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        k += shift
        scores = bias.expand(-1, -1, x.shape[1], -1)
        x = self.mix(attend(self.index, q, k, v, scores), add=x)

        gated = F.glu(self.gated(convolution(x))).sub_(self.rest)
        mixed = convolve(self.index, gated, self.weight, self.bias)
        if self.conv_norm is not None:
            mixed = self.conv_norm(mixed)
        x = self.point(F.silu(mixed), add=x)

        x = self.down2(F.silu(self.up2(after(x)), inplace=True), add=x)
        return final(x)


def _feed_forward(take: wenet.WenetTensors, at: str) -> tuple[Any, Any]:
    down, bias = take.get(f"{at}.w_2.weight"), take.get(f"{at}.w_2.bias")
    return take.linear(f"{at}.w_1"), take.device.linear(down * 0.5, bias * 0.5)  # each adds half of its output


# --- WeNet's own form -----------------------------------------------------------------------------------


rename = wenet.rename
is_package_folder = wenet.is_package_folder


def convert(source: Path, target: Path) -> None:
    """Converts an experiment of WeNet, folder or archive, into a checkpoint in `target`. Raises WeightsCorrupt."""
    wenet.convert(source, target, {"model_type": "u2pp"})


CONVERTER = WeightsConverter(is_package_folder, convert)
