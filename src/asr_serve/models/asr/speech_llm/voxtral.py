"""Voxtral: Whisper's encoder, a projector, and a Llama that Mistral trained.

Source: arXiv:2507.13264; numbers match transformers 5.23.0's VoxtralForConditionalGeneration, prompts those of
mistral_common's transcription requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from asr_serve.audio.features.whisper_log_mel import HOP_SAMPLES, PackedLogMel
from asr_serve.models.asr.speech_llm import hub_folder
from asr_serve.models.asr.speech_llm.hub_speech_llm import MAX_SEGMENT_MS, STACKED_POSITIONS, WhisperLlm
from asr_serve.models.asr.whisper.encoder import WhisperEncoderConfig
from asr_serve.models.asr.whisper.encoder_window import POSITION_SAMPLES
from asr_serve.models.interfaces import PROMPT_EMBEDDING, PromptOptions
from asr_serve.models.registry import AsrCard

LANGUAGES = ("en", "fr", "de", "es", "it", "pt", "nl", "hi")


def _card(name: str, parameters: int, hub: str) -> AsrCard:
    return AsrCard(
        name=name,
        task="asr",
        kind="voxtral",
        languages=LANGUAGES,
        detects=True,
        parameters=parameters,
        licence="Apache-2.0",
        source="arXiv:2507.13264",
        hub=hub,
        files=hub_folder.FILES,
        max_segment_ms=MAX_SEGMENT_MS,
        min_segment_ms=100,
        tokens_per_s=16.0,
        word_times=False,
    )


CARDS = (
    _card("voxtral-mini-3b", 4_676_000_000, "mistralai/Voxtral-Mini-3B-2507"),
    _card("voxtral-small-24b", 24_261_000_000, "mistralai/Voxtral-Small-24B-2507"),
)


class Config(hub_folder.HubConfig, frozen=True, kw_only=True):
    """Settings, under the names of config.json."""

    MODEL_TYPE = "voxtral"
    AUDIO: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1_280,
        "intermediate_size": 5_120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "max_source_positions": 1_500,
        "num_mel_bins": 128,
    }
    TEXT: ClassVar[Mapping[str, Any]] = {
        "model_type": "llama",
        "vocab_size": 131_072,
        "hidden_size": 3_072,
        "intermediate_size": 8_192,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    }
    EOS = (2,)


class Model(WhisperLlm):
    """Encoder, projector and language model, which reads all of a window, its silence too."""

    LANGUAGES = LANGUAGES
    SPECIAL_TOKENS = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[/INST]", "[TRANSCRIBE]")
    config: Config

    def encoder_config(self) -> WhisperEncoderConfig:
        size = self.config.size
        return WhisperEncoderConfig(
            mel_bins=size("num_mel_bins"),
            layers=size("num_hidden_layers"),
            heads=size("num_attention_heads"),
            window_positions=size("max_source_positions"),
        )

    def shapes(self, config: WhisperEncoderConfig) -> dict[str, tuple[int, ...]]:
        stacked, width = STACKED_POSITIONS * self.config.size("hidden_size"), self.config.text.hidden_size
        return super().shapes(config) | {
            "projector.linear_1.weight": (width, stacked),
            "projector.linear_2.weight": (width, width),
        }

    def window_frames(self, samples: int) -> list[int]:
        windows = max(1, -(-samples // self.window_samples))
        return [self.window_samples // POSITION_SAMPLES // STACKED_POSITIONS] * windows

    def mels(self, pcm: Tensor) -> Sequence[Tensor]:
        # The spectrogram is that of all windows together: its range, and what a frame sees beside it.
        windows, frames = len(self.window_frames(len(pcm))), self.window_samples // HOP_SAMPLES
        mel = PackedLogMel(self.config.size("num_mel_bins"), windows * frames, self.device.torch_device)
        return torch.split(mel([pcm], [windows * frames]), frames)

    def instruction(self, options: PromptOptions) -> tuple[int, ...]:
        start, end = (self.special[name] for name in ("[INST]", "[/INST]"))
        language = self.encode_text(f"lang:{options.language}") if options.language else ()
        before = (self.special["<s>"], start, self.special["[BEGIN_AUDIO]"])
        return (*before, PROMPT_EMBEDDING, end, *language, self.special["[TRANSCRIBE]"])


CONVERTER = hub_folder.converter(Config.MODEL_TYPE)
