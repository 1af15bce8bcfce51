"""Training of n-gram models by interpolated modified Kneser-Ney smoothing.

All n-grams of a text are counted as integers: an n-gram is the row of its first words in the table of the order below,
and its last word. So a gigabyte of text needs a few sorts and no dictionary.

Source  Chen and Goodman 1999, An empirical study of smoothing techniques for language modeling, section 3 and
        appendix; the treatment of <s>, of unknown words and of pruning as in Heafield et al., ACL 2013
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
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
from asr_serve.errors import OptionError

MAX_ORDER = 8
MAX_DISCOUNTED = 3
"""Counts from which on all have one discount."""
SENTENCES_AT_ONCE = 4096
"""Sentences whose perplexity is computed together."""
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Discounts of counts 1, 2 and 3 or more where a text is too small or too regular to estimate them, as KenLM has
them for this case."""


class TrainedNgrams(NamedTuple):
    """Result of training."""

    tables: list[NgramTable]
    words: list[str]
    """Words by id in the tables, from FIRST_WORD_ID on; <unk> is the first."""
    discounts: list[tuple[float, float, float]]
    """Discounts of each order, of n-grams counted once, twice, and more often."""

    def to_model(self) -> WordNgrams:
        return WordNgrams.from_tables(self.tables, self.words)


def train(
    sentences: Iterable[Sequence[str]], order: int = 3, prune: Sequence[int] = (), vocabulary: Sequence[str] = ()
) -> TrainedNgrams:
    """Train a model of `order` on sentences of words.

    Args:
        prune: for each order from 1 on the largest count of n-grams that are left out; the last number holds for
            all longer ones. () keeps all. Numbers do not fall, and words (order 1) are always kept.
        vocabulary: all words; others count as <unk>. (): the words of the text.

    Raises OptionError for options out of range, a text without a sentence, or words that mark sentences.
    """
    if not 1 <= order <= MAX_ORDER:
        raise OptionError(f"order={order}", f"1 to {MAX_ORDER}", param="order")
    thresholds = [*prune, *[prune[-1] if prune else 0] * order][:order]
    if any(each < 0 for each in thresholds) or thresholds != sorted(thresholds) or thresholds[0]:
        raise OptionError(f"prune={','.join(map(str, prune))}", "counts that do not fall, 0 first", param="prune")
    text, words = _number(sentences, vocabulary)
    levels = _count(text, order, FIRST_WORD_ID + len(words))
    tables, discounts, rows_below = list[NgramTable](), [], np.zeros(1, np.int64)
    for n, (level, threshold) in enumerate(zip(levels, thresholds, strict=True), start=1):
        # An n-gram occurs no more often than its parts: where it is kept, they are.
        kept = np.ones(len(level.words), bool) if n == 1 else level.raw > threshold
        discounts.append(_discounts(level.adjusted[level.words[:, -1] != BEGIN_ID]))
        smoothed = _smooth(level, kept, discounts[-1])
        if n == 1:
            tables.append(_unigrams(level, smoothed))
        else:
            # A context all of whose n-grams were left out has no weight: its shorter one is used as it is.
            below, used = tables[-1], np.unique(level.prefix[kept])
            below.backoffs[rows_below[used]] = np.log(smoothed.left[used])
            lower = np.exp(below.logprobs[rows_below[level.suffix[kept]]])
            probability = smoothed.own[kept] + smoothed.left[level.prefix[kept]] * lower
            tables.append(NgramTable(level.words[kept], np.log(probability), np.zeros(len(probability))))
        rows_below = np.cumsum(kept) - 1
    return TrainedNgrams(tables, words, discounts)


def perplexity(ngrams: WordNgrams, sentences: Iterable[Sequence[str]]) -> Perplexity:
    """Perplexity of sentences, their ends included. Words that the model lacks are its <unk>, and are counted apart:
    they are part of a context and not of the perplexity."""
    ids, scorer = {word: index for index, word in enumerate(ngrams.words)}, NgramScorer(ngrams.model)
    unknown_id = ids.pop(UNKNOWN, -1)
    total, scored, unknown, words = 0.0, 0, 0, 0
    remaining = iter(sentences)
    while batch := sorted(islice(remaining, SENTENCES_AT_ONCE), key=len, reverse=True):
        lengths = torch.tensor([len(sentence) for sentence in batch])
        states = torch.full((len(batch),), scorer.initial_state)
        for position in range(len(batch[0])):
            live = int((lengths > position).sum())  # the longest come first
            found = [ids.get(sentence[position], -1) for sentence in batch[:live]]
            known = torch.tensor(found) >= 0
            tokens = torch.tensor(found).where(known, torch.tensor(unknown_id))
            logprobs, states[:live] = scorer.score(states[:live], tokens)
            total += float(logprobs[known].sum())
            words, scored, unknown = words + live, scored + int(known.sum()), unknown + int((~known).sum())
        total, scored = total + float(scorer.final_logprobs(states).sum()), scored + len(batch)
    return Perplexity(math.exp(-total / scored) if scored else math.nan, words, unknown)


class Perplexity(NamedTuple):
    """Perplexity of a text."""

    perplexity: float
    """Perplexity of known words and ends of sentences; nan for an empty text, inf where one of them cannot be."""
    words: int
    unknown: int
    """Words that the model lacks."""


class _Level(NamedTuple):
    """All n-grams of one order that a text has."""

    words: np.ndarray
    """(rows, order) int32."""
    prefix: np.ndarray
    """(rows,) int64: row of the first words in the order below."""
    suffix: np.ndarray
    """(rows,) int64: row of the last words in the order below."""
    raw: np.ndarray
    """(rows,) int64: occurrences."""
    adjusted: np.ndarray
    """(rows,) int64: of the longest order and after <s> occurrences, else different words before it."""


def _number(sentences: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """The text as ids, each sentence with its start and end, and the words by id from FIRST_WORD_ID on."""
    ids = {UNKNOWN: FIRST_WORD_ID}
    for word in vocabulary:
        ids.setdefault(word, FIRST_WORD_ID + len(ids))
    closed, text = bool(vocabulary), array("i")
    for sentence in sentences:
        text.append(BEGIN_ID)
        for word in sentence:
            if word in (BEGIN, END):
                raise OptionError(f"the text has the word {word}", "none: each line is a sentence", param="text")
            known = ids.get(word)
            if known is None:
                known = FIRST_WORD_ID if closed else ids.setdefault(word, FIRST_WORD_ID + len(ids))
            text.append(known)
        text.append(END_ID)
    if not text:
        raise OptionError("no sentence to train on", "text with a sentence a line", param="text")
    return np.frombuffer(text, np.int32), list(ids)


def _count(text: np.ndarray, order: int, vocabulary: int) -> list[_Level]:
    """Count the n-grams of all orders."""
    levels: list[_Level] = []
    rows = np.zeros(len(text), np.int64)
    """Row of the n-gram that begins at each position, in the order below; -1 past the end of its sentence."""
    for n in range(1, order + 1):
        last = np.full(len(text), -1, np.int64)
        last[: len(text) - n + 1] = text[n - 1 :]
        valid = (rows >= 0) & (last >= 0)
        if n > 1:  # an end or a start within it makes it none of one sentence
            valid &= last != BEGIN_ID
            valid[: len(text) - n + 2] &= text[n - 2 :][: len(text) - n + 2] != END_ID
        positions = np.flatnonzero(valid)
        keys, first, inverse, raw = np.unique(
            rows[positions] * vocabulary + last[positions], return_index=True, return_inverse=True, return_counts=True
        )
        first = positions[first]
        words = np.stack([text[first + offset] for offset in range(n)], 1)
        prefix = keys // vocabulary
        next_row = np.append(rows[1:], -1)
        suffix = next_row[first] if n > 1 else np.zeros(len(keys), np.int64)
        if n > 1:  # how many different words come before each n-gram of the order below
            below = levels[-1]
            adjusted = np.bincount(suffix, minlength=len(below.words))
            levels[-1] = below._replace(adjusted=np.where(below.words[:, 0] == BEGIN_ID, below.raw, adjusted))
        levels.append(_Level(words, prefix, suffix, raw, raw))
        rows = np.full(len(text), -1, np.int64)
        rows[positions] = inverse
    return levels


def _discounts(adjusted: np.ndarray) -> tuple[float, float, float]:
    """Discounts of n-grams counted once, twice, and more often."""
    counts = np.bincount(np.minimum(adjusted, 5), minlength=6)[1:5].astype(float)
    if (counts == 0).any():
        return FALLBACK_DISCOUNTS
    share = counts[0] / (counts[0] + 2 * counts[1])
    found = [k - (k + 1) * share * counts[k] / counts[k - 1] for k in (1, 2, 3)]
    if any(not 0.0 < value <= k for k, value in enumerate(found, start=1)):
        return FALLBACK_DISCOUNTS
    return found[0], found[1], found[2]


class _Smoothed(NamedTuple):
    """Discounted counts of one order, as shares."""

    own: np.ndarray
    """(rows,): probability of each n-gram from its own count."""
    left: np.ndarray
    """(contexts,): share that a context leaves to its shorter one."""


def _smooth(level: _Level, kept: np.ndarray, discounts: Sequence[float]) -> _Smoothed:
    counts = np.where(level.words[:, -1] == BEGIN_ID, 0, level.adjusted).astype(float)
    discount = np.array([0.0, *discounts])[np.minimum(counts, MAX_DISCOUNTED).astype(int)]
    # What is left out gives all of its mass to shorter contexts.
    given = np.where(kept, discount, counts)
    contexts = int(level.prefix.max()) + 1
    totals, shares = np.bincount(level.prefix, counts, contexts), np.bincount(level.prefix, given, contexts)
    left = np.divide(shares, totals, out=np.ones(contexts), where=totals > 0)
    sums = totals[level.prefix]
    return _Smoothed(np.divide(counts - given, sums, out=np.zeros(len(counts)), where=sums > 0), left)


def _unigrams(level: _Level, smoothed: _Smoothed) -> NgramTable:
    """Words, which share what is left evenly with <unk>."""
    words, own = level.words, smoothed.own
    if FIRST_WORD_ID not in words[:, 0]:
        words, own = np.append(words, np.array([[FIRST_WORD_ID]], np.int32), 0), np.append(own, 0.0)
    predicted = words[:, 0] != BEGIN_ID
    probability = np.where(predicted, own + smoothed.left[0] / predicted.sum(), 1.0)
    return NgramTable(words, np.where(predicted, np.log(probability), -math.inf), np.zeros(len(words)))
