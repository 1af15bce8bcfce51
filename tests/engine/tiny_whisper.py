"""A Whisper of random weights, the engine around it, and what its decoder says of one clip without that engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import tiny_configs
import torch
from tiny_moonshine import clip, text
from torch import Tensor
from torch.nn import functional as F

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.asr.whisper import whisper
from asr_serve.models.auxiliary import silero
from asr_serve.models.packing import PagedKeyValues

CONFIG = tiny_configs.whisper_config()
SPECIAL = CONFIG.special
CARD = msgspec.structs.replace(
    moonshine.CARDS[0], name="tiny-random-whisper", kind="whisper", max_segment_ms=2_000, tokens_per_s=12.0
)
CLIPS = [clip(seed, samples) for seed, samples in enumerate([32_000, 16_000, 4_000, 24_000, 9_000, 28_500])]
PAGES = 32


def weights(config: whisper.Config, seed: int = 3) -> dict[str, Tensor]:
    """A checkpoint whose answers differ from clip to clip and end at different lengths."""
    chance = torch.Generator().manual_seed(seed)
    width = config.d_model

    def normal(*shape: int, std: float = 0.4) -> Tensor:
        return torch.randn(*shape, generator=chance) * std

    found = {
        "encoder.conv1.weight": normal(width, config.num_mel_bins, 3),
        "encoder.conv1.bias": normal(width),
        "encoder.conv2.weight": normal(width, width, 3),
        "encoder.conv2.bias": normal(width),
        "encoder.embed_positions.weight": normal(config.max_source_positions, width),
        "decoder.embed_positions.weight": normal(config.max_target_positions, width, std=3.0),
        # Of one length all of them, or one would be said again and again.
        "decoder.embed_tokens.weight": 3 * F.normalize(normal(config.vocab_size, width)),
    }
    for side, layers, inner in (
        ("encoder", config.encoder_layers, config.encoder_ffn_dim),
        ("decoder", config.decoder_layers, config.decoder_ffn_dim),
    ):
        norms = [f"{side}.layer_norm"]
        for layer in range(layers):
            at = f"{side}.layers.{layer}"
            blocks = ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]
            norms += [f"{at}.final_layer_norm", *[f"{at}.{block}_layer_norm" for block in blocks]]
            for name, rows, columns in (
                *[(f"{block}.{kind}_proj", width, width) for block in blocks for kind in ("q", "k", "v", "out")],
                ("fc1", inner, width),
                ("fc2", width, inner),
            ):
                found[f"{at}.{name}.weight"] = normal(rows, columns)
                if not name.endswith("k_proj"):
                    found[f"{at}.{name}.bias"] = normal(rows)
        for norm in norms:
            found[f"{norm}.weight"], found[f"{norm}.bias"] = 1 + normal(width), normal(width)
    mean = found["decoder.layer_norm.bias"]
    found["decoder.embed_tokens.weight"][config.special.eot] += 6 * mean / (mean @ mean)  # answers do end
    return found


def encode(text: str) -> list[int]:
    """The inverse: of "w3 w4", and of other words nothing."""
    words = [word.lower() for word in text.split()]
    return [int(word[1:]) for word in words if word[0] == "w" and word[1:].isdigit()]


def build() -> EngineComponents:
    device = devices.make_device("cpu", "fp32")
    return EngineComponents(
        whisper.Model(CONFIG, weights(CONFIG), device), silero.load(), device, text, encode_text=encode
    )


def start(**settings: Any) -> EngineClient:
    config = {"max_decode_rows": 12, "kv_bytes": 2 << 20, "max_sessions": 2, "prefix_bytes": 0, **settings}
    return EngineClient(EngineConfig(**config), thread_backend(CARD, build))


def limit(index: int) -> int:
    """As engine/seq2seq/executor has it: tokens that a clip's answer may have, before what it begins with."""
    return 4 + int(len(CLIPS[index]) / 16_000 * CARD.tokens_per_s)


class Decoder:
    """What follows any tokens over one clip: all of them in one pass, over pages of its own."""

    def __init__(self, pcm: np.ndarray) -> None:
        made = build()
        self.model, self.place = made.model, made.device.torch_device
        with torch.inference_mode():
            hidden, packing = self.model.encode([torch.from_numpy(pcm)])
            cross = self.model.cross_keys_values(hidden)[: packing.frames[0]]
            shape = (PAGES, self.model.layers, 2, self.model.heads, self.model.head_dim * 16)
            self.pool = made.device.allocate(*shape).zero_()
            self.audio = torch.arange(1, 1 + -(-len(cross) // 16), dtype=torch.int32, device=self.place)[None]
            first = PAGES - CONFIG.max_target_positions // 16
            self.own = torch.arange(first, PAGES, dtype=torch.int32, device=self.place)[None]
            assert int(self.audio.max()) < int(self.own.min())
            made.device.kernels.store(self.pool, cross, self.audio[0])
        self.frames = len(cross)
        self.logits = cache(self._logits)

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        """(vocabulary,) after `tokens`."""
        count = len(tokens)
        lengths = torch.arange(1, count + 1, device=self.place)
        own = PagedKeyValues(self.pool, self.own.repeat(count, 1), lengths)
        audio = PagedKeyValues(self.pool, self.audio.repeat(count, 1), torch.full_like(lengths, self.frames))
        with torch.inference_mode():
            logits, *_ = self.model.decode(torch.tensor(tokens, device=self.place), own, audio)
        return logits[-1].cpu().clone()


@cache
def decoder(index: int) -> Decoder:
    return Decoder(CLIPS[index])
