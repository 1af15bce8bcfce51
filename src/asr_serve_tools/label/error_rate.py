"""How far two texts are from each other, in characters.

Source  the distance: Myers, "A fast bit-vector algorithm for approximate string matching", JACM 1999, in the form
        of Hyyro 2003, over integers of any length
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict

KEPT = "LMN"
"""Letters, what belongs to them, and numbers: what is compared."""


def plain_text(text: str) -> str:
    """Of any language: one case and width, no marks, single spaces. A number in digits is not one in words:
    then it is not sure that both models heard the same.

    >>> plain_text("It’s  5 o'clock — Élan!"), plain_text("ＡＢＣ，你好。")
    ('its 5 oclock élan', 'abc 你好')
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace("'", "").replace("’", "")
    return " ".join("".join(c if unicodedata.category(c)[0] in KEPT else " " for c in folded).split())


def edit_distance(reference: str, hypothesis: str) -> int:
    """Characters to replace, leave out and put in: the Levenshtein distance.

    >>> edit_distance("kitten", "sitting"), edit_distance("", "abc"), edit_distance("abc", "")
    (3, 3, 3)
    """
    if not reference:
        return len(hypothesis)
    where: dict[str, int] = defaultdict(int)
    for at, letter in enumerate(reference):
        where[letter] |= 1 << at
    every, last = (1 << len(reference)) - 1, 1 << (len(reference) - 1)
    plus, minus, found = every, 0, len(reference)
    for letter in hypothesis:
        same = where.get(letter, 0)
        diagonal = (((same & plus) + plus) ^ plus) | same | minus
        up, down = minus | (every & ~(diagonal | plus)), plus & diagonal
        found += bool(up & last) - bool(down & last)
        up, down = (up << 1) | 1, down << 1
        plus, minus = (down | ~(diagonal | up)) & every, up & diagonal & every
    return found


def error_rate(reference: str, hypothesis: str) -> float:
    """Of plain texts: errors over characters of the reference. Where that says nothing and the other something, 1.

    >>> error_rate("abcd", "abxd"), error_rate("", ""), error_rate("", "x")
    (0.25, 0.0, 1.0)
    """
    if not reference:
        return 1.0 if hypothesis else 0.0
    return edit_distance(reference, hypothesis) / len(reference)
