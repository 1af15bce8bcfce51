"""Speech LLMs of random weights around each family of language models, with heads that vLLM's CPU kernels take."""

from __future__ import annotations

from typing import Any

import torch
from tiny_speech_llm import CONFIG, EOS, TinySpeechLlm
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.models.causal_lm import CausalConfig, CausalLanguageModel

SETTINGS: dict[str, Any] = {
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONFIG.max_position_embeddings,
    "rms_norm_eps": 1e-6,
    "eos_token_id": EOS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6},
    "llama": {
        "rope_parameters": {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"rope_theta": 1e6},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}


def config(family: str) -> CausalConfig:
    return CausalConfig.of({**SETTINGS, "model_type": family, **FAMILIES[family]})


def weights(config: CausalConfig, seed: int = 8) -> dict[str, Tensor]:
    """A checkpoint whose answers differ from clip to clip and end at different lengths."""
    chance = torch.Generator().manual_seed(seed)
    width, query = config.hidden_size, config.num_attention_heads * config.head_dim
    key, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size

    def normal(*shape: int, std: float = 0.25) -> Tensor:
        return torch.randn(*shape, generator=chance) * std

    def norm(size: int) -> Tensor:
        return 1 - config.norm_offset + normal(size)

    found = {
        "model.embed_tokens.weight": normal(config.vocab_size, width),
        "lm_head.weight": normal(config.vocab_size, width),
        "model.norm.weight": norm(width),
    }
    found["lm_head.weight"][EOS] *= 0.8  # answers are not too short
    if config.norms_outputs:  # Gemma's head is its embedding: small, or each token would be followed by itself
        del found["lm_head.weight"]
        found["model.embed_tokens.weight"] *= 0.1
        found["model.norm.weight"] += 6
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            *(("self_attn.q_proj", query, width), ("self_attn.k_proj", key, width), ("self_attn.v_proj", key, width)),
            *(("self_attn.o_proj", width, query), ("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width)),
            ("mlp.down_proj", width, inner),
        ):
            found[f"{at}.{name}.weight"] = normal(rows, columns)
            if name[-6:] in ("q_proj", "k_proj", "v_proj") and config.input_bias:
                found[f"{at}.{name}.bias"] = normal(rows)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.norms_outputs else []
        found |= {f"{at}.{name}.weight": norm(width) for name in norms}
        if config.query_key_norm:
            found |= {f"{at}.self_attn.{name}_norm.weight": norm(config.head_dim) for name in "qk"}
    return found


class TinyFamilySpeechLlm(TinySpeechLlm):
    """TinySpeechLlm around another language model."""

    def __init__(self, family: str, device: Device) -> None:
        chosen = config(family)
        super().__init__(device, CausalLanguageModel(chosen, weights(chosen), device))
