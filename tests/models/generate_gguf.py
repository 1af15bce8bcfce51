"""GGUF files of tiny language models, and what gguf and transformers read in them, for test_gguf.py.

    pip install transformers==5.23.0 torch==2.13.0 gguf==0.19.0 accelerate==1.15.0
    python tests/models/generate_gguf.py

writes fixtures/gguf_ARCHITECTURE.gguf, written as llama.cpp's converter does, and fixtures/gguf.safetensors: of each
model the logits after some tokens; of each block format random blocks and what gguf makes of them; and in its metadata
texts with their tokens, and versions.
"""

from __future__ import annotations

import json
import string
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter, dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TEXTS = ("hello  world", "so\nwe 42 go", "für <b>", "", " a", "go<end>now")
TOKENS = [3, 9, 4, 30, 31, 12, 5]
SHARED = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHARED, "model_type": "llama", "num_hidden_layers": 2},
    "qwen3": {**SHARED, "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 128, "tie_word_embeddings": True},
    "gemma3": {
        **SHARED,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
    },
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}


def vocabulary(architecture: str) -> tuple[list[str], list[float], list[int], list[str]]:
    """Pieces, their scores and kinds, and merges of byte-level ones."""
    words = ["he", "ll", "hell", "hello", "wo", "rl", "world", "so", "go", "we"]
    if architecture == "qwen3":
        letters = sorted(ByteLevel.alphabet())
        merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "g o"]
        pieces = [*letters, *(merge.replace(" ", "") for merge in merges), "<end>"]
        return pieces, [], [1] * (len(pieces) - 1) + [3], merges
    letters = [*string.ascii_lowercase, *"42", "▁"]
    words += ["▁w", "▁world", "▁▁"]
    pieces = ["<unk>", "<s>", "</s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * (len(letters) + len(words))
    scores = [0.0] * 260 + [-100.0 - i for i in range(len(letters))] + [-1.0 - i for i in range(len(words))]
    return pieces, scores, kinds, []


def write(architecture: str, model: Any) -> Path:
    config, path = model.config, FIXTURES / f"gguf_{architecture}.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1e6)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture != "llama":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    pieces, scores, kinds, merges = vocabulary(architecture)
    writer.add_tokenizer_model("gpt2" if merges else "llama")
    writer.add_tokenizer_pre("qwen2" if merges else "default")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(len(pieces) - 1 if merges else 2)
    if merges:
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(architecture == "llama")
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[2] if ".layers." in stem else None
        part = stem if layer is None else stem.split(".", 3)[3]
        new = NAMES.get(part) or ("post_attention_norm" if architecture == "gemma3" else "ffn_norm")
        if architecture == "gemma3" and "norm" in name:
            value = value + 1
        if architecture == "llama" and new in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if new == "attn_q" else config.num_key_value_heads
            value = value.view(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        array = value.numpy().astype(np.float32 if value.dim() == 1 else np.float16)
        writer.add_tensor(f"{new}.{kind}" if layer is None else f"blk.{layer}.{new}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    packages = ("transformers", "torch", "gguf", "accelerate")
    facts: dict[str, Any] = {"versions": {package: version(package) for package in packages}}
    for architecture, settings in MODELS.items():
        torch.manual_seed(3)
        size = len(vocabulary(architecture)[0])
        config = transformers.AutoConfig.for_model(**settings, vocab_size=size, attn_implementation="eager")
        model = AutoModelForCausalLM.from_config(config).eval().float()
        for name, value in model.named_parameters():
            value.add_(0.3 * torch.randn_like(value)) if "norm" in name else value.mul_(8.0)
            value.copy_(value.half().float())
        path = write(architecture, model)
        place = {"pretrained_model_name_or_path": FIXTURES, "gguf_file": path.name}
        read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(read.state_dict()[name], value, msg=name)
        # Not of `read`: transformers takes the scale of Gemma's queries to be 256, whatever the width of a head.
        tensors[f"{architecture}.logits"] = model(torch.tensor([TOKENS])).logits[0]
        tokenizer = AutoTokenizer.from_pretrained(**place)
        facts[architecture] = {text: tokenizer.encode(text, add_special_tokens=False) for text in TEXTS}
    rng = np.random.default_rng(5)
    for name in FORMATS:
        kind = GGMLQuantizationType[name]
        raw = rng.integers(0, 256, (3, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        raw[:, 1] &= 0x3F  # the first scale is finite and positive, if the block begins with it
        if name == "Q6_K":
            raw[:, 209] &= 0x3F
        if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            raw[:, 3] &= 0x3F
        tensors[f"{name}.raw"] = torch.from_numpy(raw)
        tensors[f"{name}.numbers"] = torch.from_numpy(dequantize(raw, kind).astype(np.float32))
        assert tensors[f"{name}.numbers"].isfinite().all(), name
    save_file(tensors, FIXTURES / "gguf.safetensors", metadata={"facts": json.dumps(facts)})
    print({path.name: path.stat().st_size for path in sorted(FIXTURES.glob("gguf*"))}, facts)


if __name__ == "__main__":
    main()
