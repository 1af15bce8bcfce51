"""Hub folders of speech LLMs with random weights, as the fixture hub_speech_llms.safetensors has them, and clips."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixture_files import facts_of, tensors_of
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

FIXTURE = Path(__file__).parent / "fixtures" / "hub_speech_llms.safetensors"
CARDS = {"glm": "glm-asr-nano", "voxtral": "voxtral-mini-3b", "qwen3": "qwen3-asr-0.6b"}
"""Names of the families in the fixture -> cards."""
WINDOW_S = 2
"""Length of a window; the published models have 30 s."""
LENGTHS = (6_400, 32_000, 75_441, 1_000)
"""Samples of the clips: part of a window, a whole one, several with a rest, and hardly anything."""
SPECIAL_TOKENS = (
    *("<|pad|>", "<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|endoftext|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]"),
    *("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<asr_text>"),
)


@cache
def clips() -> list[np.ndarray]:
    """Tones that change, in noise: float32 in -1..1."""
    chance = np.random.RandomState(5)  # its numbers are the same in every release of numpy
    made = []
    for number, samples in enumerate(LENGTHS):
        at = np.arange(samples) / 16_000
        tone = np.sin(2 * np.pi * (200 + 90 * number) * at * (1 + 0.4 * np.sin(9 * at))) * (0.6 + 0.4 * np.sin(17 * at))
        made.append((0.3 * tone + 0.02 * chance.randn(samples)).astype(np.float32))
    return made


def tokenizer() -> Tokenizer:
    """Bytes, a few merges, and the special tokens of all families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(word[:-1], word[-1]) for word in ("an", "la", "gu", "tr", "io", "ion")]
    vocabulary = {piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made


def facts() -> dict[str, Any]:
    """For each family `config`, and for each clip the prompts, and the answer to each."""
    return facts_of(FIXTURE)


def tensors() -> dict[str, Tensor]:
    return tensors_of(FIXTURE)


def weights(family: str) -> dict[str, Tensor]:
    """Tensors by the names with which transformers saves them."""
    start = f"{family}.weights."
    return {name[len(start) :]: tensor for name, tensor in tensors().items() if name.startswith(start)}


def write_folder(family: str, folder: Path, **settings: Any) -> Path:
    """Writes a folder as the hub has it. `settings`: in place of those in config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts()[family]["config"] | settings))
    save_file(weights(family), folder / "model.safetensors")
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_shards(family: str, folder: Path) -> Path:
    """Writes a folder whose tensors lie in two files."""
    write_folder(family, folder)
    (folder / "model.safetensors").unlink()
    names, mapping = sorted(weights(family)), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights(family)[name] for name in part}, folder / shard)
        mapping |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return folder


def audio(index: int) -> Tensor:
    return torch.from_numpy(clips()[index])
