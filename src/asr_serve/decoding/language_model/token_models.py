"""N-gram models over a recogniser's own tokens, as an engine loads them for its searches."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.errors import UnsupportedOption
from asr_serve.types import LanguageModelChoice

LEAST_SHARE = 0.5
"""Least share of a model's words that are tokens of the recogniser. Of a model of words it is small: few words are
tokens."""

log = logging.getLogger(__name__)


class SessionLanguageModel(NamedTuple):
    """Language model of one session, with its weight."""

    fusion: LanguageModelFusion
    digest: bytes
    """Digest of the model's contents and of the weight."""


class TokenLanguageModel(NamedTuple):
    """Loaded language model. Read by any thread."""

    scorer: NgramScorer
    digest: bytes
    """Digest of its contents."""

    @classmethod
    def load(cls, path: Path, names: Sequence[str], device: torch.device) -> TokenLanguageModel | None:
        """Read a model for a recogniser whose tokens have these names (Tokenizer.token_names); None where it is none
        of these tokens. Raises WeightsMissing, WeightsCorrupt."""
        ngrams = read_ngrams(path)
        if ngrams.share_of(names) < LEAST_SHARE:
            return None
        model = ngrams.for_tokens(names)
        digest = hashlib.blake2b(digest_size=16)
        for name, array in model.to_arrays().items():
            digest.update(name.encode())
            digest.update(array.tobytes())
        return cls(NgramScorer(model, device), digest.digest())

    def with_weight(self, weight: float) -> SessionLanguageModel:
        return SessionLanguageModel(LanguageModelFusion(self.scorer, weight), self.digest + struct.pack("<d", weight))


def load_token_models(
    paths: Mapping[str, str], names: Sequence[str], device: torch.device
) -> dict[str, TokenLanguageModel]:
    """Loaded models by name, of files by name. Those that are none of the recogniser's tokens are left out with a
    warning: other recognisers of the same server may have them. Raises WeightsMissing, WeightsCorrupt."""
    loaded: dict[str, TokenLanguageModel] = {}
    for name, path in paths.items():
        model = TokenLanguageModel.load(Path(path).expanduser(), names, device)
        if model is None:
            log.warning(
                "the language model %s, %s, is not made of this recogniser's tokens, and is left out: "
                "asr-serve lm build --tokens MODEL makes one",
                name,
                path,
            )
        else:
            loaded[name] = model
    return loaded


def choose_language_model(
    loaded: Mapping[str, TokenLanguageModel], choice: LanguageModelChoice | None
) -> SessionLanguageModel | None:
    """Language model that a request chose; None: none. Raises UnsupportedOption for one that is not loaded."""
    if choice is None:
        return None
    if choice.name not in loaded:
        raise UnsupportedOption(
            f"language_model={choice.name}", f"loaded are: {', '.join(loaded) or 'none'}", param="language_model"
        )
    return loaded[choice.name].with_weight(choice.weight)
