"""Which of a grammar's English rewrites stand, and in which form.

A rewrite stands only where the numbers in it are those that were said. Numbers below ten that count, and ordinals
below the tenth, stay words, as style guides have them; so does a time that nothing but the grammar says is one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asr_serve.text.written.grammar import Rewrite
from asr_serve.text.written.numerals import DECADES, NUMBERS, clock, digits, tells, value, year

_MONTHS = "january february march april may june july august september october november december"
_WHEN = "at by until till around about before after since from past between"
MONTHS, WHEN = frozenset(_MONTHS.split()), frozenset(_WHEN.split())
"""Behind WHEN two numbers are a time."""
TRIGGERS = (
    NUMBERS
    | DECADES.keys()
    | {"dot", "double", "triple", "percent", "half", "quarter", "minus", "o'clock", "point"}
)
"""Without one of them nothing is rewritten."""
KEPT = frozenset({"cardinal", "decimal", "measure", "money", "telephone"})
"""Kinds that stand as they are proposed, when their numbers are those said."""


class Written(NamedTuple):
    """Words of a stretch, and what is written for them."""

    first: int
    behind: int
    text: str


def settle(words: Sequence[str], proposed: Sequence[tuple[int, int, Rewrite]]) -> list[Written]:
    """`proposed`: first word, the one behind, and the rewrite."""
    found: list[Written] = []
    for at, (first, behind, rewrite) in enumerate(proposed):
        touches = any(
            abs(at - other) == 1 and (proposed[other][0] == behind or proposed[other][1] == first)
            for other in (at - 1, at + 1)
            if 0 <= other < len(proposed)
        )
        written = _settled(words, first, behind, rewrite)
        if written is not None and not (touches and rewrite.kind in ("cardinal", "telephone", "date", "time")):
            found.append(written)
    return found


def _settled(words: Sequence[str], first: int, behind: int, rewrite: Rewrite) -> Written | None:
    said = words[first:behind]
    before = words[first - 1] if first else ""
    after = words[behind] if behind < len(words) else ""
    if rewrite.kind == "electronic":
        return _address(said, first, behind)
    if (
        rewrite.kind == "time"
        or (said[-1] == "m" and len(said) > 2)
        or (rewrite.kind == "date" and before in WHEN and clock(said))
    ):
        return _time(words, first, behind, rewrite)
    if rewrite.kind == "date":
        return _date(words, first, behind, rewrite.text)
    if rewrite.kind == "ordinal":
        number = value(said)
        if number is None or number < 10 or before in NUMBERS:
            return None
        return Written(first, behind, nth(number))
    if rewrite.kind not in KEPT or not tells(said, rewrite.text):
        return None
    if rewrite.kind == "measure" and after in NUMBERS:  # six foot two
        return None
    if rewrite.kind == "cardinal" and digits(said) is None and value(_unsigned(said)) is None:
        return None
    text = re.sub(r" %$", "%", rewrite.text)
    return Written(first, behind, f"0{text}" if text.startswith(".") else text)


def _address(said: Sequence[str], first: int, behind: int) -> Written | None:
    """Of mail or of a page: it begins with one word, or with letters one by one, and has a dot."""
    if "dot" not in said:
        return None
    begins = at = said.index("at") if "at" in said else said.index("dot")
    while begins and len(said[begins - 1]) == 1:
        begins -= 1
    if begins == at:
        begins -= 1
    if begins < 0:
        return None
    signs = {"dot": ".", "at": "@", "dash": "-", "underscore": "_"}
    return Written(first + begins, behind, "".join(digits([w]) or signs.get(w, w) for w in said[begins:]))


def _unsigned(said: Sequence[str]) -> Sequence[str]:
    return said[1:] if said[0] in ("minus", "negative") else said


def _time(words: Sequence[str], first: int, behind: int, rewrite: Rewrite) -> Written | None:
    said = list(words[first:behind])
    before = words[first - 1] if first else ""
    if said[-1] == "o'clock":
        found = clock(said[:-1])
        return Written(first, behind, f"{found[0]} o'clock") if found and found[1] is None else None
    if said[0] in ("half", "quarter"):
        found = clock(said[2:]) if len(said) == 3 else None
        if found is None or said[1] not in ("past", "to"):
            return None
        minutes = 60 * found[0] + (30 if said[0] == "half" else 15) * (1 if said[1] == "past" else -1)
        hour = (minutes // 60 - 1) % 12 + 1
        return Written(first - (before == "a"), behind, f"{hour}:{minutes % 60:02}")
    noon = f" {said[-2]}.m." if len(said) > 2 and said[-1] == "m" and said[-2] in "ap" else ""
    found = clock(said[:-2] if noon else said)
    if found is None or not (noon or (before in WHEN and found[1] is not None)):
        return None
    hour, minute = found
    return Written(first, behind, (f"{hour}" if minute is None else f"{hour}:{minute:02}") + noon)


def _date(words: Sequence[str], first: int, behind: int, text: str) -> Written | None:
    said = words[first:behind]
    months = [at for at, word in enumerate(said) if word in MONTHS]
    if not tells(said, text):
        return None
    if not months:
        if (len(said) == 2 and said[1] in DECADES) or value(said) is not None or year(said) is not None:
            return Written(first, behind, text)
        return None
    at = months[0]
    if at:  # the fifth of May
        day = value([word for word in said[:at] if word not in ("the", "of")])
        if day is None or not 1 <= day <= 31 or "of" not in said[:at]:
            return None
        rest = _year(said[at + 1 :])
        if rest is None:
            return None
        return Written(first + (said[0] == "the"), behind, f"{nth(day)} of {said[at]}{rest and f' {rest}'}")
    numbers = re.findall(r"\d+", text)
    if len(numbers) == 2 and int(numbers[0]) <= 31:
        return Written(first, behind, f"{said[0]} {numbers[0]}, {numbers[1]}")
    return Written(first, behind, text)


def _year(said: Sequence[str]) -> str | None:
    if not said:
        return ""
    number = year(said) or value(said)
    return None if number is None else str(number)


def nth(number: int) -> str:
    """
    >>> nth(21), nth(12), nth(103)
    ('21st', '12th', '103rd')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
