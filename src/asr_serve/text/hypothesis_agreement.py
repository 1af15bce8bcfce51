"""Where two hypotheses of the same speech agree: word by word, or where the end of one meets the start of the
next.

Source  agreement of consecutive hypotheses as the rule for what is certain: LocalAgreement, Liu et al.,
        Interspeech 2020, arXiv:2005.11185
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

SEAM_WORDS = 12
"""Words on both sides of a seam among which the two are matched; an overlap of 2.4 s holds about seven."""
GARBLED_WORDS = 3
"""Words that the edge of its audio may have cost a hypothesis."""
DISTINCTIVE_LETTERS = 4
"""A lone word that matches must be as long as this; shorter ones are everywhere."""
GAP_COST = 0.3
"""Of a word that only one of the two says, in matches."""

Text = Callable[[list[int]], str]


def word_ends(tokens: Sequence[int], text: Text) -> list[int]:
    """How many tokens it takes to say the first word, the first two, and so on; the last is len(tokens)."""
    ends: list[int] = []
    for count in range(1, len(tokens) + 1):
        words = len(text(list(tokens[:count])).split())
        if words > len(ends):
            ends.append(count)
        elif ends:
            ends[-1] = count
    return ends


def agreed_prefix_tokens(before: Sequence[int], after: Sequence[int], text: Text) -> int:
    """Of `after`, the tokens of those whole words at its start that `before` says too."""
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    return max((end for end in word_ends(after, text) if end <= same), default=0)


def merge_overlap(left: Sequence[str], right: Sequence[str]) -> tuple[int, int] | None:
    """Two word lists whose audio overlaps: how many words of `left` to keep, and how many of `right` to skip.

    The end of `left` is laid over the start of `right` so that the most words match, in order; a few at the edges
    may be garbled. They meet at the last match. None where too little matches.
    """
    if not left or not right:
        return len(left), 0
    ours = [_plain(word) for word in left[-SEAM_WORDS:]]
    theirs = [_plain(word) for word in right[:SEAM_WORDS]]
    best = _Match(0.0, 0, 0, 0, "")
    found: list[_Match] = []
    for i, word in enumerate(ours):
        for j in range(len(theirs)):
            if word != theirs[j] or not word:
                continue
            before = [
                match.then(i, j, word, match.score - GAP_COST * max(i - match.i - 1, j - match.j - 1))
                for match in found
                if match.i < i and match.j < j
            ]
            if j <= GARBLED_WORDS:
                before.append(_Match(1 - GAP_COST * j, i, j, 1, word))
            if not before:
                continue
            found.append(max(before))
            after = len(ours) - 1 - i
            if after <= GARBLED_WORDS:
                best = max(best, found[-1]._replace(score=found[-1].score - GAP_COST * after))
    if best.words > 1 or len(best.longest) >= DISTINCTIVE_LETTERS:
        return len(left) - len(ours) + best.i + 1, best.j + 1
    return None


class _Match(NamedTuple):
    """The best way to lay one over the other that ends with ours[i] on theirs[j]."""

    score: float
    i: int
    j: int
    words: int
    longest: str

    def then(self, i: int, j: int, word: str, score: float) -> _Match:
        return _Match(score + 1, i, j, self.words + 1, max(self.longest, word, key=len))


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())
