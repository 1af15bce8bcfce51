"""Telephone numbers dictated digit by digit, in North American form: 555-1234, 212-555-0198 and 1-212-555-0198.
Recognizers write commas between the digits, which a grammar takes for separate numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from asr_serve.text.normalization.inverse_numbers import NUMBERS, digit_string

LENGTHS = (7, 10)
FIRST = "23456789"
"""First digits of area and exchange codes: not 0 or 1."""
INSIDE = NUMBERS | {"double", "triple", "o"}
_WORD = re.compile(r"[A-Za-z']+")
_BETWEEN = re.compile(r"\s+|-|,\s+|,?\s+[-–—]\s+")
"""Separators between two digits of one number."""
_RUN_TOGETHER = re.compile(r"(?<![\w.,-])(?:1-)?[2-9]\d\d-(\d{3})(\d{4})(?![\w-])")
"""Number without its second hyphen, as some recognizers write it."""


class TelephoneEdit(NamedTuple):
    """Range of characters of a text, and their replacement."""

    start: int
    end: int
    text: str


def find_telephones(text: str) -> Iterator[TelephoneEdit]:
    """Telephone numbers of an English text: spoken ones in order, then those without their second hyphen."""
    for run in _runs(text):
        if number := format_telephone([word[0].lower() for word in run]):
            yield TelephoneEdit(run[0].start(), run[-1].end(), number)
    for found in _RUN_TOGETHER.finditer(text):
        yield TelephoneEdit(found.start(1), found.end(2), f"{found[1]}-{found[2]}")


def format_telephone(words: Sequence[str]) -> str | None:
    """Telephone number of spoken words in digits; None if they are none.

    >>> format_telephone("five five five oh one double nine".split()), format_telephone("nine one one".split())
    ('555-0199', None)
    """
    spoken = list(words)
    if "hundred" in spoken[1:3]:  # one eight hundred
        at = spoken.index("hundred")
        spoken[at : at + 1] = ["zero", "zero"]
    found = digit_string(spoken)
    if found is None:
        return None
    country, number = ("1-", found[1:]) if len(found) == 11 and found[0] == "1" else ("", found)
    counts = {(int(after) - int(before)) % 10 for before, after in pairwise(number)} in ({1}, {9})
    if len(number) not in LENGTHS or number[0] not in FIRST or counts:
        return None
    area = f"{number[:-7]}-" if len(number) > 7 else ""
    return f"{country}{area}{number[-7:-4]}-{number[-4:]}"


def _runs(text: str) -> Iterator[list[re.Match[str]]]:
    """Longest runs of number words without other words between them."""
    run: list[re.Match[str]] = []
    for word in _WORD.finditer(text):
        if run and not (word[0].lower() in INSIDE and _BETWEEN.fullmatch(text, run[-1].end(), word.start())):
            yield run
            run = []
        if word[0].lower() in INSIDE:
            run.append(word)
    if run:
        yield run
