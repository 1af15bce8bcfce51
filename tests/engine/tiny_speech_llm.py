"""A speech LLM of random weights, the engine around it, and what its decoder says of one clip without that engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
from tiny_moonshine import clip, text
from torch import Tensor

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.devices.interface import Device
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import OptionError
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.asr.speech_llm.speech_llm import SpeechLlm
from asr_serve.models.auxiliary import silero
from asr_serve.models.causal_lm import FULL, SLIDING, CausalConfig, CausalLanguageModel, RotaryConfig
from asr_serve.models.interfaces import PROMPT_EMBEDDING, PromptOptions
from asr_serve.models.model_files import AsrModelConfig
from asr_serve.models.packing import PackedBatch, PagedKeyValues, pack_clips

FRAME_SAMPLES = 640
CONFIG = CausalConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=224,
    rms_norm_eps=1e-6,
    attention_scale=8**-0.5,
    query_key_norm=True,
    layer_types=(FULL, SLIDING, FULL),
    sliding_window=40,
    rotary={kind: RotaryConfig() for kind in (FULL, SLIDING)},
)
EOS, STOP = 39, 3
"""Tokens that end an answer."""
SYSTEM = tuple(range(1, 36))
"""Tokens before the audio, in any language: two whole pages and three more."""
LANGUAGES = {"en": 36, "de": 37}
CARD = msgspec.structs.replace(
    moonshine.CARDS[0],
    name="tiny-random-speech-llm",
    kind="tiny_speech_llm",
    languages=tuple(LANGUAGES),
    max_segment_ms=8_000,
    tokens_per_s=12.0,
)
CLIPS = [clip(seed, samples) for seed, samples in enumerate([32_000, 16_000, 4_000, 24_000, 9_000, 80_500])]


def weights(config: CausalConfig, seed: int = 8) -> dict[str, Tensor]:
    """A checkpoint whose answers differ from clip to clip and end at different lengths."""
    chance = torch.Generator().manual_seed(seed)
    width, query = config.hidden_size, config.num_attention_heads * config.head_dim
    key, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size

    def normal(*shape: int, std: float = 0.5) -> Tensor:
        return torch.randn(*shape, generator=chance) * std

    found = {
        "model.embed_tokens.weight": normal(config.vocab_size, width),
        "lm_head.weight": normal(config.vocab_size, width),
        "model.norm.weight": 1 + normal(width),
    }
    found["lm_head.weight"][EOS] *= 0.8  # answers are not too short
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            *(("self_attn.q_proj", query, width), ("self_attn.k_proj", key, width), ("self_attn.v_proj", key, width)),
            *(("self_attn.o_proj", width, query), ("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width)),
            ("mlp.down_proj", width, inner),
        ):
            found[f"{at}.{name}.weight"] = normal(rows, columns)
        for name, size in (
            *(("input_layernorm", width), ("post_attention_layernorm", width)),
            *(("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)),
        ):
            found[f"{at}.{name}.weight"] = 1 + normal(size, std=0.3)
    return found


class TinySpeechLlm(SpeechLlm):
    """Each frame of 40 ms is projected by itself."""

    frame_samples = FRAME_SAMPLES

    def __init__(self, device: Device, language_model: CausalLanguageModel | None = None) -> None:
        language_model = language_model or CausalLanguageModel(CONFIG, weights(CONFIG), device)
        super().__init__(language_model, EOS, (STOP,))
        chance = torch.Generator().manual_seed(8)
        self.place = device.torch_device
        width = language_model.config.hidden_size
        self.project = device.linear(torch.randn(width, FRAME_SAMPLES, generator=chance) * 0.5)
        self.block = device.frame_block

    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        if options.task != "transcribe" or options.language not in ("", *LANGUAGES):
            raise OptionError(f"task={options.task}, language={options.language}", "transcribe; en or de")
        language = LANGUAGES.get(options.language, 38)
        return (*SYSTEM, language, PROMPT_EMBEDDING, *options.prompt, language, 0)

    def count_frames(self, samples: int, whole: bool = False) -> int:
        return max(1, -(-samples // FRAME_SAMPLES))

    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        packing = pack_clips([self.count_frames(len(pcm)) for pcm in batch], self.block)
        frames = torch.zeros(packing.total, FRAME_SAMPLES)
        for pcm, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
            frames[offset : offset + count].view(-1)[: len(pcm)] = pcm
        return torch.tanh(self.project(frames.to(self.place))), packing


# What a model file defines: as an installed package with an entry point, other processes load it too.
CARDS = (CARD,)
CONVERTER = None


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """No settings: the sizes are CONFIG's."""


def Model(config: Config, tensors: dict[str, Tensor], device: Device) -> TinySpeechLlm:
    return TinySpeechLlm(device)


def encode(text: str) -> list[int]:
    """The inverse: of "w3 w4", and of other words nothing."""
    return [int(word[1:]) for word in text.lower().split() if word[0] == "w" and word[1:].isdigit()]


def build() -> EngineComponents:
    device = devices.make_device("cpu", "fp32")
    return EngineComponents(TinySpeechLlm(device), silero.load(), device, text, encode_text=encode)


def start(**settings: Any) -> EngineClient:
    """Unless it is told to, it remembers nothing: what is asked is computed."""
    config = {"max_decode_rows": 12, "kv_bytes": 4 << 20, "max_sessions": 2, "prefix_bytes": 0, **settings}
    return EngineClient(EngineConfig(**config), thread_backend(CARD, build))


def limit(index: int, options: SearchOptions) -> int:
    """As engine/seq2seq has it: tokens that a clip's answer may have."""
    prompt = len(SYSTEM) + 3 + len(options.prompt) + -(-len(CLIPS[index]) // FRAME_SAMPLES)
    return min(4 + int(len(CLIPS[index]) / 16_000 * CARD.tokens_per_s), CONFIG.max_position_embeddings - prompt)


class Decoder:
    """What follows any tokens after the prompt of one clip: all of it in one pass, over pages of its own."""

    def __init__(self, pcm: np.ndarray, options: SearchOptions) -> None:
        self.model = TinySpeechLlm(devices.make_device("cpu", "fp32"))
        with torch.inference_mode():
            hidden, packing = self.model.encode([torch.from_numpy(pcm)])
        self.frames = hidden[: packing.frames[0]]
        prompt = self.model.prompt_tokens(options)
        at = prompt.index(PROMPT_EMBEDDING)
        self.prompt = [*prompt[:at], *[PROMPT_EMBEDDING] * len(self.frames), *prompt[at + 1 :]]
        self.logits = cache(self._logits)

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        """(vocabulary,) after `tokens`."""
        place = self.model.place
        fed = torch.tensor([*self.prompt, *tokens], device=place)
        count, pages = len(fed), -(-len(fed) // 16)
        embeddings = torch.zeros(count, CONFIG.hidden_size, device=place)
        embeddings[fed == PROMPT_EMBEDDING] = self.frames
        pool = torch.zeros(1 + pages, self.model.layers, 2, self.model.heads, self.model.head_dim * 16, device=place)
        table = torch.arange(1, 1 + pages, dtype=torch.int32, device=place).repeat(count, 1)
        own = PagedKeyValues(pool, table, torch.arange(1, count + 1, device=place))
        with torch.inference_mode():
            logits, _ = self.model.decode(fed, own, own, torch.tensor([count - 1], device=place), embeddings)
        return logits[0].cpu().clone()


@cache
def decoder(index: int, language: str = "", prompt: tuple[int, ...] = ()) -> Decoder:
    return Decoder(CLIPS[index], SearchOptions(language=language, prompt=prompt))
