"""Logits and greedy answers of transformers' causal language models with random weights, for test_causal_lm.py.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/models/generate_causal_lm.py

writes fixtures/causal_lm.safetensors: for each model its weights in half precision, with which the reference ran too,
embeddings for some positions of a prompt, and logits; and in its metadata config.json, tokens and versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

FIXTURE = Path(__file__).parent / "fixtures" / "causal_lm.safetensors"
EMBEDDED = range(5, 14)
"""Positions of the prompt whose input is an embedding."""
PROMPT_TOKENS, ANSWER_TOKENS = 40, 24
SHARED: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**SHARED, "model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": True},
    "qwen3 with a window": {
        **SHARED,
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen2": {**SHARED, "model_type": "qwen2"},
    "llama": {**SHARED, "model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama 3": {**SHARED, "model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "gemma 3": {
        **SHARED,
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 12,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def reference(settings: dict[str, Any]) -> Any:
    """With large weights: with the usual small ones every token looks the same and nothing would be tested."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(**settings, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval().float()
    scale = config.hidden_size**0.5 if config.model_type == "gemma3_text" else 1.0  # by which it multiplies embeddings
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                deviation = 0.3 / scale if "embed" in name else 2.5 * value[0].numel() ** -0.5
                value.copy_(torch.randn_like(value) * deviation)
            elif "norm" in name:
                value.add_(0.3 * torch.randn_like(value))
            else:
                value.copy_(0.3 * torch.randn_like(value))
            value.copy_(value.half().float())
    return model


@torch.no_grad()
def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    for name, settings in MODELS.items():
        model = reference(settings)
        chance = torch.Generator().manual_seed(11)
        tokens = torch.randint(0, settings["vocab_size"], (1, PROMPT_TOKENS), generator=chance)
        inputs = model.get_input_embeddings()(tokens)
        given = torch.randn(len(EMBEDDED), settings["hidden_size"], generator=chance)
        inputs[0, EMBEDDED.start : EMBEDDED.stop] = given
        answer: list[int] = []
        while True:
            logits = model(inputs_embeds=inputs, use_cache=False).logits[0]
            if len(answer) == ANSWER_TOKENS:
                break
            answer.append(int(logits[-1].argmax()))
            inputs = torch.cat([inputs, model.get_input_embeddings()(torch.tensor([answer[-1:]]))], dim=1)
        assert len(set(answer)) > 3, f"{name} says the same again and again: {answer}"
        weights = {key: value for key, value in model.state_dict().items() if "rotary" not in key}
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        tensors |= {f"{name}.weights.{key}": value.half().contiguous() for key, value in weights.items()}
        tensors |= {f"{name}.embeddings": given, f"{name}.logits": logits}
        prompt = tokens[0].tolist()
        prompt[EMBEDDED.start : EMBEDDED.stop] = [-1] * len(EMBEDDED)
        facts[name] = {"config": model.config.to_dict(), "prompt": prompt, "answer": answer}
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, FIXTURE, metadata={"facts": json.dumps(facts)}
    )
    print(FIXTURE.stat().st_size, facts["versions"], [facts[name]["answer"] for name in MODELS])


if __name__ == "__main__":
    main()
