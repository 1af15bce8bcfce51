"""Moonshine Streaming: Moonshine's decoder after an encoder with sliding-window attention.

A whole utterance is processed as by Moonshine: `encode`, `cross_keys_values`, `decode`. Or `encoder` steps through
a session chunk by chunk, to the same hidden frames; then `cross_keys_values(add_positions(hidden, positions))` is
what the decoder needs of the frames of an utterance, and of those that have arrived since.

Source  arXiv:2602.12241; numbers match transformers' MoonshineStreamingForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.asr.moonshine.window_encoder import WindowEncoder, WindowEncoderConfig
from asr_serve.models.interfaces import IncrementalEncoderDecoderModel
from asr_serve.models.model_files import AsrModelConfig
from asr_serve.models.packing import PackedBatch
from asr_serve.models.registry import AsrCard

LONGEST_TOKENS = 448
"""Limit of text positions: the checkpoint's is far more than an utterance needs, and sets the width of block tables."""
_SHARED: dict[str, Any] = {
    "task": "asr",
    "kind": "moonshine_streaming",
    "languages": ("en",),
    "licence": "MIT",
    "source": "arXiv:2602.12241",
    "max_segment_ms": 28_000,
    "min_segment_ms": 100,
    "tokens_per_s": 6.5,
    "chunk": 8,
    "frame_samples": 320,
    "lookahead_samples": 3_600,
}
CARDS = (
    AsrCard(
        name="moonshine-streaming-tiny-en",
        parameters=34_000_000,
        hub="UsefulSensors/moonshine-streaming-tiny",
        **_SHARED,
    ),
    AsrCard(
        name="moonshine-streaming-small-en",
        parameters=123_000_000,
        hub="UsefulSensors/moonshine-streaming-small",
        **_SHARED,
    ),
    AsrCard(
        name="moonshine-streaming-medium-en",
        parameters=245_000_000,
        hub="UsefulSensors/moonshine-streaming-medium",
        **_SHARED,
    ),
)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes, under the names of a checkpoint's config.json: the decoder's, and the encoder's in a section."""

    vocab_size: int = 32_768
    hidden_size: int = 320
    intermediate_size: int = 1_280
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    max_position_embeddings: int = 4_096
    partial_rotary_factor: float = 0.8
    rope_theta: float = 10_000.0
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head, as in generation_config.json. Empty: the known heads of its size."""
    encoder_config: WindowEncoderConfig = WindowEncoderConfig()

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads a checkpoint's config.json. Raises WeightsCorrupt."""
        encoder = settings.get("encoder_config") or {}
        for prefix, activation, part in (("encoder_config.", "gelu", encoder), ("", "silu", settings)):
            for name, expected in (("hidden_act", activation), ("attention_bias", False)):
                if part.get(name, expected) != expected:
                    raise WeightsCorrupt(f"{prefix}{name}={part[name]}", f"every published checkpoint has {expected}")
            heads = part.get("num_attention_heads", 8)
            if part.get("num_key_value_heads") not in (None, heads):
                raise WeightsCorrupt(f"{prefix}num_key_value_heads={part['num_key_value_heads']}", f"{heads}")
        rope = settings.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise WeightsCorrupt(f"rope_type={rope['rope_type']}", "every published checkpoint has default")
        flat = {**settings, **{k: rope[k] for k in ("partial_rotary_factor", "rope_theta") if k in rope}}
        flat["encoder_config"] = WindowEncoderConfig.of(encoder)
        config = cls(**{name: flat[name] for name in cls.__struct_fields__ if flat.get(name) is not None})
        heads = config.num_attention_heads
        if settings.get("head_dim") not in (None, config.head_dim) or config.hidden_size % heads:
            raise WeightsCorrupt(
                f"head_dim={settings.get('head_dim')}", f"hidden_size / num_attention_heads: {config.head_dim}"
            )
        if not 0 < 2 * config.turns <= config.head_dim:
            raise WeightsCorrupt(f"partial_rotary_factor={config.partial_rotary_factor}", "a part of a head")
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary(self) -> int:
        """Rotated dimensions of a head; an odd number is rounded up."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def turns(self) -> int:
        """Rotated pairs of dimensions."""
        return (self.rotary + 1) // 2

    @property
    def decoder(self) -> moonshine.Config:
        """Sizes of the decoder, which is Moonshine's."""
        return moonshine.Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            decoder_num_hidden_layers=self.num_hidden_layers,
            decoder_num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            partial_rotary_factor=(2 * self.turns + 0.5) / self.head_dim,  # the half is lost in rounding down
            rope_theta=self.rope_theta,
            alignment_heads=self.alignment_heads,
        )


CONVERTER = None


def rename(key: str) -> str | None:
    """Returns a checkpoint's key unchanged; None for what is no weight of ours."""
    return key if key.startswith(("model.", "proj_out.")) else None


class Model(moonshine.MoonshineDecoderModel, IncrementalEncoderDecoderModel):
    """Encoder of sessions, with state in rows of `encoder.state_specs`, and Moonshine's decoder."""

    encoder: WindowEncoder

    def __init__(self, config: Config, weights: dict[str, Tensor], device: Device) -> None:
        take = moonshine.MoonshineTensors(config.decoder, weights, device)
        max_tokens = min(config.max_position_embeddings, LONGEST_TOKENS)
        super().__init__(config.decoder, take, rotary=config.rotary, max_tokens=max_tokens)
        self.config = config
        self.encoder = WindowEncoder(config.encoder_config, take)
        self.positions = take.vector("model.decoder.pos_emb.weight")
        self.longest_frames = len(self.positions)
        wide = config.encoder_config.hidden_size != config.hidden_size
        self.narrow = take.linear("model.decoder.proj") if wide else None
        self.frame_samples = self.encoder.frame_samples

    def count_frames(self, samples: int, whole: bool = False) -> int:
        return self.encoder.count_frames(samples)

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        hidden, packing = self.encoder.encode_clips(batch)
        return self.add_positions(hidden, packing.positions(hidden.device)), packing

    def add_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden + F.embedding(positions, self.positions)

    def cross_keys_values(self, hidden: Tensor) -> Tensor:
        return super().cross_keys_values(self.narrow(hidden) if self.narrow else hidden)
