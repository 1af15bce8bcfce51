"""Agreement of two hypotheses of the same speech: their common prefix in words, or the overlap of the end of one
with the start of the next.

Source  stable words as the agreement of consecutive hypotheses: LocalAgreement, Liu et al., Interspeech 2020,
        arXiv:2005.11185
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asr_serve.text.tokenizers import token_parts
from asr_serve.text.word_timing import is_unspaced, split_words, word_openings

SEAM_WORDS = 12
"""Words of each hypothesis that are matched; an overlap of 2.4 s holds about seven."""
GARBLED_WORDS = 3
"""Most words that a hypothesis may get wrong at the edge of its audio."""
DISTINCTIVE_LETTERS = 4
"""Least length of a single matching word, and least number of words of one letter; fewer match too often by chance."""
GAP_COST = 0.3
"""Cost of a word that is in only one of the two, in units of a match."""

Text = Callable[[list[int]], str]


def words_of(text: str) -> list[str]:
    """Words of a text: what stands between spaces; where it has letters of a script without spaces, each of those too,
    with the punctuation after it.

    >>> words_of("It is."), words_of("你好，world 3")
    (['It', 'is.'], ['你', '好，', 'world', '3'])
    """
    return _splitter(text)(text)


def _splitter(text: str) -> Callable[[str], list[str]]:
    if text.isascii() or not any(map(is_unspaced, text)):
        return str.split
    return lambda part: [part[first:behind] for first, behind in split_words(part)]


def word_ends(tokens: Sequence[int], text: Text) -> list[int]:
    """Number of tokens up to the end of each word; the last is len(tokens)."""
    whole = text(list(tokens))
    if _splitter(whole) is str.split:
        openings = [match.start() for match in re.finditer(r"\S+", whole)]
    else:
        openings = word_openings(whole)
    ends: list[int] = []
    words = length = 0
    for count, (part, unfinished) in enumerate(token_parts(tokens, text), 1):
        length += len(part)
        while words < len(openings) and openings[words] < length:
            words += 1
        if unfinished:
            continue  # the first bytes of a character belong to the word in which it is
        if words > len(ends):
            ends.append(count)
        elif ends:
            ends[-1] = count
    return ends


def agreed_count(before: Sequence[object], after: Sequence[object]) -> int:
    """Number of words or tokens at the start of two hypotheses that are the same.

    >>> agreed_count(["ever", "tried"], ["ever", "failed", "no"])
    1
    """
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    return same


def whole_word_tokens(tokens: Sequence[int], limit: int, text: Text) -> int:
    """Number of tokens in the whole words at the start of a hypothesis, of its first `limit` tokens."""
    return max((end for end in word_ends(tokens, text) if end <= limit), default=0)


def merge_overlap(left: Sequence[str], right: Sequence[str]) -> tuple[int, int] | None:
    """Merge two word lists whose audio overlaps: how many words of `left` to keep, and how many of `right` to
    skip.

    The end of `left` is aligned with the start of `right` so that the most words match, in order; a few at the
    edges may be garbled. The lists are joined at the last match. None where too little matches.
    """
    if not left or not right:
        return len(left), 0
    left_words = [_plain(word) for word in left[-SEAM_WORDS:]]
    right_words = [_plain(word) for word in right[:SEAM_WORDS]]
    best = _Match(0.0, 0, 0, 0, "")
    matches: list[_Match] = []
    for i, word in enumerate(left_words):
        for j in range(len(right_words)):
            if word != right_words[j] or not word:
                continue
            before = [
                match.then(i, j, word, match.score - GAP_COST * max(i - match.i - 1, j - match.j - 1))
                for match in matches
                if match.i < i and match.j < j
            ]
            if j <= GARBLED_WORDS:
                before.append(_Match(1 - GAP_COST * j, i, j, 1, word))
            if not before:
                continue
            matches.append(max(before))
            after = len(left_words) - 1 - i
            if after <= GARBLED_WORDS:
                best = max(best, matches[-1]._replace(score=matches[-1].score - GAP_COST * after))
    enough = 2 if len(best.longest) > 1 else DISTINCTIVE_LETTERS
    if best.words >= enough or len(best.longest) >= DISTINCTIVE_LETTERS:
        return len(left) - len(left_words) + best.i + 1, best.j + 1
    return None


class _Match(NamedTuple):
    """Best alignment that ends with the match of left_words[i] and right_words[j]."""

    score: float
    i: int
    j: int
    words: int
    longest: str

    def then(self, i: int, j: int, word: str, score: float) -> _Match:
        return _Match(score + 1, i, j, self.words + 1, max(self.longest, word, key=len))


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())
