"""Files of n-gram models, by what is in them: our own, binary files of KenLM and CMU Sphinx, ARPA."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

from asr_serve.decoding.language_model.arpa import read_arpa, write_arpa
from asr_serve.decoding.language_model.kenlm_binary import is_kenlm_binary, read_kenlm_binary
from asr_serve.decoding.language_model.ngram_tables import NGRAM_SUFFIX, WordNgrams
from asr_serve.decoding.language_model.sphinx_trie import is_sphinx_trie, read_sphinx_trie
from asr_serve.errors import OptionError, WeightsMissing
from asr_serve.output_file import replaced_file

if TYPE_CHECKING:  # it loads torch
    from asr_serve.decoding.language_model.kneser_ney import TrainedNgrams

ARPA_SUFFIXES = (".arpa", ".arpa.gz")
SUFFIXES = (NGRAM_SUFFIX, *ARPA_SUFFIXES)
"""Ends of the names of files that are written."""


def read_ngrams(path: Path) -> WordNgrams:
    """Read a model from a file of our own, of KenLM or CMU Sphinx, or an ARPA file. Raises WeightsMissing,
    WeightsCorrupt."""
    if not path.is_file():
        raise WeightsMissing(f"there is no language model {path}", "a file", "asr-serve lm build makes one from text")
    if path.name.endswith(".safetensors"):
        return WordNgrams.load(path)
    if is_sphinx_trie(path):
        return read_sphinx_trie(path)
    return read_kenlm_binary(path) if is_kenlm_binary(path) else read_arpa(path)


def check_ngram_path(path: Path) -> None:
    """Raises OptionError for a name that says no format in which models are written."""
    if not path.name.endswith(SUFFIXES):
        raise OptionError(
            f"the output {path} says no format",
            f"names that end in {', '.join(SUFFIXES)}",
            f"for a model that loads fast, {path.stem or 'model'}{NGRAM_SUFFIX}",
            param="output",
        )


def write_ngrams(trained: TrainedNgrams, path: Path) -> None:
    """Write a model in the format that the name says; a file that is there is replaced once all is written. Raises
    OptionError."""
    check_ngram_path(path)
    with replaced_file(path) as part:
        if path.name.endswith(NGRAM_SUFFIX):
            trained.to_model().save(part)
            return
        with (
            gzip.open(part, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else part.open("w", encoding="utf-8") as file
        ):
            write_arpa(trained.tables, trained.words, file)
