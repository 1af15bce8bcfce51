"""Whisper: encoder-decoder recognition and translation of 30 s windows, with tasks and times as tokens.

Source  arXiv:2212.04356; numbers match transformers' WhisperForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.decoder_layers import DecoderLayerParts, DecoderStack
from asr_serve.devices.interface import Device
from asr_serve.devices.tensor_parallel import parallel_vocabulary
from asr_serve.errors import WeightsCorrupt
from asr_serve.models import alignment_heads as again
from asr_serve.models.alignment_heads import whisper_alignment
from asr_serve.models.asr.whisper import checkpoint_formats
from asr_serve.models.asr.whisper.encoder import WhisperEncoder, WhisperEncoderConfig, WhisperTensors
from asr_serve.models.asr.whisper.encoder_window import POSITION_SAMPLES, SILENCE_STRIDE
from asr_serve.models.asr.whisper.special_tokens import ENGLISH_TEXT, LANGUAGES, SpecialTokens
from asr_serve.models.interfaces import EncoderDecoderModel, PromptOptions
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.packing import PackedBatch, PagedKeyValues
from asr_serve.models.registry import AsrCard, PackagedWeights

PROMPT_TOKENS = 223
"""Most tokens of a prompt: half of the 448 positions of every published decoder, less the token before it."""


def _card(size: str, parameters: int, packaged: PackagedWeights | None = None, hub: str = "") -> AsrCard:
    english = size.endswith(".en")
    return AsrCard(
        name=f"whisper-{size.replace('.', '-')}",
        task="asr",
        kind="whisper",
        languages=("en",) if english else LANGUAGES[: None if "v3" in size else -1],
        tasks=("transcribe",) if english else ("transcribe", "translate"),
        detects=not english,
        prompt_tokens=PROMPT_TOKENS,
        parameters=parameters,
        licence="MIT",
        source="arXiv:2212.04356",
        hub=hub or f"openai/whisper-{size}",
        packaged=packaged,
        max_segment_ms=30_000,
        min_segment_ms=100,
        # In some languages a letter takes three tokens of the multilingual vocabulary.
        tokens_per_s=10.0 if english else 24.0,
    )


CARDS = (
    _card("tiny.en", 37_760_256, checkpoint_formats.ENGLISH),
    _card("base.en", 72_593_408),
    _card("small.en", 241_734_144),
    _card("medium.en", 763_856_896),
    _card("tiny", 37_760_640),
    _card("base", 72_593_920, checkpoint_formats.MULTILINGUAL),
    _card("small", 241_734_912),
    _card("medium", 763_857_920),
    _card("large-v3", 1_543_490_560),
    _card("large-v3-turbo", 808_878_080),
    msgspec.structs.replace(
        _card("large-v3", 756_405_760, hub="distil-whisper/distil-large-v3"),
        name="distil-large-v3",
        languages=("en",),
        tasks=("transcribe",),
        detects=False,
        source="arXiv:2311.00430",
    ),
)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes, under the names of a checkpoint's config.json."""

    vocab_size: int = 51_865
    num_mel_bins: int = 80
    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1_536
    decoder_layers: int = 4
    decoder_attention_heads: int = 6
    decoder_ffn_dim: int = 1_536
    max_source_positions: int = 1_500
    max_target_positions: int = 448
    eos_token_id: int = ENGLISH_TEXT + 1
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Layer and head, as in generation_config.json. Empty: the known heads of its size."""
    silence_stride: int = SILENCE_STRIDE
    """Stride of models/asr/whisper/encoder_window. 1: every position of the window is encoded, as in training."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads a checkpoint's config.json. Raises WeightsCorrupt."""
        if settings.get("activation_function", "gelu") != "gelu":
            raise WeightsCorrupt(f"activation_function={settings['activation_function']!r}", "gelu")
        if settings.get("scale_embedding"):
            raise WeightsCorrupt("scale_embedding=true", "no published Whisper does: false")
        config = super().of(settings)
        _ = config.special  # raises for a vocabulary that is not Whisper's
        return config

    @property
    def encoder(self) -> WhisperEncoderConfig:
        return WhisperEncoderConfig(
            mel_bins=self.num_mel_bins,
            layers=self.encoder_layers,
            heads=self.encoder_attention_heads,
            window_positions=self.max_source_positions,
            silence_stride=self.silence_stride,
        )

    @property
    def special(self) -> SpecialTokens:
        # Of the published vocabularies only the smallest is English; their files may hold another eos_token_id.
        text = {51_864: ENGLISH_TEXT, 51_865: ENGLISH_TEXT + 1, 51_866: ENGLISH_TEXT + 1}.get(
            self.vocab_size, self.eos_token_id
        )
        return SpecialTokens.of(text, self.vocab_size, self.max_source_positions + 1)


class Model(EncoderDecoderModel):
    """Encoder and decoder of 30 s windows. Without a language, a multilingual model's prompt ends with `sot`, and
    the likeliest language token comes next.

    State   the decoder's: keys and values of earlier tokens and of the encoder's frames, in pages that the
            caller owns and lends at every step.
    """

    special_tokens: SpecialTokens
    pads_to_window = True
    tensor_parallel = True

    def __init__(self, config: Config, tensors: dict[str, Tensor], device: Device) -> None:
        self.config, self.device, self.kernels = config, device, device.kernels
        self.special_tokens = config.special
        self.bos, self.eos = config.special.sot, config.special.eot
        self.max_tokens = config.max_target_positions
        all_heads, group = config.decoder_attention_heads, device.group
        group.check_heads(all_heads)
        self.layers, self.heads = config.decoder_layers, group.count(all_heads)
        take, take_part = WhisperTensors(tensors, device), WhisperTensors(tensors, device, group=group)
        self.own_dim = config.d_model // all_heads
        """Numbers of a head without the extra dimensions."""
        self.head_dim, self.attention_scale = self.own_dim + take.extra, self.own_dim**-0.5
        # The first rank encodes.
        encoder = msgspec.structs.replace(config.encoder, layers=0) if group.rank else config.encoder
        self.encoder = WhisperEncoder(encoder, take)
        self.cross_kv = take_part.heads(
            all_heads,
            *[f"decoder.layers.{i}.encoder_attn.{kind}_proj" for i in range(config.decoder_layers) for kind in "kv"],
        )
        self.decoder = [
            _WhisperDecoderLayer(take_part, f"decoder.layers.{i}", all_heads) for i in range(config.decoder_layers)
        ]
        self.decoder_stack = DecoderStack(
            device, self.decoder, heads=self.heads, head_dim=self.head_dim, scale=self.attention_scale
        )
        self.decoder_norm = take.norm("decoder.layer_norm")
        self.positions = take.vector("decoder.embed_positions.weight")
        self.embedding = self.head = parallel_vocabulary(device, take.get("decoder.embed_tokens.weight"))
        self.vocab_size, self.head_weight = len(self.embedding), self.head.weight
        self.frame_samples = POSITION_SAMPLES
        self.alignment = whisper_alignment(
            config.vocab_size, self.layers, all_heads, config.d_model, config.alignment_heads
        )

    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        """Returns the tokens that an answer begins with: previous text (the end of it, half a row at most), start,
        language, task, and `no_timestamps` unless times are requested."""
        return self.special_tokens.prompt_tokens(options, self.max_tokens // 2 - 1)

    def count_frames(self, samples: int, whole: bool = False) -> int:
        """Returns the encoder positions of a clip; `whole`: with all of the silence that fills its window. Audio
        longer than the window is cut."""
        return self.encoder.window.count_frames(samples, whole)

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        """Encodes clips end to end to (packing.total, d_model + 1). The last number of a row is the logarithm of the
        number of positions that it stands for."""
        hidden, counts, packing = self.encoder.encode(batch, whole)
        return torch.cat([hidden, counts[:, None]], 1), packing

    def cross_keys_values(self, hidden: Tensor) -> Tensor:
        kv = self.cross_kv(hidden[:, :-1].contiguous()).view(-1, self.layers, 2, self.heads, self.head_dim)
        kv[:, :, 0, :, -1] = hidden[:, -1, None, None] * self.own_dim**0.5
        return kv.flatten(3)

    def decode(
        self, tokens: Tensor, own: PagedKeyValues, audio: PagedKeyValues, wanted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        x = self.embedding.embed(tokens) + F.embedding(own.lengths - 1, self.positions)
        x, queries = self.decoder_stack(x, own, audio, self.alignment.heads)
        x = x if wanted is None else x[wanted]
        x = self.decoder_norm(x)
        return self.head(x), x, *queries

    def align(self, tokens: Tensor, packing: PackedBatch, audio: PagedKeyValues, frames: Sequence[int]) -> list[Tensor]:
        positions = packing.positions(tokens.device)
        x = self.embedding.embed(tokens) + F.embedding(positions, self.positions)
        return again.alignment_scores(self, x, packing, audio, frames)


class _WhisperDecoderLayer:
    def __init__(self, take: WhisperTensors, at: str, heads: int) -> None:
        self.device, self.heads = take.device, take.group.count(heads)
        self.norm1 = take.norm(f"{at}.self_attn_layer_norm")
        self.scale = (len(self.norm1.weight) // heads) ** -0.5
        self.qkv = take.heads(heads, *[f"{at}.self_attn.{p}_proj" for p in "qkv"])
        self.own_out = take.out(heads, f"{at}.self_attn.out_proj")
        self.norm2 = take.norm(f"{at}.encoder_attn_layer_norm")
        self.query = take.heads(heads, f"{at}.encoder_attn.q_proj")
        self.audio_out = take.out(heads, f"{at}.encoder_attn.out_proj")
        self.norm3 = take.norm(f"{at}.final_layer_norm")
        self.up, self.down = take.linear(f"{at}.fc1"), take.row_linear(f"{at}.fc2")

    @property
    def parts(self) -> DecoderLayerParts:
        return DecoderLayerParts(
            self.norm1, self.qkv, self.own_out, self.norm2, self.query, self.audio_out, self.norm3, self.up, self.down
        )

    def __call__(
        self, index: int, x: Tensor, positions: Tensor, own: PagedKeyValues, audio: PagedKeyValues, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, -1)
        kernels.append(own.pool, index, qkv, own.block_tables, positions)
        mixed = torch.empty_like(qkv[:, 0])
        kernels.attend(own.pool, index, qkv[:, 0], mixed, own.block_tables, own.lengths, self.scale)
        x = self.own_out(mixed, add=x)
        query = self.cross_query(x)
        return self.cross_attention(index, x, query, audio, kernels), query

    def self_attention(self, x: Tensor, packing: PackedBatch) -> Tensor:
        """Computes all positions of rows at once, up to their cross-attention queries."""
        qkv = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1)
        return self.own_out(self.device.causal_attention(qkv, packing, self.scale), add=x)

    def cross_query(self, x: Tensor) -> Tensor:
        """Computes queries of the cross-attention, (rows, heads * head_dim)."""
        return self.query(self.norm2(x))

    def cross_attention(
        self, index: int, x: Tensor, query: Tensor, audio: PagedKeyValues, kernels: ModuleType
    ) -> Tensor:
        """Computes cross-attention and the feed-forward after it."""
        mixed = torch.empty_like(query)
        audio.attend(kernels, index, query, mixed, self.scale)
        x = self.audio_out(mixed, add=x)
        return self.down(self.up(self.norm3(x), gelu=True), add=x)


# Converters of checkpoints in other forms.
rename = checkpoint_formats.rename
is_package_folder = checkpoint_formats.is_package_folder
convert = checkpoint_formats.convert
CONVERTER = WeightsConverter(is_package_folder, convert)
