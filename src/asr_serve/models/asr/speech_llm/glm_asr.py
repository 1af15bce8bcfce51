"""GLM-ASR-Nano: Whisper's encoder with rotary positions, a projector, and a Llama.

Source: numbers match transformers 5.23.0's GlmAsrForConditionalGeneration; the prompt is that of its model card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from asr_serve.audio.features.whisper_log_mel import HOP_SAMPLES
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm import hub_folder
from asr_serve.models.asr.speech_llm.hub_speech_llm import MAX_SEGMENT_MS, STACKED_POSITIONS, WhisperLlm
from asr_serve.models.asr.whisper.encoder import WhisperEncoderConfig
from asr_serve.models.asr.whisper.encoder_window import POSITION_SAMPLES
from asr_serve.models.causal_lm import RotaryConfig
from asr_serve.models.interfaces import PROMPT_EMBEDDING, PromptOptions
from asr_serve.models.registry import AsrCard

LANGUAGES = ("zh", "en", "yue")
REQUEST = "Please transcribe this audio into text"
CARDS = (
    AsrCard(
        name="glm-asr-nano",
        task="asr",
        kind="glm_asr",
        languages=LANGUAGES,
        detects=True,
        parameters=2_257_000_000,
        licence="MIT",
        source="huggingface.co/zai-org/GLM-ASR-Nano-2512",
        hub="zai-org/GLM-ASR-Nano-2512",
        files=hub_folder.FILES,
        max_segment_ms=MAX_SEGMENT_MS,
        min_segment_ms=100,
        tokens_per_s=16.0,
        word_times=False,
    ),
)


class Config(hub_folder.HubConfig, frozen=True, kw_only=True):
    """Settings, under the names of config.json."""

    MODEL_TYPE = "glmasr"
    AUDIO: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1_280,
        "intermediate_size": 5_120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "max_position_embeddings": 1_500,
        "num_mel_bins": 128,
    }
    TEXT: ClassVar[Mapping[str, Any]] = {
        "model_type": "llama",
        "vocab_size": 59_264,
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8_192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [59_246, 59_253, 59_255],
    }
    EOS = (59_246, 59_253, 59_255)

    @property
    def rotary(self) -> tuple[RotaryConfig, int]:
        """Rotary positions of the encoder, and how many numbers of a head they rotate. Raises WeightsCorrupt."""
        settings: dict[str, Any] = {**(self.audio.get("rope_parameters") or {})}
        rotated = settings.pop("partial_rotary_factor", None) or self.audio.get("partial_rotary_factor") or 0.5
        heads, width = self.size("num_attention_heads"), self.size("hidden_size")
        if self.audio.get("num_key_value_heads") not in (None, heads):
            raise WeightsCorrupt(f"num_key_value_heads={self.audio['num_key_value_heads']}", f"{heads}, as heads")
        if self.audio.get("head_dim") not in (None, width // heads):
            raise WeightsCorrupt(f"head_dim={self.audio['head_dim']}", f"{width // heads}")
        return RotaryConfig.of(settings), int(width // heads * rotated)


class Model(WhisperLlm):
    """Encoder, projector and language model; silence that fills the last window is encoded, and left out then."""

    LANGUAGES = LANGUAGES
    SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|end_of_audio|>")
    RENAMED: ClassVar[Mapping[str, str]] = {
        ".self_attn.o_proj.": ".self_attn.out_proj.",
        ".input_layernorm.": ".self_attn_layer_norm.",
        ".post_attention_layernorm.": ".final_layer_norm.",
        ".mlp.fc": ".fc",
        "encoder.norm.": "encoder.layer_norm.",
    }
    config: Config

    def encoder_config(self) -> WhisperEncoderConfig:
        size, (rotary, rotary_dims) = self.config.size, self.config.rotary
        return WhisperEncoderConfig(
            mel_bins=size("num_mel_bins"),
            layers=size("num_hidden_layers"),
            heads=size("num_attention_heads"),
            window_positions=size("max_position_embeddings"),
            rotary=rotary,
            rotary_dims=rotary_dims,
        )

    def shapes(self, config: WhisperEncoderConfig) -> dict[str, tuple[int, ...]]:
        stacked, width = STACKED_POSITIONS * self.config.size("hidden_size"), self.config.text.hidden_size
        return super().shapes(config) | {
            "projector.linear_1.weight": (2 * width, stacked),
            "projector.linear_1.bias": (2 * width,),
            "projector.linear_2.weight": (width, 2 * width),
            "projector.linear_2.bias": (width,),
        }

    def window_frames(self, samples: int) -> list[int]:
        whole, rest = divmod(samples, self.window_samples)
        positions = [self.window_samples // POSITION_SAMPLES] * whole
        if rest or not whole:
            positions.append(-(-rest // POSITION_SAMPLES))
        return [max(1, count // STACKED_POSITIONS) for count in positions]

    def mels(self, pcm: Tensor) -> Sequence[Tensor]:
        pieces, mel = list(self.pieces(pcm)), self.encoder.stem.mel
        frames = [self.window_samples // HOP_SAMPLES] * len(pieces)
        return torch.split(mel(pieces, frames), frames)

    def instruction(self, options: PromptOptions) -> tuple[int, ...]:
        user, assistant = self.special["<|user|>"], self.special["<|assistant|>"]
        audio = self.special["<|begin_of_audio|>"], PROMPT_EMBEDDING, self.special["<|end_of_audio|>"]
        newline, request = self.encode_text("\n"), self.encode_text(f"\n{REQUEST}")
        return (user, *newline, *audio, user, *request, assistant, *newline)


CONVERTER = hub_folder.converter(Config.MODEL_TYPE)
