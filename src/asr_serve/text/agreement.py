"""Where two hypotheses of the same speech agree: word by word, or where the end of one meets the start of the
next.

Source  agreement of consecutive hypotheses as the rule for what is certain: LocalAgreement, Liu et al.,
        Interspeech 2020, arXiv:2005.11185
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SEAM_WORDS = 12
"""Words on both sides of a seam among which the two are matched; an overlap of 2.4 s holds about seven."""
GARBLED_WORDS = 3
"""Words that the edge of its audio may have cost a hypothesis."""
TELLING_LETTERS = 4
"""A lone word that matches must be as long as this; shorter ones are everywhere."""

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


def agreed_tokens(before: Sequence[int], after: Sequence[int], text: Text) -> int:
    """Of `after`, the tokens of those whole words at its start that `before` says too."""
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    return max((end for end in word_ends(after, text) if end <= same), default=0)


def seam(left: Sequence[str], right: Sequence[str]) -> tuple[int, int] | None:
    """Two word lists whose audio overlaps: how many words of `left` to keep, and how many of `right` to skip.

    They meet at the end of the longest run of words that both have, a few garbled words at the edges aside. None
    where there is no such run.
    """
    if not left or not right:
        return len(left), 0
    ours = [_plain(word) for word in left[-SEAM_WORDS:]]
    theirs = [_plain(word) for word in right[:SEAM_WORDS]]
    first = len(left) - len(ours)
    best = (0, 0, 0)
    for i in range(len(ours)):
        for j in range(min(len(theirs), GARBLED_WORDS + 1)):
            run = 0
            while i + run < len(ours) and j + run < len(theirs) and ours[i + run] == theirs[j + run]:
                run += 1
            telling = run > 1 or (run == 1 and len(ours[i]) >= TELLING_LETTERS)
            if telling and len(ours) - i - run <= GARBLED_WORDS:
                best = max(best, (run, first + i + run, j + run))
    return best[1:] if best[0] else None


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())
