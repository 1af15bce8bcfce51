"""Folders of causal language models, as transformers and vLLM load them: config.json and model.safetensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from asr_serve.config import cache_dir
from asr_serve.errors import CacheNotWritable, ModelError
from asr_serve.models.causal_lm import ACTIVATIONS, FULL, SLIDING, CausalConfig, RotaryConfig
from asr_serve.transfer.checksum import checksum

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""transformers' classes by `model_type`."""
SCALE_DIGITS = 6
"""Decimals of a restored `query_pre_attn_scalar`, which is a whole number in every release."""
FOLDERS = "language-models"
"""Folder below the cache's."""


def causal_lm_settings(config: CausalConfig, dtype: torch.dtype, *, tied: bool) -> dict[str, Any]:
    """Contents of config.json. `dtype`: of the tensors; `tied`: whether the output projection is the embedding. Raises
    ModelError for a model that none of transformers' classes computes."""
    gemma = config.norms_outputs
    family = "gemma3_text" if gemma else "qwen3" if config.query_key_norm else "llama"
    if family == "llama" and config.input_bias and not config.output_bias:
        family = "qwen2"
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    rotary = {kind: _rotary_settings(each) for kind, each in config.rotary.items()}
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": activation,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": rotary if gemma else rotary[FULL],
        "tie_word_embeddings": tied,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": list(config.eos_tokens) or None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if gemma:
        scalar = round(config.attention_scale**-2, SCALE_DIGITS)
        scalar = int(scalar) if scalar.is_integer() else scalar  # transformers' class takes no other
        settings |= {"hidden_activation": activation, "query_pre_attn_scalar": scalar}
    if gemma or SLIDING in config.layer_types:
        settings |= {"layer_types": list(config.layer_types), "use_sliding_window": not gemma}
        settings["sliding_window"] = config.sliding_window or None
        settings["max_window_layers"] = config.layer_types.count(FULL)
    if (read := CausalConfig.of(settings)) != config:
        differing = [name for name in config.__struct_fields__ if getattr(read, name) != getattr(config, name)]
        raise ModelError(
            f"a language model like {family}, with another {', '.join(differing)}",
            f"what transformers computes: {', '.join(ARCHITECTURES.values())}",
        )
    return settings


def _rotary_settings(rotary: RotaryConfig) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(rotary)
    return settings if rotary.rope_type != "default" else {name: settings[name] for name in ("rope_theta", "rope_type")}


def write_causal_lm(folder: Path, config: CausalConfig, tensors: Mapping[str, Tensor]) -> None:
    """Writes a language model into an empty folder. `tensors`: by the names of transformers' class, as CausalTensors
    reads them. Raises ModelError, OSError."""
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    head, embedding = stored.get("lm_head.weight"), stored["model.embed_tokens.weight"]
    tied = head is None or torch.equal(head, embedding)
    if tied:
        stored.pop("lm_head.weight", None)
    settings = causal_lm_settings(config, embedding.dtype, tied=tied)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def cached_causal_lm(config: CausalConfig, tensors: Mapping[str, Tensor]) -> Path:
    """Folder of a language model in the cache, which is written where it is not there yet: whole, or not at all. Raises
    ModelError, CacheNotWritable."""
    target = cache_dir() / FOLDERS / _digest(config, tensors)
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            write_causal_lm(part, config, tensors)
            part.chmod(0o755)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as failure:
        if (target / "config.json").is_file():  # another process was faster
            return target
        raise CacheNotWritable(
            f"{target} cannot be written: {failure}", "a folder with room for the language model", "set ASR_SERVE_CACHE"
        ) from failure
    return target


def _digest(config: CausalConfig, tensors: Mapping[str, Tensor]) -> str:
    """Name of a folder: checksum of all that is written to it."""
    facts = [
        (name, str(tensor.dtype), tuple(tensor.shape), checksum(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
        for name, tensor in sorted(tensors.items())
    ]
    return f"{checksum(repr((config, facts)).encode()):016x}"
