"""Character error rate between two texts.

Source  the distance: Myers, "A fast bit-vector algorithm for approximate string matching", JACM 1999, in the form
        of Hyyro 2003, over integers of any length
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict

KEPT = "LMN"
"""Unicode categories of compared characters: letters, combining marks and numbers."""


def plain_text(text: str) -> str:
    """Normalized text of any language: one case and width, no punctuation, single spaces. A number in digits
    differs from one in words, because the models then do not certainly agree.

    >>> plain_text("It’s  5 o'clock — Élan!"), plain_text("ＡＢＣ，你好。")
    ('its 5 oclock élan', 'abc 你好')
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace("'", "").replace("’", "")
    return " ".join("".join(c if unicodedata.category(c)[0] in KEPT else " " for c in folded).split())


def edit_distance(reference: str, hypothesis: str) -> int:
    """Levenshtein distance: number of replaced, deleted and inserted characters.

    >>> edit_distance("kitten", "sitting"), edit_distance("", "abc"), edit_distance("abc", "")
    (3, 3, 3)
    """
    if not reference:
        return len(hypothesis)
    positions: dict[str, int] = defaultdict(int)
    for at, letter in enumerate(reference):
        positions[letter] |= 1 << at
    mask, last = (1 << len(reference)) - 1, 1 << (len(reference) - 1)
    plus, minus, found = mask, 0, len(reference)
    for letter in hypothesis:
        same = positions.get(letter, 0)
        diagonal = (((same & plus) + plus) ^ plus) | same | minus
        up, down = minus | (mask & ~(diagonal | plus)), plus & diagonal
        found += bool(up & last) - bool(down & last)
        up, down = (up << 1) | 1, down << 1
        plus, minus = (down | ~(diagonal | up)) & mask, up & diagonal & mask
    return found


def error_rate(reference: str, hypothesis: str) -> float:
    """Error rate of plain texts: edit distance over characters of the reference; 1 for an empty reference and
    another hypothesis.

    >>> error_rate("abcd", "abxd"), error_rate("", ""), error_rate("", "x")
    (0.25, 0.0, 1.0)
    """
    if not reference:
        return 1.0 if hypothesis else 0.0
    return edit_distance(reference, hypothesis) / len(reference)
