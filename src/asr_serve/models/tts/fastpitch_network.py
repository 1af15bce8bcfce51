"""FastPitch network whose decoder works chunk by chunk, with state of fixed size.

The encoder reads the whole sentence: phonemes to hidden vectors, and from them durations, pitch and energy. The
decoder works on frames: causal convolutions, and attention to a frame's own chunk and the `past` chunks before it.
So frames are available before later ones are computed, and are the same as when all are computed at once.

Source  FastPitch (arXiv:2006.06873), whose decoder here is incremental: causal convolutions and a chunk mask over
        a fixed past, in the way of NVIDIA's and others' streaming variants (arXiv:2111.09052 discusses the trade);
        rotary positions (arXiv:2104.09864)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.models.tts.fastpitch_layers import (
    MASKED,
    AdaptedLinear,
    LoraChanges,
    Norm,
    RotaryAngles,
    TensorSource,
    apply_rotary,
    joined,
    softmax_attention,
    with_neighbours,
)

MELS = 80
PLACE = 6
"""Features of a frame's position in its phoneme."""
F0_SCALE = 10.0
"""Scale of a frame's log F0 relative to its phoneme's: the difference is small."""
PRE, CONV = 5, 3
"""Kernel sizes of convolutions: over phonemes at the start, and everywhere else."""


class FastPitchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that determine a network's tensors."""

    phonemes: int = 178
    speakers: int = 28
    width: int = 256
    heads: int = 2
    inner: int = 768
    encoder_layers: int = 4
    decoder_layers: int = 4
    chunk: int = 16
    """Frames of a decoder's step."""
    past: int = 4
    """Chunks before its own that a frame attends to."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> FastPitchSizes:
        return cls(**{name: settings[name] for name in cls.__struct_fields__ if name in settings})

    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns the linear layers by name: (out, in). All have a bias."""
        d, inner = self.width, self.inner
        layers = {"pre": (d, PRE * d), "prosody_in": (d, CONV * 3), "place": (d, PLACE), "out": (MELS + 2, d)}
        for stack, count in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            for at in range(count):
                layers |= {
                    f"{stack}.{at}.qkv": (3 * d, d),
                    f"{stack}.{at}.attended": (d, d),
                    f"{stack}.{at}.inner": (inner, CONV * d),
                    f"{stack}.{at}.outer": (d, inner),
                }
        for name, outputs in (("durations", 1), ("prosody", 3)):
            layers |= {f"{name}.0": (d, CONV * d), f"{name}.1": (d, CONV * d), f"{name}.out": (outputs, d)}
        return layers

    def norms(self) -> list[str]:
        names = ["encoded", "decoded", *(f"{name}.norm{at}" for name in ("durations", "prosody") for at in (0, 1))]
        for stack, count in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            names += [f"{stack}.{at}.norm{which}" for at in range(count) for which in (0, 1)]
        return names

    def tables(self) -> dict[str, tuple[int, int]]:
        """Returns the embedding tables by name."""
        return {
            "phonemes": (self.phonemes, self.width),
            "speakers": (self.speakers, self.width),
            "speakers_decoder": (self.speakers, self.width),
        }

    def adapted(self) -> dict[str, tuple[int, int]]:
        """Returns the layers that a cloned voice changes: those of the blocks and the predictors."""
        return {name: size for name, size in self.linears().items() if "." in name and not name.endswith(".out")}


class PhonemeProsody(NamedTuple):
    """Prosody of each phoneme, (rows, phonemes) float32."""

    pitch: Tensor
    """Natural log of F0, in deviations of the speaker from his mean; 0 where unvoiced."""
    voiced: Tensor
    """1 or 0."""
    energy: Tensor
    """Log of its energy, in deviations of all speech from its mean."""


class FastPitchNetwork:
    """Encoder, predictors, decoder. It holds no state."""

    def __init__(self, sizes: FastPitchSizes, parts: TensorSource) -> None:
        self.sizes = sizes
        self._phonemes = parts.vector("phonemes")
        self._pre = AdaptedLinear(parts, "pre")
        self._encoder = [_Block(parts, f"encoder.{at}", sizes.heads) for at in range(sizes.encoder_layers)]
        self._encoded = Norm(parts, "encoded")
        self._durations, self._prosody = _Predictor(parts, "durations"), _Predictor(parts, "prosody")
        self._prosody_in, self._place = AdaptedLinear(parts, "prosody_in"), AdaptedLinear(parts, "place")
        self._decoder = [_Block(parts, f"decoder.{at}", sizes.heads) for at in range(sizes.decoder_layers)]
        self._decoded, self._out = Norm(parts, "decoded"), AdaptedLinear(parts, "out")

    # --- phonemes ----------------------------------------------------------------------------------------

    def encode(self, ids: Tensor, there: Tensor, speaker: Tensor, changes: LoraChanges | None = None) -> Tensor:
        """Encodes ids (rows, phonemes) int64 with mask `there` (rows, phonemes) bool and speaker (rows, width) to
        (rows, phonemes, width)."""
        x = F.embedding(ids, self._phonemes) * there[..., None]
        x = x + self._pre(with_neighbours(x, PRE)) + speaker[:, None].to(x.dtype)
        bias = torch.where(there, 0.0, MASKED)[:, None, None, :].to(x.dtype)
        angles = self._rotary_angles(torch.arange(ids.shape[1], device=ids.device), x)
        for block in self._encoder:
            q, k, v = block.qkv(x, changes)
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
            x = block.attend(x, softmax_attention(q, k, v, bias), changes)
            x = block.feed(x, with_neighbours(block.second(x) * there[..., None].to(x.dtype), CONV), changes)
        return self._encoded(x)

    def log_durations(self, hidden: Tensor, there: Tensor, changes: LoraChanges | None = None) -> Tensor:
        """Predicts the natural log of each phoneme's frames, (rows, phonemes) float32."""
        return self._durations(hidden, there, changes)[..., 0]

    def prosody(
        self, hidden: Tensor, there: Tensor, changes: LoraChanges | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predicts pitch, logits of voicing, energy: (rows, phonemes) float32. See PhonemeProsody."""
        pitch, voiced, energy = self._prosody(hidden, there, changes).unbind(-1)
        return pitch, voiced, energy

    def condition(self, hidden: Tensor, prosody: PhonemeProsody) -> Tensor:
        """Adds prosody to the hidden vectors: the decoder's input for each phoneme, (rows, phonemes, width)."""
        features = torch.stack([prosody.pitch * prosody.voiced, prosody.voiced, prosody.energy], -1).to(hidden.dtype)
        return hidden + self._prosody_in(with_neighbours(features, CONV))

    # --- frames ------------------------------------------------------------------------------------------

    def decoder_input(self, phonemes: Tensor, position: Tensor, speaker: Tensor) -> Tensor:
        """Returns the decoder's input: each frame's phoneme (rows, frames, width) with its position in the phoneme
        (rows, frames, PLACE) and the speaker (rows, width)."""
        return self._place(position.to(phonemes.dtype), add=phonemes + speaker[:, None].to(phonemes.dtype))

    def decode(self, x: Tensor, frames: Tensor, changes: LoraChanges | None = None) -> Tensor:
        """Decodes whole sentences at once: x (rows, frames, width), whose length is a multiple of `chunk`, with
        `frames` (rows,) valid frames of each row. Returns (rows, frames, MELS + 2) float32, the same as `step`
        chunk by chunk."""
        sizes, (rows, total, _) = self.sizes, x.shape
        chunks, heads = total // sizes.chunk, sizes.heads
        angles = self._rotary_angles(torch.arange(total, device=x.device), x)
        seen = torch.arange((sizes.past + 1) * sizes.chunk, device=x.device) - sizes.past * sizes.chunk
        key_positions = torch.arange(chunks, device=x.device)[:, None] * sizes.chunk + seen
        valid = (key_positions >= 0) & (key_positions < frames[:, None, None])
        bias = torch.where(valid, 0.0, MASKED)[:, None, :, None, :].to(x.dtype)

        def windows(z: Tensor) -> Tensor:
            shifted = [
                F.pad(z, (0, 0, back * sizes.chunk, 0))[:, :, :total].reshape(rows, heads, chunks, sizes.chunk, -1)
                for back in range(sizes.past, -1, -1)
            ]
            return torch.cat(shifted, 3)

        for block in self._decoder:
            q, k, v = block.qkv(x, changes)
            q = apply_rotary(q, angles).reshape(rows, heads, chunks, sizes.chunk, -1)
            attended = softmax_attention(q, windows(apply_rotary(k, angles)), windows(v), bias)
            x = block.attend(x, attended.reshape(rows, heads, total, -1), changes)
            x = block.feed(x, joined(F.pad(block.second(x), (0, 0, CONV - 1, 0)), CONV), changes)
        return self._out(self._decoded(x)).float()

    def state_specs(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a sentence's state: keys and values of the past, the convolutions' last frames."""
        s = self.sizes
        past = (s.decoder_layers, s.past, s.heads, s.chunk, s.width // s.heads)
        return {"keys": past, "values": past, "tails": (s.decoder_layers, CONV - 1, s.width)}

    def step(
        self,
        x: Tensor,
        frames: Tensor,
        seen: Tensor,
        rows: Tensor,
        state: Mapping[str, Tensor],
        changes: LoraChanges | None = None,
    ) -> Tensor:
        """Decodes the next chunk of some sentences: x (n, chunk, width); `seen` (n,) int64 frames before it, a
        multiple of `chunk`, of `frames` (n,) in all; `rows` (n,) their rows of `state`, which are read and written
        in place. Returns (n, chunk, MELS + 2) float32."""
        s, n = self.sizes, len(x)
        inside = torch.arange(s.chunk, device=x.device)
        positions = seen[:, None] + inside
        chunk = seen // s.chunk
        # A chunk's keys replace those of the chunk that has left the context; order does not matter to attention.
        slots = torch.arange(s.past, device=x.device)
        written = (slots < chunk[:, None])[:, :, None].expand(n, s.past, s.chunk).reshape(n, -1)
        valid = torch.cat([written, positions < frames[:, None]], 1)
        bias = torch.where(valid, 0.0, MASKED)[:, None, None, :].to(x.dtype)
        slot, angles = chunk % s.past, self._rotary_angles(positions, x)
        for at, block in enumerate(self._decoder):
            q, k, v = block.qkv(x, changes)
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
            keys, values = (
                torch.cat([_flat(state[name][rows, at]).to(new.dtype), new], 2)
                for name, new in (("keys", k), ("values", v))
            )
            x = block.attend(x, softmax_attention(q, keys, values, bias), changes)
            state["keys"][rows, at, slot] = k.to(state["keys"].dtype)
            state["values"][rows, at, slot] = v.to(state["values"].dtype)
            normed = block.second(x)
            longer = torch.cat([state["tails"][rows, at].to(x.dtype), normed], 1)
            state["tails"][rows, at] = longer[:, s.chunk :].to(state["tails"].dtype)
            x = block.feed(x, joined(longer, CONV), changes)
        return self._out(self._decoded(x)).float()

    def _rotary_angles(self, positions: Tensor, x: Tensor) -> RotaryAngles:
        return RotaryAngles.of(positions, self.sizes.width // self.sizes.heads, x.dtype)


def _flat(past: Tensor) -> Tensor:
    """Flattens (n, past, heads, chunk, d) to (n, heads, past * chunk, d)."""
    n, _, heads, _, d = past.shape
    return past.transpose(1, 2).reshape(n, heads, -1, d)


class _Block:
    """Layer of attention, then a convolution and a linear layer."""

    def __init__(self, parts: TensorSource, name: str, heads: int) -> None:
        self._heads = heads
        self._first, self.second = Norm(parts, f"{name}.norm0"), Norm(parts, f"{name}.norm1")
        self._qkv, self._attended = AdaptedLinear(parts, f"{name}.qkv"), AdaptedLinear(parts, f"{name}.attended")
        self._inner, self._outer = AdaptedLinear(parts, f"{name}.inner"), AdaptedLinear(parts, f"{name}.outer")

    def qkv(self, x: Tensor, changes: LoraChanges | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, each (rows, heads, frames, d)."""
        rows, frames, d = x.shape
        projected = self._qkv(self._first(x), changes).view(rows, frames, 3, self._heads, d // self._heads)
        q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def attend(self, x: Tensor, attended: Tensor, changes: LoraChanges | None) -> Tensor:
        """Adds the projected attention output `attended` (rows, heads, frames, d) to x."""
        return self._attended(attended.transpose(1, 2).reshape(x.shape), changes, add=x)

    def feed(self, x: Tensor, joined: Tensor, changes: LoraChanges | None) -> Tensor:
        return self._outer(self._inner(joined, changes, gelu=True), changes, add=x)


class _Predictor:
    """Two convolutions over phonemes, and a linear output for each phoneme."""

    def __init__(self, parts: TensorSource, name: str) -> None:
        self._layers = [(AdaptedLinear(parts, f"{name}.{at}"), Norm(parts, f"{name}.norm{at}")) for at in (0, 1)]
        self._out = AdaptedLinear(parts, f"{name}.out")

    def __call__(self, x: Tensor, there: Tensor, changes: LoraChanges | None) -> Tensor:
        mask = there[..., None].to(x.dtype)
        for product, norm in self._layers:
            x = norm(product(with_neighbours(x * mask, CONV), changes, gelu=True))
        return self._out(x).float()


def frame_positions(durations: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Maps frames to phonemes: durations (rows, phonemes) int64, frame numbers (rows, n) -> indices (rows, n)
    int64, and features of the position in the phoneme (rows, n, PLACE) float32. Frames past the end belong to the
    last phoneme."""
    ends = durations.cumsum(1)
    index = torch.searchsorted(ends, frames.contiguous(), right=True).clamp(max=durations.shape[1] - 1)
    length = durations.gather(1, index).float()
    after = (frames - (ends.gather(1, index) - durations.gather(1, index))).float()
    remaining = length - 1 - after
    features = [
        (after + 0.5) / length.clamp(min=1),
        torch.log1p(after.clamp(min=0)),
        torch.log1p(remaining.clamp(min=0)),
        length.clamp(min=1).log(),
        (after == 0).float(),
        (remaining == 0).float(),
    ]
    return index, torch.stack(features, -1)


LN10_20 = math.log(10) / 20
"""Natural log of a decibel."""
SEMITONE = math.log(2) / 12
"""Natural log of a semitone."""
