"""Trainable form of the encoder in models/asr/moonshine/window_encoder.py, and its checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve import units
from asr_serve.models.asr.moonshine import moonshine, moonshine_streaming
from asr_serve.models.asr.moonshine.window_encoder import SHORT, STRIDE, TAPS, WindowEncoderConfig

FRAME_MS = 6.0
"""Length of a short frame; four of them are a frame of Moonshine's."""
RIDGE = 1e-3
"""Ridge as a share of the mean square of the inputs, which bounds weights that little audio does not determine."""
LONGEST_S = 30
"""Longest audio that Moonshine was trained for; its cards cut speech before that."""


def config_of(teacher: moonshine.Config, windows: Sequence[tuple[int, int]]) -> moonshine_streaming.Config:
    """Config of the student: the teacher's sizes, with an attention window (back, ahead) for each layer."""
    encoder = WindowEncoderConfig(
        hidden_size=teacher.hidden_size,
        intermediate_size=teacher.intermediate_size,
        num_hidden_layers=teacher.encoder_num_hidden_layers,
        num_attention_heads=teacher.encoder_num_attention_heads,
        head_dim=teacher.hidden_size // teacher.encoder_num_attention_heads,
        frame_ms=FRAME_MS,
        sliding_windows=tuple(windows),
    )
    assert SHORT * encoder.short_samples == moonshine.STEM_STRIDE
    heads = teacher.decoder_num_attention_heads
    settings = {
        "vocab_size": teacher.vocab_size,
        "hidden_size": teacher.hidden_size,
        "intermediate_size": teacher.intermediate_size,
        "num_hidden_layers": teacher.decoder_num_hidden_layers,
        "num_attention_heads": heads,
        # The limit for both frames and tokens: the number of frames, which is larger.
        "max_position_embeddings": units.s_to_samples(LONGEST_S) // moonshine.STEM_STRIDE,
        # The added half is lost in rounding down, to an even number.
        "partial_rotary_factor": (2 * teacher.rotary_half(heads) + 0.5) / teacher.head_dim,
        "rope_theta": teacher.rope_theta,
        "encoder_config": msgspec.to_builtins(encoder),
    }
    return moonshine_streaming.Config.of(settings)


class StreamingStudent(nn.Module):
    """Encoder with positions added, the input of the decoder's cross-attention. Parameters have the names of a
    checkpoint."""

    def __init__(self, config: moonshine_streaming.Config) -> None:
        super().__init__()
        self.config = config.encoder_config
        self.encoder = _StudentEncoder(self.config)
        self.decoder = _StudentPositions(config.max_position_embeddings, self.config.hidden_size)

    def start_from(self, teacher: dict[str, Tensor]) -> None:
        """Copy the teacher's layers, which then only have to adapt to narrower windows and to new convolutions."""
        own = self.state_dict()
        for name, tensor in own.items():
            if name.endswith(".gamma"):
                teacher_name = name.replace(".gamma", ".weight").replace("final_norm", "layer_norm")
                tensor.copy_(teacher[f"model.{teacher_name}"] - 1)
            elif name.startswith("encoder.layers."):
                tensor.copy_(teacher[f"model.{name}"])

    @torch.no_grad()
    def fit_convolutions(self, examples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Initialize the last convolution by ridge regression on the random ones before it, so that the copied
        layers get the input that they know; gradient steps would take thousands.

        examples    pcm (clips, n), samples (clips,) as in `forward`, and the target output of the convolutions,
                    (frames of all clips, width)
        """
        last = self.encoder.embedder.conv2
        assert last.bias is not None
        size = TAPS * last.in_channels + 1
        gram = torch.zeros(size, size, dtype=torch.float64, device=last.weight.device)
        products = torch.zeros(size, last.out_channels, dtype=torch.float64, device=last.weight.device)
        for pcm, samples, target in examples:
            shorts, frames = self._shorts(pcm, samples)
            middle = F.pad(self.encoder.embedder.middle(shorts), (TAPS - 1, 0)).unfold(2, TAPS, STRIDE)
            rows = middle.permute(0, 2, 1, 3).flatten(2)
            inputs = torch.cat([row[:count] for row, count in zip(rows, frames.tolist(), strict=True)])
            inputs = F.pad(inputs, (0, 1), value=1.0).double()  # the bias
            gram += inputs.T @ inputs
            products += inputs.T @ target.double()
        gram.diagonal()[:-1].add_(RIDGE * gram.diagonal()[:-1].mean())
        solution = torch.linalg.solve(gram, products).float()
        last.weight.copy_(solution[:-1].T.view_as(last.weight))
        last.bias.copy_(solution[-1])

    def frames(self, samples: int) -> int:
        """Number of frames of a clip of `samples`."""
        return -(-max(samples // self.config.short_samples, 1) // SHORT)

    def _shorts(self, pcm: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Samples as (clips, short frames, samples of each), and the number of frames of each clip."""
        width = self.config.short_samples
        shorts = (samples // width).clamp(min=1)
        return F.pad(pcm, (0, -pcm.shape[1] % width)).view(len(pcm), -1, width), (shorts + SHORT - 1) // SHORT

    def forward(self, pcm: Tensor, samples: Tensor) -> tuple[list[Tensor], Tensor]:
        """Encode clips.

        In      pcm (clips, n) float32, zeros past each clip; samples (clips,)
        Out     hidden states (clips, frames, width): after the convolutions, after each layer, and at the end;
                number of frames (clips,)
        """
        shorts, frames = self._shorts(pcm, samples)
        x = self.encoder.embedder(shorts).float()
        at = torch.arange(x.shape[1], device=x.device)
        offset = at - at[:, None]
        # Frames past a clip's end attend to themselves, so that the softmax is finite; they are not used.
        allowed = (at < frames[:, None])[:, None] | (offset == 0)
        hidden = [x]
        for layer, (back, ahead) in zip(self.encoder.layers, self.config.reach, strict=True):
            x = layer(x, (allowed & (offset >= -back) & (offset <= ahead))[:, None])
            hidden.append(x)
        positions = at.clamp(max=self.decoder.pos_emb.num_embeddings - 1)
        return [*hidden, self.encoder.final_norm(x) + self.decoder.pos_emb(positions)], frames


class _StudentEncoder(nn.Module):
    def __init__(self, config: WindowEncoderConfig) -> None:
        super().__init__()
        self.embedder = _StudentEmbedder(config)
        self.layers = nn.ModuleList(_StudentLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = _StudentNorm(config.hidden_size)


class _StudentPositions(nn.Module):
    """Positions, which belong to the decoder in a checkpoint, and are trained with the encoder."""

    def __init__(self, frames: int, width: int) -> None:
        super().__init__()
        self.pos_emb = nn.Embedding(frames, width)
        nn.init.zeros_(self.pos_emb.weight)


class _StudentNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], self.gamma + 1)


class _StudentEmbedder(nn.Module):
    def __init__(self, config: WindowEncoderConfig) -> None:
        super().__init__()
        self.comp = nn.ParameterDict({"log_k": nn.Parameter(torch.tensor(0.75).log())})
        width = config.hidden_size
        self.linear = nn.Linear(config.short_samples, width, bias=False)
        self.conv1 = nn.Conv1d(width, 2 * width, TAPS, STRIDE)
        self.conv2 = nn.Conv1d(2 * width, width, TAPS, STRIDE)
        for product in (self.linear, self.conv1):  # keeps the scale of the input, so that a step changes it little
            nn.init.kaiming_normal_(product.weight)

    def middle(self, shorts: Tensor) -> Tensor:
        """Input of the last convolution, (clips, channels, frames)."""
        centred = shorts - shorts.mean(-1, keepdim=True)
        level = centred.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        x = F.silu(self.linear(torch.asinh(self.comp["log_k"].exp() * (centred / level)))).transpose(1, 2)
        return F.silu(self.conv1(F.pad(x, (TAPS - 1, 0))))

    def forward(self, shorts: Tensor) -> Tensor:
        x: Tensor = self.conv2(F.pad(self.middle(shorts), (TAPS - 1, 0)))
        return x.transpose(1, 2)


class _StudentLayer(nn.Module):
    def __init__(self, config: WindowEncoderConfig) -> None:
        super().__init__()
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = _StudentNorm(width), _StudentNorm(width)
        self.self_attn = nn.ModuleDict({f"{p}_proj": nn.Linear(width, width, bias=False) for p in "qkvo"})
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, config.intermediate_size), "fc2": nn.Linear(config.intermediate_size, width)}
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        clips, frames, width = x.shape
        normed = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[f"{p}_proj"](normed).view(clips, frames, self.heads, -1).transpose(1, 2) for p in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        x = x + self.self_attn["o_proj"](mixed.reshape(clips, frames, width))
        up: Tensor = F.gelu(self.mlp["fc1"](self.post_attention_layernorm(x)))
        out: Tensor = x + self.mlp["fc2"](up)
        return out


def save(
    student: StreamingStudent,
    config: moonshine_streaming.Config,
    teacher: dict[str, Tensor],
    source: Path,
    folder: Path,
) -> None:
    """Write a checkpoint of moonshine_streaming: the student's encoder with its teacher's decoder. `source`:
    folder of the teacher's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor.float().cpu() for name, tensor in student.state_dict().items()}
    decoder = {n: t for n, t in teacher.items() if n.startswith(("model.decoder.", "proj_out."))}
    settings = {"model_type": "moonshine_streaming", **msgspec.to_builtins(config)}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    for name in ("tokenizer.bin", "tokenizer.json"):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    part = folder / "model.part"
    save_file({n: t.contiguous() for n, t in (decoder | tensors).items()}, part)
    os.replace(part, folder / "model.safetensors")
