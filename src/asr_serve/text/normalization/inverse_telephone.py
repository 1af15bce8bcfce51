"""Telephone numbers that are dictated digit by digit, as North America writes them: 555-1234, 212-555-0198 and
1-212-555-0198. Recognisers put commas between the digits, where a grammar sees so many numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from asr_serve.text.normalization.inverse_numbers import NUMBERS, digit_string

LENGTHS = (7, 10)
FIRST = "23456789"
"""Neither an area nor an exchange begins with 0 or 1."""
INSIDE = NUMBERS | {"double", "triple", "o"}
_WORD = re.compile(r"[A-Za-z']+")
_BETWEEN = re.compile(r"\s+|-|,\s+|,?\s+[-–—]\s+")
"""What may stand between two digits of one number."""
_RUN_TOGETHER = re.compile(r"(?<![\w.,-])(?:1-)?[2-9]\d\d-(\d{3})(\d{4})(?![\w-])")
"""As some recognisers write it."""


class TelephoneEdit(NamedTuple):
    """Characters of a text, and what is written in their place."""

    start: int
    end: int
    text: str


def find_telephones(text: str) -> Iterator[TelephoneEdit]:
    """Those of an English text, in order."""
    for said in _runs(text):
        if number := format_telephone([word[0].lower() for word in said]):
            yield TelephoneEdit(said[0].start(), said[-1].end(), number)
    for found in _RUN_TOGETHER.finditer(text):
        yield TelephoneEdit(found.start(1), found.end(2), f"{found[1]}-{found[2]}")


def format_telephone(words: Sequence[str]) -> str | None:
    """
    >>> format_telephone("five five five oh one double nine".split()), format_telephone("nine one one".split())
    ('555-0199', None)
    """
    said = list(words)
    if "hundred" in said[1:3]:  # one eight hundred
        at = said.index("hundred")
        said[at : at + 1] = ["zero", "zero"]
    found = digit_string(said)
    if found is None:
        return None
    country, number = ("1-", found[1:]) if len(found) == 11 and found[0] == "1" else ("", found)
    counts = {(int(after) - int(before)) % 10 for before, after in pairwise(number)} in ({1}, {9})
    if len(number) not in LENGTHS or number[0] not in FIRST or counts:
        return None
    area = f"{number[:-7]}-" if len(number) > 7 else ""
    return f"{country}{area}{number[-7:-4]}-{number[-4:]}"


def _runs(text: str) -> Iterator[list[re.Match[str]]]:
    """Number words with no others between them, as long as they go."""
    run: list[re.Match[str]] = []
    for word in _WORD.finditer(text):
        if run and not (word[0].lower() in INSIDE and _BETWEEN.fullmatch(text, run[-1].end(), word.start())):
            yield run
            run = []
        if word[0].lower() in INSIDE:
            run.append(word)
    if run:
        yield run
