"""N-gram models over a recogniser's own tokens, or over the words of its decoding graph, as an engine loads them for
its searches."""

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
from asr_serve.decoding.language_model.ngram_tables import SPACE_MARKS, WordNgrams
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.errors import UnsupportedOption
from asr_serve.types import LanguageModelChoice

LEAST_SHARE = 0.5
"""Least share of a model's words that are tokens of the recogniser; beside a decoding graph, least share of its words
that are words of the graph, or of the graph's words that are its own."""

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
    def load(
        cls, path: Path, names: Sequence[str], device: torch.device, *, of_words: bool = False
    ) -> TokenLanguageModel | None:
        """Read a model for a recogniser whose tokens have these names (Tokenizer.token_names), or with `of_words` for
        one that searches a graph of words, whose tokens these are; None where it counts something else. Raises
        WeightsMissing, WeightsCorrupt."""
        ngrams = read_ngrams(path)
        if of_words:
            names = [name.removeprefix(SPACE_MARKS[0]) for name in names]
        if not (counts_words(ngrams, names) if of_words else counts_tokens(ngrams, names)):
            return None
        model = ngrams.for_tokens(names)
        digest = hashlib.blake2b(digest_size=16)
        for name, array in model.to_arrays().items():
            digest.update(name.encode())
            digest.update(array.tobytes())
        return cls(NgramScorer(model, device), digest.digest())

    def with_weight(self, weight: float) -> SessionLanguageModel:
        return SessionLanguageModel(LanguageModelFusion(self.scorer, weight), self.digest + struct.pack("<d", weight))


def counts_tokens(ngrams: WordNgrams, names: Sequence[str]) -> bool:
    """Returns whether a model counts the tokens of a recogniser that have these names. Many words are tokens inside of
    words too, so a model of words is told by having no token with a space where the recogniser has such tokens."""
    begins_words = any(len(name) > 1 and name.startswith(SPACE_MARKS) for name in names)
    return ngrams.share_of(names) >= LEAST_SHARE and not (begins_words and ngrams.token is None)


def counts_words(ngrams: WordNgrams, words: Sequence[str]) -> bool:
    """Returns whether a model counts words, among them those of a decoding graph: either vocabulary may be the larger
    one."""
    known = len(set(words).intersection(ngrams.words))
    return ngrams.token is None and max(ngrams.share_of(words), known / max(1, len(words))) >= LEAST_SHARE


def load_token_models(
    paths: Mapping[str, str], names: Sequence[str], device: torch.device, *, of_words: bool = False
) -> dict[str, TokenLanguageModel]:
    """Loaded models by name, of files by name. Those that count something else than the recogniser's tokens are left
    out with a warning: other recognisers of the same server may have them. `of_words`: see TokenLanguageModel.load.
    Raises WeightsMissing, WeightsCorrupt."""
    loaded: dict[str, TokenLanguageModel] = {}
    for name, path in paths.items():
        model = TokenLanguageModel.load(Path(path).expanduser(), names, device, of_words=of_words)
        if model is None:
            log.warning(
                "the language model %s, %s, is not made of %s, and is left out: asr-serve lm build%s makes one",
                name,
                path,
                "the words of this recogniser's decoding graph" if of_words else "this recogniser's tokens",
                "" if of_words else " --tokens MODEL",
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
