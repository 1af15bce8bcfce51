"""Words in which two transcripts differ: how far a shadow is from the stable model."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

MAX_WORDS = 4_000
"""Longest transcripts that are compared: half an hour of speech. Time and memory grow with the product of both."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+(?:'\w+)?")
"""A word; in Chinese, Japanese and Korean a letter."""


class WordDifferences(NamedTuple):
    """Comparison of two transcripts."""

    words: int
    """Words of the first one."""
    differences: int
    """Words that are replaced, left out or added in the second one, at least."""


def split_words(text: str) -> list[str]:
    """Words as they are compared: without case and punctuation.

    >>> split_words("It's 5 o'clock. 你好")
    ["it's", '5', "o'clock", '你', '好']
    """
    return _WORD.findall(text.casefold())


def word_differences(text: str, other: str) -> WordDifferences | None:
    """Compares two transcripts; None: one is too long.

    >>> word_differences("The cat sat.", "the cat has sat")
    WordDifferences(words=3, differences=1)
    """
    one, two = split_words(text), split_words(other)
    if len(one) > MAX_WORDS or len(two) > MAX_WORDS:
        return None
    numbers = {word: number for number, word in enumerate({*one, *two})}
    columns = np.array([numbers[word] for word in two], np.int64)
    steps = np.arange(len(two) + 1)
    row = steps.copy()
    for word in one:
        after = np.empty_like(row)
        after[0] = row[0] + 1
        after[1:] = np.minimum(row[:-1] + (columns != numbers[word]), row[1:] + 1)
        # Words that are added: the least of all starts to the left, and the distance from there.
        row = np.minimum.accumulate(after - steps) + steps
    return WordDifferences(len(one), int(row[-1]))
