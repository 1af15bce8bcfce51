"""Conversion of causal language models in GGUF files into checkpoint folders, as transformers writes them.

Source: names of tensors and metadata, and what their writer changes: gguf-py and convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.causal_lm import FULL, SLIDING
from asr_serve.models.checkpoints.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""`general.architecture` of files that are read -> transformers' class."""
MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of tensors in the file -> those of transformers."""
GEMMA_TENSORS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of tensors in Gemma's layers that differ."""
GEMMA_PATTERN, GEMMA_27B_LAYERS = 6, 62
"""Every sixth layer of Gemma 3 attends to everything; its largest model, known by its layers, scales queries by its
width, all others by the width of a head."""
WORD_PATTERNS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""`tokenizer.ggml.pre` of byte-level tokenizers -> how they cut text into words."""
SPACE = "\u2581"
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type` that are cut out of a text before all others."""


def convert(file: Path, target: Path) -> None:
    """Writes config.json, model.safetensors (matrices in float16, vectors in float32), tokenizer.json and
    tokenizer_config.json into the folder `target`. Raises WeightsCorrupt for a file that is damaged, of another
    architecture, or with a tokenizer of another kind."""
    source = GgufFile(file)
    architecture = source.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise WeightsCorrupt(f"{file} holds a {architecture}", f"one of {', '.join(ARCHITECTURES)}")
    if "rope_freqs.weight" in source.tensors:
        raise WeightsCorrupt(f"{file} has rope_freqs.weight", "rotary positions without factors for each frequency")
    settings = _settings(source, architecture)
    tensors = _tensors(source, architecture, settings)
    settings["tie_word_embeddings"] = "lm_head.weight" not in tensors
    tokenizer, special = _tokenizer(source)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special})
    )
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(settings, indent=1))


# --- settings and tensors -------------------------------------------------------------------------------------


def _settings(source: GgufFile, architecture: str) -> dict[str, Any]:
    """config.json of the model, without what the tensors tell."""

    def size(name: str) -> int:
        return source.value(f"{architecture}.{name}", int)

    def optional(name: str, other: Any) -> Any:
        return source.metadata.get(f"{architecture}.{name}", other)

    gemma = architecture == "gemma3"
    heads, width = size("attention.head_count"), size("embedding_length")
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": "gemma3_text" if gemma else architecture,
        "hidden_size": width,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("attention.head_count_kv", heads),
        "head_dim": optional("attention.key_length", width // heads),
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": source.value(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": optional("rope.freq_base", 10_000.0),
    }
    scaling = optional("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise WeightsCorrupt(f"{source.path}: rope.scaling.type={scaling}", "none or linear")
    if scaling == "linear":
        settings["rope_scaling"] = {"rope_type": "linear", "factor": optional("rope.scaling.factor", 1.0)}
    for name in ("bos", "eos"):
        if (token := source.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            settings[f"{name}_token_id"] = token
    if gemma:
        layers = settings["num_hidden_layers"]
        settings |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": optional("rope.freq_base_swa", 10_000.0),
            "sliding_window": size("attention.sliding_window"),
            "layer_types": [SLIDING if (i + 1) % GEMMA_PATTERN else FULL for i in range(layers)],
            "query_pre_attn_scalar": width // heads if layers == GEMMA_27B_LAYERS else settings["head_dim"],
        }
    else:
        settings["hidden_act"] = "silu"
    return settings


def _tensors(source: GgufFile, architecture: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors under transformers' names; `settings` get what they tell."""
    tensors: dict[str, Tensor] = {}
    for name in source.tensors:
        tensor, new_name = source.tensor(name), _new_name(source.path, name, architecture)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor - 1  # the writer adds the 1 that Gemma's norms add
        if architecture == "llama" and (kind := re.search(r"\.attn_([qk])\.", name)):
            count = settings["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
            # The writer puts the two halves of a head that rotate against each other side by side.
            tensor = tensor.view(count, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        tensors[new_name] = tensor.half() if tensor.dim() > 1 else tensor.clone()
    if "model.embed_tokens.weight" not in tensors:
        raise WeightsCorrupt(f"{source.path} has no token_embd.weight", "a whole language model")
    settings["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    if architecture != "qwen2":  # its biases are not in its settings
        settings["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
    return tensors


def _new_name(path: Path, name: str, architecture: str) -> str:
    known = LAYER_TENSORS | GEMMA_TENSORS if architecture == "gemma3" else LAYER_TENSORS
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    new = None if found is None else (MODEL_TENSORS if found[1] is None else known).get(found[2])
    if found is None or new is None:
        raise WeightsCorrupt(f"{path} has a tensor {name}", f"those of a {architecture}")
    return f"{new}.{found[3]}" if found[1] is None else f"model.layers.{found[1]}.{new}.{found[3]}"


# --- tokenizer ------------------------------------------------------------------------------------------------


def _tokenizer(source: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by the names of tokenizer_config.json."""
    kind = source.value("tokenizer.ggml.model", str)
    pieces = source.value("tokenizer.ggml.tokens", list)
    if kind == "llama":
        tokenizer = _piece_tokenizer(source, pieces)
    elif kind == "gpt2":
        tokenizer = _byte_tokenizer(source, pieces)
    else:
        raise WeightsCorrupt(f"{source.path}: tokenizer.ggml.model={kind}", "llama or gpt2")
    types = source.value("tokenizer.ggml.token_type", list)
    added = [
        AddedToken(piece, normalized=False, special=kind == CONTROL)
        for piece, kind in zip(pieces, types, strict=False)
        if kind == CONTROL or (kind == USER_DEFINED and SPACE not in piece)
    ]
    tokenizer.add_tokens(added)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: source.metadata.get(f"tokenizer.ggml.{long}_token_id") for name, long in names.items()}
    special = {f"{name}_token": pieces[token] for name, token in ids.items() if token is not None}
    return tokenizer, special


def _piece_tokenizer(source: GgufFile, pieces: list[str]) -> Tokenizer:
    """SentencePiece's byte-pair encoding: pieces with scores, of which the best is merged first."""
    scores = source.value("tokenizer.ggml.scores", list)
    if len(scores) != len(pieces):
        raise WeightsCorrupt(f"{source.path} has {len(scores)} scores of {len(pieces)} tokens", "one for each")
    ids = {piece: token for token, piece in enumerate(pieces)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(pieces, scores, strict=True):
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    unknown = source.metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            ids,
            [(left, right) for *_, left, right in merges],
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    strip: list[decoders.Decoder] = []
    if source.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _byte_tokenizer(source: GgufFile, pieces: list[str]) -> Tokenizer:
    """Byte-level byte-pair encoding, as of GPT-2, with the merges of the file."""
    pattern = source.metadata.get("tokenizer.ggml.pre")
    if pattern not in WORD_PATTERNS:
        raise WeightsCorrupt(f"{source.path}: tokenizer.ggml.pre={pattern}", f"one of {', '.join(WORD_PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in source.value("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, merges))
    if pattern == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERNS[pattern]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
