"""An encoder of models/asr/moonshine/window_encoder.py that can be trained, and the checkpoint it ends in."""

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
"""Of a short frame: four of them are as long as a frame of Moonshine's."""
RIDGE = 1e-3
"""Of the mean square of what is solved with: keeps what little audio does not tell from growing."""
LONGEST_S = 30
"""What Moonshine was made for; its cards cut speech before."""


def config_of(teacher: moonshine.Config, windows: Sequence[tuple[int, int]]) -> moonshine_streaming.Config:
    """The student's sizes: the teacher's, with a window for each layer."""
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
        # One limit for both: frames, of which there are more than tokens.
        "max_position_embeddings": units.s_to_samples(LONGEST_S) // moonshine.STEM_STRIDE,
        # The half is lost in rounding down, and what it rounds to is even.
        "partial_rotary_factor": (2 * teacher.rotary_half(heads) + 0.5) / teacher.head_dim,
        "rope_theta": teacher.rope_theta,
        "encoder_config": msgspec.to_builtins(encoder),
    }
    return moonshine_streaming.Config.of(settings)


class StreamingStudent(nn.Module):
    """The encoder with positions, as a decoder would hear it. Parameters have the names of a checkpoint."""

    def __init__(self, config: moonshine_streaming.Config) -> None:
        super().__init__()
        self.config = config.encoder_config
        self.encoder = _StudentEncoder(self.config)
        self.decoder = _StudentPositions(config.max_position_embeddings, self.config.hidden_size)

    def start_from(self, teacher: dict[str, Tensor]) -> None:
        """Take over the teacher's layers: what is left to learn is to hear with less around."""
        own = self.state_dict()
        for name, tensor in own.items():
            if name.endswith(".gamma"):
                theirs = name.replace(".gamma", ".weight").replace("final_norm", "layer_norm")
                tensor.copy_(teacher[f"model.{theirs}"] - 1)
            elif name.startswith("encoder.layers."):
                tensor.copy_(teacher[f"model.{name}"])

    @torch.no_grad()
    def fit_convolutions(self, examples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Let the convolutions begin with the best that their last one can do: what comes before it is random, and
        it is solved for (ridge regression). The layers know what they are to hear; steps would take thousands.

        examples    pcm (clips, n), samples (clips,) as in `forward`, and what the convolutions are to make of all
                    frames, (frames of all clips, width)
        """
        last = self.encoder.embedder.conv2
        assert last.bias is not None
        size = TAPS * last.in_channels + 1
        seen = torch.zeros(size, size, dtype=torch.float64, device=last.weight.device)
        wanted = torch.zeros(size, last.out_channels, dtype=torch.float64, device=last.weight.device)
        for pcm, samples, target in examples:
            shorts, frames = self._shorts(pcm, samples)
            middle = F.pad(self.encoder.embedder.middle(shorts), (TAPS - 1, 0)).unfold(2, TAPS, STRIDE)
            rows = middle.permute(0, 2, 1, 3).flatten(2)
            given = torch.cat([row[:count] for row, count in zip(rows, frames.tolist(), strict=True)])
            given = F.pad(given, (0, 1), value=1.0).double()  # the bias
            seen += given.T @ given
            wanted += given.T @ target.double()
        seen.diagonal()[:-1].add_(RIDGE * seen.diagonal()[:-1].mean())
        found = torch.linalg.solve(seen, wanted).float()
        last.weight.copy_(found[:-1].T.view_as(last.weight))
        last.bias.copy_(found[-1])

    def frames(self, samples: int) -> int:
        """Of a clip."""
        return -(-max(samples // self.config.short_samples, 1) // SHORT)

    def _shorts(self, pcm: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """(clips, short frames, their samples), and each clip's frames."""
        width = self.config.short_samples
        shorts = (samples // width).clamp(min=1)
        return F.pad(pcm, (0, -pcm.shape[1] % width)).view(len(pcm), -1, width), (shorts + SHORT - 1) // SHORT

    def forward(self, pcm: Tensor, samples: Tensor) -> tuple[list[Tensor], Tensor]:
        """In      pcm (clips, n) float32, zeros past each clip; samples (clips,)
        Out     hidden (clips, frames, width): after the convolutions, after each layer, and at the end; frames
                (clips,)
        """
        shorts, frames = self._shorts(pcm, samples)
        x = self.encoder.embedder(shorts).float()
        at = torch.arange(x.shape[1], device=x.device)
        away = at - at[:, None]
        # Frames past a clip's end see themselves at least, which is a number, and count nowhere.
        there = (at < frames[:, None])[:, None] | (away == 0)
        heard = [x]
        for layer, (back, ahead) in zip(self.encoder.layers, self.config.reach, strict=True):
            x = layer(x, (there & (away >= -back) & (away <= ahead))[:, None])
            heard.append(x)
        known = at.clamp(max=self.decoder.pos_emb.num_embeddings - 1)
        return [*heard, self.encoder.final_norm(x) + self.decoder.pos_emb(known)], frames


class _StudentEncoder(nn.Module):
    def __init__(self, config: WindowEncoderConfig) -> None:
        super().__init__()
        self.embedder = _StudentEmbedder(config)
        self.layers = nn.ModuleList(_StudentLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = _StudentNorm(config.hidden_size)


class _StudentPositions(nn.Module):
    """What is the decoder's in a checkpoint, and taught with the encoder."""

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
        for product in (self.linear, self.conv1):  # as loud as it came, so that a step changes it little
            nn.init.kaiming_normal_(product.weight)

    def middle(self, shorts: Tensor) -> Tensor:
        """What the last convolution hears: (clips, channels, frames)."""
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
    """A checkpoint of moonshine_streaming: the student's encoder before its teacher's decoder. `source` holds the
    teacher's tokeniser."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor.float().cpu() for name, tensor in student.state_dict().items()}
    said = {n: t for n, t in teacher.items() if n.startswith(("model.decoder.", "proj_out."))}
    settings = {"model_type": "moonshine_streaming", **msgspec.to_builtins(config)}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    for name in ("tokenizer.bin", "tokenizer.json"):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    part = folder / "model.part"
    save_file({n: t.contiguous() for n, t in (said | tensors).items()}, part)
    os.replace(part, folder / "model.safetensors")
