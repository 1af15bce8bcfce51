"""Adaptors of FunASR's speech LLMs: encoder frames, a few at a time, to embeddings of the language model.

Source: numbers match funasr 1.4.16's adaptor classes Linear and Transformer, of one clip at a time.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm.sanm_encoder import EncoderTensors, check_heads
from asr_serve.models.packing import PackedBatch, pack_clips, packed_buffer

AdaptorKind = Literal["Linear", "Transformer"]
NORM_EPS = 1e-12


class AdaptorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, under the names of `audio_adaptor_conf` in FunASR's config.yaml."""

    downsample_rate: int = 2
    """Encoder frames of an embedding."""
    encoder_dim: int = 512
    llm_dim: int = 1_024
    """Width of the embeddings."""
    ffn_dim: int = 2_048
    n_layer: int = 2
    """Transformer blocks; Linear has none."""
    attention_heads: int = 8


class Adaptor:
    """Two linear layers over `downsample_rate` frames at once; Transformer has blocks of self-attention after them.

    In      frames (packing.total, encoder_dim), and the packing
    Out     embeddings (packing.total, llm_dim), and theirs
    """

    def __init__(self, take: EncoderTensors, at: str, kind: AdaptorKind, config: AdaptorConfig) -> None:
        """`at`: prefix of its tensors' names."""
        self.kind, self.config, self.device = kind, config, take.device
        if config.downsample_rate < 1:
            raise WeightsCorrupt(f"downsample_rate={config.downsample_rate}", "a whole number from 1")
        if kind == "Transformer":
            check_heads(config.attention_heads, config.llm_dim)
        grouped = config.encoder_dim * config.downsample_rate
        self.first = take.linear(config.ffn_dim, grouped, f"{at}linear1")
        self.second = take.linear(config.llm_dim, config.ffn_dim, f"{at}linear2")
        blocks = config.n_layer if kind == "Transformer" else 0
        self.blocks = [
            _AdaptorBlock(take, f"{at}blocks.{i}", config.llm_dim, config.attention_heads) for i in range(blocks)
        ]

    def count(self, frames: int) -> int:
        """Number of embeddings of encoder frames. Linear leaves out frames at the end that fill none; of fewer than
        one embedding it makes one, as Transformer always does."""
        whole = frames // self.config.downsample_rate
        return max(1, whole) if self.kind == "Linear" else math.ceil(frames / self.config.downsample_rate)

    def __call__(self, frames: Tensor, packing: PackedBatch) -> tuple[Tensor, PackedBatch]:
        grouped, packing = self._group(frames, packing)
        x = self.second(self.first(grouped).relu_())
        for block in self.blocks:
            x = block(x, packing)
        return x, packing

    def _group(self, frames: Tensor, packing: PackedBatch) -> tuple[Tensor, PackedBatch]:
        """Joins neighbouring frames of each clip; the last ones of a clip are filled with zeros."""
        rate = self.config.downsample_rate
        if rate == 1:
            return frames, packing
        width = frames.shape[1]
        groups = pack_clips([self.count(count) for count in packing.frames], self.device.frame_block)
        grouped = packed_buffer(groups, rate * width, frames.dtype, self.device.torch_device)
        grouped[: sum(groups.frames)] = 0
        clips = zip(packing.offsets, packing.frames, groups.offsets, groups.frames, strict=True)
        for offset, count, start, made in clips:
            used = min(count, made * rate)
            grouped[start : start + made].view(-1, width)[:used] = frames[offset : offset + used]
        return grouped, groups


class _AdaptorBlock:
    def __init__(self, take: EncoderTensors, at: str, width: int, heads: int) -> None:
        self.device, self.heads = take.device, heads
        self.norm1, self.norm2 = (take.norm(f"{at}.norm{i}", width, NORM_EPS) for i in (1, 2))
        self.qkv = take.linear(width, width, *(f"{at}.self_attn.linear_{name}" for name in "qkv"))
        self.out = take.linear(width, width, f"{at}.self_attn.linear_out")
        self.up = take.linear(width // 4, width, f"{at}.feed_forward.w_1")
        self.down = take.linear(width, width // 4, f"{at}.feed_forward.w_2")

    def __call__(self, x: Tensor, packing: PackedBatch) -> Tensor:
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1)
        x = self.out(self.device.attention(qkv, packing), add=x)
        out: Tensor = self.down(self.up(self.norm2(x)).relu_(), add=x)
        return out


def low_frame_rate_tokens(frames: int) -> int:
    """Embeddings that FunASR's `use_low_frame_rate` leaves of `frames` feature frames: about an eighth. Adaptors of
    such models are trained to put what was said into the first ones.

    >>> [low_frame_rate_tokens(frames) for frames in (1, 8, 9, 100)]
    [1, 1, 2, 13]
    """
    for _ in range(2):
        frames = (frames - 3 + 2) // 2 + 1
    return (frames - 1) // 2 + 1


def truncate(x: Tensor, packing: PackedBatch, kept: list[int], block: int) -> tuple[Tensor, PackedBatch]:
    """The first `kept[i]` rows of each clip i, packed again."""
    made = pack_clips(kept, block)
    out = torch.zeros(made.total, x.shape[1], dtype=x.dtype, device=x.device)
    for offset, start, count in zip(packing.offsets, made.offsets, kept, strict=True):
        out[start : start + count] = x[offset : offset + count]
    return out, made


def take_clips(x: Tensor, packing: PackedBatch, clips: list[int], block: int) -> tuple[Tensor, PackedBatch]:
    """Rows of some of the clips, packed again; the packing as it is where these are all."""
    if len(clips) == len(packing.frames):
        return x, packing
    made = pack_clips([packing.frames[clip] for clip in clips], block)
    out = torch.zeros(made.total, x.shape[1], dtype=x.dtype, device=x.device)
    for clip, start, count in zip(clips, made.offsets, made.frames, strict=True):
        out[start : start + count] = x[packing.offsets[clip] :][:count]
    return out, made
