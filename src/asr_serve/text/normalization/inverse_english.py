"""Which of a grammar's English rewrites stand, and in which form.

A rewrite stands only where the numbers in it are those that were said, and all of those: a number is never written
in part. Numbers below ten that count, and ordinals below the tenth, stay words, as style guides have them; so does
a time that nothing but the grammar says is one, and what may be two numbers or no date: "twenty, thirty people",
"may five of them come".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asr_serve.text.normalization.inverse_numbers import (
    CARDINALS,
    DECADES,
    NUMBERS,
    SCALES,
    clock_time,
    digit_string,
    number_value,
    numbers_match,
    year_value,
)
from asr_serve.text.normalization.wetext_grammar import GrammarRewrite

_ONES = "one two three four five six seven eight nine"
_NO_NAMES = "is are was were be been it us me you him them look find here live online site page"
_MONTHS = "january february march april may june july august september october november december"
_WHEN = "at by until till around about before after since from past between"
MONTHS, WHEN = frozenset(_MONTHS.split()), frozenset(_WHEN.split())
"""Behind WHEN two numbers are a time."""
ALSO_VERBS = frozenset({"may", "march"})
"""Months, if a number follows that is none of the ONES."""
ONES = [[word] for word in _ONES.split()]
OF_ORDINALS = frozenset({"of", "century", "street", "avenue", "floor"})
NO_NAMES = frozenset(_NO_NAMES.split())
"""Before `at` they are nobody's address."""
TRIGGERS = (
    NUMBERS
    | DECADES.keys()
    | {"dot", "double", "triple", "percent", "half", "quarter", "minus", "o'clock", "point"}
)
"""Without one of them nothing is rewritten."""
ACCEPTED_KINDS = frozenset({"cardinal", "decimal", "measure", "money", "telephone"})
"""Kinds that stand as they are proposed, when their numbers are those said."""


class EnglishRewrite(NamedTuple):
    """Words of a stretch, and what is written for them."""

    first: int
    behind: int
    text: str


def select_english_rewrites(
    words: Sequence[str], proposed: Sequence[tuple[int, int, GrammarRewrite]]
) -> list[EnglishRewrite]:
    """`proposed`: first word, the one behind, and the rewrite."""
    found: list[EnglishRewrite] = []
    for at, (first, behind, rewrite) in enumerate(proposed):
        touches = any(
            abs(at - other) == 1 and (proposed[other][0] == behind or proposed[other][1] == first)
            for other in (at - 1, at + 1)
            if 0 <= other < len(proposed)
        )
        written = _settled(words, first, behind, rewrite)
        if written is None or (touches and rewrite.kind in ("cardinal", "telephone", "date", "time")):
            continue
        if not _is_part(words, written.first, written.behind):
            found.append(written)
    return found


def _is_part(words: Sequence[str], first: int, behind: int) -> bool:
    """Whether the number that is said there begins before, or goes on."""
    before, ahead = words[max(0, first - 2) : first], words[behind : behind + 2]
    if before and before[-1] == "and" and (before[0] == "hundred" or before[0] in SCALES):
        return True
    joined = CARDINALS | {"double", "triple"}
    if (before and before[-1] in joined) or (ahead and ahead[0] in joined):
        return True
    links = ("dot", "point")
    return (len(before) == 2 and before[1] in links and before[0] in joined) or (
        len(ahead) == 2 and ahead[0] in links and ahead[1] in joined
    )


def _settled(words: Sequence[str], first: int, behind: int, rewrite: GrammarRewrite) -> EnglishRewrite | None:
    said = words[first:behind]
    before = words[first - 1] if first else ""
    after = words[behind] if behind < len(words) else ""
    if rewrite.kind == "electronic":
        return _address(said, first, behind)
    if (
        rewrite.kind == "time"
        or (said[-1] == "m" and len(said) > 2)
        or (rewrite.kind in ("cardinal", "date", "telephone") and before in WHEN and _with_minutes(said))
    ):
        return _time(words, first, behind, rewrite)
    if rewrite.kind == "date":
        return _date(words, first, behind, rewrite.text)
    if rewrite.kind == "ordinal":
        number = number_value(said)
        if number is None or number < 10 or before in NUMBERS:
            return None
        if said[-1] == "second" and before != "the" and after not in OF_ORDINALS:  # a thirty second delay
            return None
        return EnglishRewrite(first, behind, ordinal_digits(number))
    if rewrite.kind not in ACCEPTED_KINDS or not numbers_match(said, rewrite.text) or _counts_up(said):
        return None
    if said[-1] in ("cent", "cents") and number_value(said[:-1]) in range(1, 10):  # my two cents
        return None
    if rewrite.kind == "measure" and after in NUMBERS:  # six foot two
        return None
    if rewrite.kind == "cardinal" and digit_string(said) is None and number_value(_unsigned(said)) is None:
        return None
    text = re.sub(r" %$", "%", rewrite.text)
    return EnglishRewrite(first, behind, f"0{text}" if text.startswith(".") else text)


def _with_minutes(said: Sequence[str]) -> bool:
    found = clock_time(said)
    return found is not None and found[1] is not None


def _counts_up(said: Sequence[str]) -> bool:
    """One two three."""
    found = digit_string(said)
    return found is not None and len(found) > 2 and found in "123456789"


def _address(said: Sequence[str], first: int, behind: int) -> EnglishRewrite | None:
    """Of mail or of a page: it begins with one word, or with letters one by one, and has a dot."""
    if "dot" not in said:
        return None
    signs = {"dot": ".", "at": "@", "dash": "-", "underscore": "_"}
    begins = at = said.index("at") if "at" in said else said.index("dot")
    while begins and len(said[begins - 1]) == 1:
        begins -= 1
    if begins == at:
        begins -= 1
    while begins > 1 and said[begins - 1] in signs:  # john dot smith at
        begins -= 2
    if begins < 0 or said[begins] in signs:
        return None
    if said[at] == "at" and said[begins] in NO_NAMES:
        begins = at + 1
    ends = max(index for index, word in enumerate(said) if word in signs) + 2
    if ends > len(said):
        return None
    return EnglishRewrite(
        first + begins, first + ends, "".join(digit_string([w]) or signs.get(w, w) for w in said[begins:ends])
    )


def _unsigned(said: Sequence[str]) -> Sequence[str]:
    return said[1:] if said[0] in ("minus", "negative") else said


def _time(words: Sequence[str], first: int, behind: int, rewrite: GrammarRewrite) -> EnglishRewrite | None:
    said = list(words[first:behind])
    before = words[first - 1] if first else ""
    if said[-1] == "o'clock":
        found = clock_time(said[:-1])
        return EnglishRewrite(first, behind, f"{found[0]} o'clock") if found and found[1] is None else None
    if said[0] in ("half", "quarter"):
        found = clock_time(said[2:]) if len(said) == 3 else None
        if found is None or said[1] not in ("past", "to"):
            return None
        minutes = 60 * found[0] + (30 if said[0] == "half" else 15) * (1 if said[1] == "past" else -1)
        hour = (minutes // 60 - 1) % 12 + 1
        return EnglishRewrite(first - (before == "a"), behind, f"{hour}:{minutes % 60:02}")
    noon = f" {said[-2]}.m." if len(said) > 2 and said[-1] == "m" and said[-2] in "ap" else ""
    found = clock_time(said[:-2] if noon else said)
    if found is None or not (noon or (before in WHEN and found[1] is not None)):
        return None
    hour, minute = found
    return EnglishRewrite(first, behind, (f"{hour}" if minute is None else f"{hour}:{minute:02}") + noon)


def _date(words: Sequence[str], first: int, behind: int, text: str) -> EnglishRewrite | None:
    said = list(words[first:behind])
    before = words[first - 1] if first else ""
    months = [at for at, word in enumerate(said) if word in MONTHS]
    if not numbers_match(said, text):
        return None
    if not months:
        if (len(said) == 2 and said[1] in DECADES) or number_value(said) is not None:
            return EnglishRewrite(first, behind, text)
        if year_value(said) is not None and (text != "2030" or before in {*WHEN, "in", "of", "year"}):
            return EnglishRewrite(first, behind, text)
        return None
    at = months[0]
    if said[0] in ALSO_VERBS and said[1:] in ONES and before not in {*WHEN, "on"}:
        return None
    if at:  # the fifth of May
        day = number_value([word for word in said[:at] if word not in ("the", "of")])
        if day is None or not 1 <= day <= 31 or "of" not in said[:at]:
            return None
        rest = _year(said[at + 1 :])
        if rest is None:
            return None
        return EnglishRewrite(
            first + (said[0] == "the"), behind, f"{ordinal_digits(day)} of {said[at]}{rest and f' {rest}'}"
        )
    numbers = re.findall(r"\d+", text)
    if len(numbers) == 2 and int(numbers[0]) <= 31:
        return EnglishRewrite(first, behind, f"{said[0]} {numbers[0]}, {numbers[1]}")
    return EnglishRewrite(first, behind, text)


def _year(said: Sequence[str]) -> str | None:
    if not said:
        return ""
    number = year_value(said) or number_value(said)
    return None if number is None else str(number)


def ordinal_digits(number: int) -> str:
    """
    >>> ordinal_digits(21), ordinal_digits(12), ordinal_digits(103)
    ('21st', '12th', '103rd')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
