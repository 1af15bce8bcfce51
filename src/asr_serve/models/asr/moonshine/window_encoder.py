"""Encoder with sliding-window attention and no positions: for whole utterances, or for sessions in chunks.

Source  Moonshine v2, arXiv:2602.12241; numbers match transformers' MoonshineStreamingEncoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingEncoder
from asr_serve.models.packing import PackedBatch, pack_clips

TAPS, STRIDE = 5, 2
"""Kernel and stride of both convolutions: four short frames become one encoder frame."""
SHORT = STRIDE * STRIDE
QUERIES = 16
"""Query frames of a block when a whole utterance is encoded."""
NOTHING = -1e30
"""Added to the score of a masked key: finite, because frames past the end have masked keys only."""


class CheckpointTensors(Protocol):
    """Tensors of a checkpoint by name. Raises WeightsCorrupt for a missing one."""

    device: Device
    """Target device."""

    def get(self, name: str) -> Tensor:
        """Returns a tensor as float32, on the device where it was loaded."""

    def vector(self, name: str) -> Tensor:
        """Returns a tensor on the target device, in its dtype."""

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """Stacks several matrices with the same input into one product."""


class WindowEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Section `encoder_config` of a checkpoint's config.json."""

    hidden_size: int = 320
    intermediate_size: int = 1_280
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    head_dim: int = 40
    sample_rate: int = 16_000
    frame_ms: float = 5.0
    sliding_windows: tuple[tuple[int, int], ...] = ((16, 4), (16, 4), (16, 0), (16, 0), (16, 4), (16, 4))
    """Frames back (its own included) and ahead that each layer attends to, exclusive bounds."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> WindowEncoderConfig:
        """Reads the section. Raises WeightsCorrupt."""
        flat = {name: settings[name] for name in cls.__struct_fields__ if settings.get(name) is not None}
        if "head_dim" not in flat:
            flat["head_dim"] = flat.get("hidden_size", 320) // flat.get("num_attention_heads", 8)
        if "sliding_windows" in flat:
            flat["sliding_windows"] = tuple((int(back), int(ahead)) for back, ahead in flat["sliding_windows"])
        config = cls(**flat)
        windows = config.sliding_windows
        if len(windows) != config.num_hidden_layers or any(back < 1 or ahead < 0 for back, ahead in windows):
            raise WeightsCorrupt(
                f"encoder_config.sliding_windows={[*map(list, windows)]}",
                f"[frames back, frames ahead] for each of {config.num_hidden_layers} layers",
            )
        return config

    @property
    def short_samples(self) -> int:
        return round(self.sample_rate * self.frame_ms / 1_000)

    @property
    def reach(self) -> list[tuple[int, int]]:
        """Frames back and ahead that each layer attends to."""
        return [(back - 1, max(ahead - 1, 0)) for back, ahead in self.sliding_windows]


class WindowEncoder(StreamingEncoder):
    """Encoder for an attention decoder: StreamingEncoder of models/interfaces.py.

    Layers with look-ahead delay their output: in a step, a layer's input runs ahead of the step's frames by its
    own and all later layers' look-ahead, and its output by that of the later layers. A session's first step
    therefore reads more frames than it outputs; every frame is computed once.

    State   `short`, `middle`: the last inputs of the two convolutions. For each layer `keys`, `values`: rings, as
            long as the newest query attends back; `waiting`: the newest frames with their queries, which lack
            their look-ahead.
    """

    frame_block = 1

    def __init__(self, config: WindowEncoderConfig, take: CheckpointTensors) -> None:
        self.config, self.device = config, take.device
        self.frame_samples = SHORT * config.short_samples
        self.ahead = sum(ahead for _, ahead in config.reach)
        """Look-ahead of the whole encoder in frames."""
        at = "model.encoder.embedder"
        self.scale = float(take.get(f"{at}.comp.log_k").exp())
        self.short = take.device.linear(take.get(f"{at}.linear.weight"), dtype=torch.float32)
        self.convolutions = [
            take.device.linear(
                take.get(f"{at}.{name}.weight").permute(0, 2, 1).flatten(1), take.get(f"{at}.{name}.bias")
            )
            for name in ("conv1", "conv2")
        ]
        self.layers = [_WindowEncoderLayer(config, take, i) for i in range(config.num_hidden_layers)]
        self.norm = take.vector("model.encoder.final_norm.gamma") + 1

    def count_frames(self, samples: int) -> int:
        """Returns the frames of that many samples, one at least. An incomplete short frame at the end is dropped."""
        return -(-max(samples // self.config.short_samples, 1) // SHORT)

    # --- whole utterances ---

    def encode_clips(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        """Encodes all frames of several clips end to end: hidden (packing.total, hidden_size)."""
        x, packing = self._front(batch)
        clips = torch.full((packing.total,), len(packing.frames))
        for i, (offset, frames) in enumerate(zip(packing.offsets, packing.frames, strict=True)):
            clips[offset : offset + frames] = i
        clips = clips.to(x.device)
        masks = {reach: _band(clips, *reach) for reach in set(self.config.reach)}
        for layer, reach in zip(self.layers, self.config.reach, strict=True):
            x = layer.after(x, _windowed(layer.qkv(x), masks[reach], *reach))
        return F.layer_norm(x, x.shape[-1:], self.norm), packing

    def _front(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        width = self.config.short_samples
        packing = pack_clips([max(len(pcm) // width, 1) for pcm in batch], self.device.frame_block)
        shorts = torch.zeros(packing.total, width, device=self.device.torch_device)
        for clip, offset, frames in zip(batch, packing.offsets, packing.frames, strict=True):
            audio = clip[: frames * width]
            shorts[offset : offset + frames].view(-1)[: len(audio)] = audio
        x = self._shorts(shorts)
        for linear in self.convolutions:
            parts = torch.split(x[: sum(packing.frames)], packing.frames)
            clips = [F.pad(part, (0, 0, TAPS - 1, 0)) for part in parts]
            packing = pack_clips([-(-frames // STRIDE) for frames in packing.frames], self.device.frame_block)
            windows = x.new_zeros(packing.total, TAPS * x.shape[1])
            for clip, offset, frames in zip(clips, packing.offsets, packing.frames, strict=True):
                windows[offset : offset + frames] = _windows(clip[None], frames)[0]
            x = linear(windows)
            if linear is self.convolutions[0]:
                x = F.silu(x)
        return x, packing

    def _shorts(self, pcm: Tensor) -> Tensor:
        """Embeds short frames (..., short frames, samples) -> (..., short frames, hidden_size), each normalized in
        loudness."""
        centred = pcm - pcm.mean(-1, keepdim=True)
        level = centred.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return F.silu(self.short(torch.asinh(self.scale * (centred / level)))).to(self.device.dtype)

    # --- sessions ---

    def audio_window(self, chunk: int) -> AudioWindow:
        """Returns the samples that the whole encoder's look-ahead needs."""
        return AudioWindow((SHORT - 1) * self.config.short_samples, (chunk + self.ahead) * self.frame_samples)

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        config, dtype = self.config, self.device.dtype
        specs = {
            "short": StateSpec((TAPS - STRIDE, config.hidden_size), dtype),
            "middle": StateSpec((TAPS - STRIDE, 2 * config.hidden_size), dtype),
        }
        inner = config.num_attention_heads * config.head_dim
        for i, (back, ahead) in enumerate(config.reach):
            capacity = back + ahead + max(chunk, self.ahead)
            for name in ("keys", "values"):
                shape = (config.num_attention_heads, capacity, config.head_dim)
                specs[f"{name}.{i}"] = StateSpec(shape, dtype, None)
            if ahead:
                specs[f"waiting.{i}"] = StateSpec((ahead, config.hidden_size + inner), dtype)
        return specs

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        frames = chunk.pcm.shape[1] // self.frame_samples - self.ahead
        shorts = chunk.total_samples.clamp(min=self.config.short_samples) // self.config.short_samples
        total = (shorts + SHORT - 1) // SHORT
        live = chunk.frames > 0
        fresh = live & (chunk.start_frames == 0)
        ending = live & (total < chunk.start_frames + frames + self.ahead)
        pcm = chunk.pcm.reshape(len(live), -1, self.config.short_samples)
        some_fresh, some_ending = torch.stack([fresh.any(), ending.any()]).tolist()
        if some_fresh and self.ahead:
            new = _Rows(chunk.rows[fresh], chunk.start_frames[fresh], live[fresh], total[fresh], some_ending)
            self._pass(pcm[fresh, : SHORT * self.ahead], new, state, first=True)
        later = _Rows(chunk.rows, chunk.start_frames + self.ahead, live, total, some_ending)
        return self._pass(pcm[:, SHORT * self.ahead :], later, state)

    def _pass(self, pcm: Tensor, rows: _Rows, state: State, first: bool = False) -> Tensor:
        """Pushes new frames from `rows.start` on through the layers, and returns as many that have all their
        look-ahead. The `first` frames of a session are only stored."""
        x = self._convolved(pcm, rows, state)
        for i, (layer, (back, ahead)) in enumerate(zip(self.layers, self.config.reach, strict=True)):
            qkv = layer.qkv(x)
            q = qkv[:, :, 0]
            if ahead:
                waiting = state[f"waiting.{i}"]
                queue = torch.cat([waiting[rows.rows], torch.cat([x, q.flatten(2)], dim=2)], dim=1)
                waiting[rows.rows] = queue[:, -ahead:]
                x, q = queue[:, :-ahead, : x.shape[2]], queue[:, :-ahead, x.shape[2] :].view(q.shape)
            mixed = qkv.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])
            self.device.kernels.window_attention(
                q,
                qkv[:, :, 1],
                qkv[:, :, 2],
                state[f"keys.{i}"],
                state[f"values.{i}"],
                rows.rows,
                rows.start,
                rows.live * q.shape[1],
                rows.bias(q, back + ahead),
                back + ahead,
                1,
                mixed,
            )
            x = layer.after(x, mixed)
            if first:
                x = x[:, ahead:]  # no frames were stored before
                if not x.shape[1]:
                    break
            else:
                rows = rows._replace(start=rows.start - ahead)
        return F.layer_norm(x, x.shape[-1:], self.norm)

    def _convolved(self, pcm: Tensor, rows: _Rows, state: State) -> Tensor:
        x = self._shorts(pcm)
        for name, linear in zip(("short", "middle"), self.convolutions, strict=True):
            x = torch.cat([state[name][rows.rows], x], dim=1)
            state[name][rows.rows] = x[:, STRIDE - TAPS :]
            x = linear(_windows(x, x.shape[1] // STRIDE - 1))
            if name == "short":
                x = F.silu(x)
                x[:, 0] *= (rows.start > 0)[:, None]  # the frame before a session's first is zero, not silence
        return x


class _Rows(NamedTuple):
    """Positions of the rows of a step in one layer."""

    rows: Tensor
    start: Tensor
    """(n,) first frame that is new to the layer."""
    live: Tensor
    """(n,) bool: whether the row belongs to a session."""
    total: Tensor
    """(n,) frames of the session."""
    ending: bool
    """Whether the audio of some row ends within this step."""

    def bias(self, q: Tensor, left: int) -> Tensor | None:
        """Masks frames past a session's end, which the kernel does not know: it assumes that all are newer."""
        if not self.ending:
            return None
        n, steps, heads, _ = q.shape
        key = self.start[:, None] + torch.arange(-left, steps, device=q.device)
        hidden = (key >= self.total[:, None]).to(q.dtype) * NOTHING
        return hidden[:, None, None].expand(n, heads, steps, left + steps)


class _WindowEncoderLayer:
    def __init__(self, config: WindowEncoderConfig, take: CheckpointTensors, index: int) -> None:
        at = f"model.encoder.layers.{index}"
        self.heads = config.num_attention_heads
        self.norm1 = take.vector(f"{at}.input_layernorm.gamma") + 1
        self.product = take.linear(*[f"{at}.self_attn.{p}_proj" for p in "qkv"])
        self.out = take.linear(f"{at}.self_attn.o_proj")
        self.norm2 = take.vector(f"{at}.post_attention_layernorm.gamma") + 1
        self.up, self.down = (take.linear(f"{at}.mlp.{name}", bias=True) for name in ("fc1", "fc2"))

    def qkv(self, x: Tensor) -> Tensor:
        """Projects (..., hidden_size) to (..., 3, heads, head_dim)."""
        qkv: Tensor = self.product(F.layer_norm(x, x.shape[-1:], self.norm1))
        return qkv.view(*x.shape[:-1], 3, self.heads, -1)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.out(mixed, add=x)
        out: Tensor = self.down(self.up(F.layer_norm(x, x.shape[-1:], self.norm2), gelu=True), add=x)
        return out


def _windows(x: Tensor, count: int) -> Tensor:
    """Unfolds (n, frames, width) to (n, count, TAPS * width): the inputs of a convolution's outputs, in time order."""
    n, frames, width = x.shape
    x = x.contiguous()
    return x.as_strided((n, count, TAPS * width), (frames * width, STRIDE * width, 1)).contiguous()


def _band(clips: Tensor, back: int, ahead: int) -> Tensor:
    """Returns the mask (blocks, 1, QUERIES, QUERIES + back + ahead): frames of its clip that a query attends to."""
    padding = -len(clips) % QUERIES
    queries = F.pad(clips, (0, padding), value=-1).view(-1, QUERIES)
    keys = F.pad(clips, (back, padding + ahead), value=-1).unfold(0, QUERIES + back + ahead, QUERIES)
    distance = (
        torch.arange(-back, QUERIES + ahead, device=clips.device) - torch.arange(QUERIES, device=clips.device)[:, None]
    )
    in_window = (distance >= -back) & (distance <= ahead)
    return ((queries[:, :, None] == keys[:, None]) & in_window)[:, None]


def _windowed(qkv: Tensor, mask: Tensor, back: int, ahead: int) -> Tensor:
    """Computes sliding-window attention of frames (total, 3, heads, head_dim): (total, heads * head_dim)."""
    total = qkv.shape[0]
    padding = -total % QUERIES
    q = F.pad(qkv[:, 0], (0, 0, 0, 0, 0, padding)).view(-1, QUERIES, *qkv.shape[2:]).transpose(1, 2)
    k, v = (
        F.pad(qkv[:, i], (0, 0, 0, 0, back, padding + ahead)).unfold(0, QUERIES + back + ahead, QUERIES) for i in (1, 2)
    )
    mixed = F.scaled_dot_product_attention(q, k.transpose(2, 3), v.transpose(2, 3), attn_mask=mask)
    return mixed.transpose(1, 2).reshape(total + padding, -1)[:total]
