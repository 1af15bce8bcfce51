"""The language model that a speech LLM is made of, and the folder of the speech LLM."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve.decoding.language_model.causal_scorer import converted_folder
from asr_serve.decoding.language_model.packaged_models import CAUSAL_MODELS, causal_model_path
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.asr.speech_llm import funasr_folder
from asr_serve.models.asr.speech_llm.adaptors import AdaptorConfig
from asr_serve.models.asr.speech_llm.chat_prompt import BEGIN, END
from asr_serve.models.asr.speech_llm.whisper_windows import WhisperSizes
from asr_serve.models.causal_lm import CausalConfig
from asr_serve.models.model_files import WEIGHTS
from asr_serve.text.tokenizers import HubTokenizer

EMBEDDING = "model.embed_tokens.weight"
RESERVED = ("<unused0>", "<unused1>")
"""Tokens of Gemma that stand for nothing, of which a chat's marks are made."""


class LanguageModelParts(NamedTuple):
    """Language model with a tokenizer that has the marks of a chat."""

    folder: Path
    """Holds config.json and tokenizer.json."""
    config: CausalConfig
    tensors: dict[str, Tensor]
    tokenizer: HubTokenizer
    licence: str

    @classmethod
    def load(cls, name: str, folder: Path) -> LanguageModelParts:
        """Reads a language model that packages carry, or one of transformers in a folder. `folder`: where its config
        and its tokenizer are kept. Raises OptionError, WeightsMissing, WeightsCorrupt, CacheNotWritable."""
        path = Path(name).expanduser()
        if not path.is_dir() and name not in CAUSAL_MODELS:
            raise OptionError(
                f"--language-model {name}",
                f"{', '.join(CAUSAL_MODELS)}, or a folder with config.json, {WEIGHTS} and tokenizer.json",
            )
        if path.is_dir():
            source, licence = path, f"that of {path.name}"
        else:
            source, licence = converted_folder(causal_model_path(name)), CAUSAL_MODELS[name].licence
        try:
            settings = msgspec.json.decode((source / "config.json").read_bytes(), type=dict[str, Any])
            tensors = load_file(source / WEIGHTS)
            tokenizer = msgspec.json.decode((source / "tokenizer.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError, SafetensorError) as failure:
            raise WeightsCorrupt(
                f"{source} cannot be read: {failure}", f"config.json, {WEIGHTS} and tokenizer.json"
            ) from failure
        if EMBEDDING not in tensors:
            raise WeightsCorrupt(f"{source / WEIGHTS} has no {EMBEDDING}", "a causal language model has it")
        add_chat_marks(tokenizer, settings, tensors)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
        return cls(folder, CausalConfig.of(settings), tensors, HubTokenizer(folder / "tokenizer.json"), licence)


def add_chat_marks(tokenizer: dict[str, Any], settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Renames two reserved tokens to the marks that begin and end a message, where a tokenizer has none. Their
    embeddings become those of the tokens that begin and end a text. Raises WeightsCorrupt."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    added = {entry["content"]: entry for entry in tokenizer.get("added_tokens", [])}
    if BEGIN in added and END in added:
        return
    for old, new in zip(RESERVED, (BEGIN, END), strict=True):
        if old not in vocabulary or old not in added:
            raise WeightsCorrupt(f"the tokenizer has neither {new} nor {old}", "a token for the marks of a chat")
        vocabulary[new] = vocabulary.pop(old)
        added[old] |= {"content": new, "special": True}
    embedding = tensors[EMBEDDING].clone()
    for mark, name in ((BEGIN, "bos_token_id"), (END, "eos_token_id")):
        token = settings.get(name)
        token = token[0] if isinstance(token, list) else token
        if token is not None:
            embedding[vocabulary[mark]] = embedding[token]
    tensors[EMBEDDING] = embedding


def write_speech_llm(
    folder: Path,
    adaptor: AdaptorConfig,
    encoder: WhisperSizes,
    tensors: Mapping[str, Tensor],
    parts: LanguageModelParts,
    language_tensors: Mapping[str, Tensor],
) -> Path:
    """Write a folder that `asr-serve transcribe -m FOLDER` loads: whole, or not at all. `tensors`: of encoder and
    adaptor. Returns the folder."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    language_model = part / funasr_folder.LANGUAGE_MODEL
    language_model.mkdir(parents=True)
    settings = {
        "model_type": "llm_asr",
        "audio_encoder": funasr_folder.WHISPER,
        "whisper": msgspec.to_builtins(encoder),
        "audio_adaptor": "Transformer",
        "audio_adaptor_conf": msgspec.to_builtins(adaptor),
        "sys_prompt": False,
        "do_think": True,
        "licence": f"language model: {parts.licence}",
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / WEIGHTS, {"format": "pt"})
    stored = {name: tensor.contiguous() for name, tensor in language_tensors.items()}
    save_file(stored, language_model / WEIGHTS, {"format": "pt"})
    shutil.copyfile(parts.folder / "config.json", language_model / "config.json")
    for target in (language_model, part):
        shutil.copyfile(parts.folder / "tokenizer.json", target / "tokenizer.json")
    (part / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
    return folder
