"""CMU Sphinx's binary files of n-gram models, which its tools call .lm.bin: tries, read into tables of n-grams.

A trie stores its n-grams from the last word to the first, in records of a few bits; weights are indices into tables.

Source  PocketSphinx 5, lm_trie.c and lm_trie_quant.c, a form of KenLM's quantized trie.
        tests/decoding/generate_sphinx_trie.py makes the file that tests compare with PocketSphinx's own scores.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from asr_serve.decoding.language_model.ngram_tables import (
    BEGIN,
    BEGIN_ID,
    END,
    END_ID,
    FIRST_WORD_ID,
    UNKNOWN,
    NgramTable,
    WordNgrams,
)
from asr_serve.decoding.language_model.packed_numbers import PackedNumbers, required_bits
from asr_serve.errors import WeightsCorrupt

MAGIC = b"Trie Language Model"
"""Start of every such file."""
MAX_ORDER = 16
_WEIGHT_BITS = 16
"""Bits of an index into the table of an order's log-probabilities or back-off weights."""
_QUANTIZED = 1
_LN_BASE = math.log(1.0001)
"""Natural logarithm of the base of all weights, which files do not tell and no tool changes."""
_NEVER = -99.0 * math.log(10.0)
"""Log-probability that stands for none."""


def is_sphinx_trie(path: Path) -> bool:
    """Returns whether a file starts as CMU Sphinx's binary files do. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_sphinx_trie(path: Path) -> WordNgrams:
    """Read a binary file of CMU Sphinx. Raises WeightsCorrupt."""
    try:
        return _read(np.memmap(path, np.uint8, "r"))
    except (OSError, IndexError, TypeError, UnicodeDecodeError, ValueError) as failure:
        raise WeightsCorrupt(
            f"the language model {path} is broken: {failure}", "its ARPA file, or one that sphinx_lm_convert writes"
        ) from failure


def _read(data: np.ndarray) -> WordNgrams:
    order, at = int(data[len(MAGIC)]), len(MAGIC) + 1
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"it is of order {order}, and 1 to {MAX_ORDER} are read")
    counts = _array(data, at, "<u4", order).astype(np.int64)
    at += 4 * order
    weights = np.zeros((0, 1 << _WEIGHT_BITS), np.float32)
    if order > 1:
        if _array(data, at, "<u4", 1)[0] != _QUANTIZED:
            raise ValueError("its weights are not quantized to 16 bits")
        weights = _array(data, at + 4, "<f4", (2 * order - 3) << _WEIGHT_BITS).reshape(-1, 1 << _WEIGHT_BITS)
        at += 4 + weights.nbytes
    unigrams = _array(data, at, [("logprob", "<f4"), ("backoff", "<f4"), ("next", "<u4")], int(counts[0]) + 1)
    at += unigrams.nbytes
    ngrams, nexts = np.arange(counts[0])[:, None], unigrams["next"].astype(np.int64)
    levels = [(ngrams, unigrams["logprob"][:-1], unigrams["backoff"][:-1])]
    word_bits = required_bits(int(counts[0]))
    for n in range(2, order + 1):
        # The children of a record, which are one word longer to the left, lie from its pointer to the next one's.
        # The header may count more.
        longest, rows = n == order, int(nexts[-1])
        value_bits = word_bits + (1 if longest else 2) * _WEIGHT_BITS
        next_bits = 0 if longest else required_bits(int(counts[n]))
        numbers = PackedNumbers(data, at)
        records = np.arange(rows + 1) * (value_bits + next_bits)
        words = numbers.read(records[:-1], word_bits)
        if rows > counts[n - 1] or nexts[0] != 0 or (np.diff(nexts) < 0).any() or (words >= counts[0]).any():
            raise ValueError(f"its {n}-grams do not fit those before them")
        parents = np.repeat(np.arange(len(nexts) - 1), np.diff(nexts))
        ngrams = np.column_stack([words, ngrams[parents]])
        logprobs = weights[2 * n - 4][numbers.read(records[:-1] + value_bits - _WEIGHT_BITS, _WEIGHT_BITS)]
        backoffs = np.zeros(rows, np.float32)
        if not longest:
            backoffs = weights[2 * n - 3][numbers.read(records[:-1] + word_bits, _WEIGHT_BITS)]
            nexts = numbers.read(records + value_bits, next_bits)
        levels.append((ngrams, logprobs, backoffs))
        at += ((int(counts[n - 1]) + 1) * (value_bits + next_bits) + 7) // 8 + 8
    words_bytes = int(_array(data, at, "<u4", 1)[0])
    names = data[at + 4 : at + 4 + words_bytes].tobytes().decode().split("\0")
    if len(names) != counts[0] + 1 or names.pop():
        raise ValueError("its words are not where they belong")
    return _to_ngrams(levels, names)


def _array(data: np.ndarray, at: int, dtype: str | list[tuple[str, str]], count: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize * count
    if at + size > len(data):
        raise ValueError("it ends too early")
    return np.frombuffer(data[at : at + size].tobytes(), dtype)


def _to_ngrams(levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]], names: list[str]) -> WordNgrams:
    """`levels`: n-grams (rows, order), log-probabilities and back-off weights, of orders 1, 2, ..."""
    special = {BEGIN: BEGIN_ID, END: END_ID}
    words = [UNKNOWN if name == "<UNK>" else name for name in names if name not in special]
    ids = np.array([special.get(name, -1) for name in names], np.int32)
    ids[ids < 0] = FIRST_WORD_ID + np.arange(len(words))
    tables = []
    for ngrams, logprobs, backoffs in levels:
        logprobs = np.minimum(logprobs.astype(np.float64) * _LN_BASE, 0.0)
        logprobs[logprobs <= _NEVER] = -math.inf
        tables.append(NgramTable(ids[ngrams], logprobs, backoffs.astype(np.float64) * _LN_BASE))
    return WordNgrams.from_tables(tables, words)
