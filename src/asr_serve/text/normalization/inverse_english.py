"""Selection of a grammar's English rewrites, and their form.

A rewrite is accepted only if its numbers are exactly the spoken ones: a number is never rewritten in part.
Quantities below ten, and ordinals below the tenth, stay words, as in style guides; so does a time without further
evidence than the grammar, and what may be two numbers or no date: "twenty, thirty people", "may five of them
come".
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
"""Months, and words after which two numbers are a time."""
ALSO_VERBS = frozenset({"may", "march"})
"""Verbs that are months if the next number is not one of ONES."""
ONES = [[word] for word in _ONES.split()]
OF_ORDINALS = frozenset({"of", "century", "street", "avenue", "floor"})
NO_NAMES = frozenset(_NO_NAMES.split())
"""Words before `at` that are not the name in an e-mail address."""
TRIGGERS = (
    NUMBERS | DECADES.keys() | {"dot", "double", "triple", "percent", "half", "quarter", "minus", "o'clock", "point"}
)
"""Words without which nothing is rewritten."""
ACCEPTED_KINDS = frozenset({"cardinal", "decimal", "measure", "money", "telephone"})
"""Kinds that are accepted as proposed, if their numbers are the spoken ones."""


class EnglishRewrite(NamedTuple):
    """Range of words of a stretch, and their written form."""

    first: int
    behind: int
    text: str


def select_english_rewrites(
    words: Sequence[str], proposed: Sequence[tuple[int, int, GrammarRewrite]]
) -> list[EnglishRewrite]:
    """Accepted rewrites in order. `proposed`: (index of the first word, index after the last, rewrite)."""
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
    """Returns whether the range is only part of a spoken number, which begins before it or continues after it."""
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
    span = words[first:behind]
    before = words[first - 1] if first else ""
    after = words[behind] if behind < len(words) else ""
    if rewrite.kind == "electronic":
        return _address(span, first, behind)
    if (
        rewrite.kind == "time"
        or (span[-1] == "m" and len(span) > 2)
        or (rewrite.kind in ("cardinal", "date", "telephone") and before in WHEN and _with_minutes(span))
    ):
        return _time(words, first, behind, rewrite)
    if rewrite.kind == "date":
        return _date(words, first, behind, rewrite.text)
    if rewrite.kind == "ordinal":
        number = number_value(span)
        if number is None or number < 10 or before in NUMBERS:
            return None
        if span[-1] == "second" and before != "the" and after not in OF_ORDINALS:  # a thirty second delay
            return None
        return EnglishRewrite(first, behind, ordinal_digits(number))
    if rewrite.kind not in ACCEPTED_KINDS or not numbers_match(span, rewrite.text) or _counts_up(span):
        return None
    if span[-1] in ("cent", "cents") and number_value(span[:-1]) in range(1, 10):  # my two cents
        return None
    if rewrite.kind == "measure" and after in NUMBERS:  # six foot two
        return None
    if rewrite.kind == "cardinal" and digit_string(span) is None and number_value(_unsigned(span)) is None:
        return None
    text = re.sub(r" %$", "%", rewrite.text)
    return EnglishRewrite(first, behind, f"0{text}" if text.startswith(".") else text)


def _with_minutes(words: Sequence[str]) -> bool:
    found = clock_time(words)
    return found is not None and found[1] is not None


def _counts_up(words: Sequence[str]) -> bool:
    """Returns whether the words count upwards: one two three."""
    found = digit_string(words)
    return found is not None and len(found) > 2 and found in "123456789"


def _address(words: Sequence[str], first: int, behind: int) -> EnglishRewrite | None:
    """E-mail or web address: it begins with one word, or with single letters, and has a dot."""
    if "dot" not in words:
        return None
    signs = {"dot": ".", "at": "@", "dash": "-", "underscore": "_"}
    begins = at = words.index("at") if "at" in words else words.index("dot")
    while begins and len(words[begins - 1]) == 1:
        begins -= 1
    if begins == at:
        begins -= 1
    while begins > 1 and words[begins - 1] in signs:  # john dot smith at
        begins -= 2
    if begins < 0 or words[begins] in signs:
        return None
    if words[at] == "at" and words[begins] in NO_NAMES:
        begins = at + 1
    ends = max(index for index, word in enumerate(words) if word in signs) + 2
    if ends > len(words):
        return None
    return EnglishRewrite(
        first + begins, first + ends, "".join(digit_string([w]) or signs.get(w, w) for w in words[begins:ends])
    )


def _unsigned(words: Sequence[str]) -> Sequence[str]:
    return words[1:] if words[0] in ("minus", "negative") else words


def _time(words: Sequence[str], first: int, behind: int, rewrite: GrammarRewrite) -> EnglishRewrite | None:
    span = list(words[first:behind])
    before = words[first - 1] if first else ""
    if span[-1] == "o'clock":
        found = clock_time(span[:-1])
        return EnglishRewrite(first, behind, f"{found[0]} o'clock") if found and found[1] is None else None
    if span[0] in ("half", "quarter"):
        found = clock_time(span[2:]) if len(span) == 3 else None
        if found is None or span[1] not in ("past", "to"):
            return None
        minutes = 60 * found[0] + (30 if span[0] == "half" else 15) * (1 if span[1] == "past" else -1)
        hour = (minutes // 60 - 1) % 12 + 1
        return EnglishRewrite(first - (before == "a"), behind, f"{hour}:{minutes % 60:02}")
    noon = f" {span[-2]}.m." if len(span) > 2 and span[-1] == "m" and span[-2] in "ap" else ""
    found = clock_time(span[:-2] if noon else span)
    if found is None or not (noon or (before in WHEN and found[1] is not None)):
        return None
    hour, minute = found
    return EnglishRewrite(first, behind, (f"{hour}" if minute is None else f"{hour}:{minute:02}") + noon)


def _date(words: Sequence[str], first: int, behind: int, text: str) -> EnglishRewrite | None:
    span = list(words[first:behind])
    before = words[first - 1] if first else ""
    months = [at for at, word in enumerate(span) if word in MONTHS]
    if not numbers_match(span, text):
        return None
    if not months:
        if (len(span) == 2 and span[1] in DECADES) or number_value(span) is not None:
            return EnglishRewrite(first, behind, text)
        if year_value(span) is not None and (text != "2030" or before in {*WHEN, "in", "of", "year"}):
            return EnglishRewrite(first, behind, text)
        return None
    at = months[0]
    if span[0] in ALSO_VERBS and span[1:] in ONES and before not in {*WHEN, "on"}:
        return None
    if at:  # the fifth of May
        day = number_value([word for word in span[:at] if word not in ("the", "of")])
        if day is None or not 1 <= day <= 31 or "of" not in span[:at]:
            return None
        rest = _year(span[at + 1 :])
        if rest is None:
            return None
        return EnglishRewrite(
            first + (span[0] == "the"), behind, f"{ordinal_digits(day)} of {span[at]}{rest and f' {rest}'}"
        )
    numbers = re.findall(r"\d+", text)
    if len(numbers) == 2 and int(numbers[0]) <= 31:
        return EnglishRewrite(first, behind, f"{span[0]} {numbers[0]}, {numbers[1]}")
    return EnglishRewrite(first, behind, text)


def _year(words: Sequence[str]) -> str | None:
    if not words:
        return ""
    number = year_value(words) or number_value(words)
    return None if number is None else str(number)


def ordinal_digits(number: int) -> str:
    """Ordinal number in digits.

    >>> ordinal_digits(21), ordinal_digits(12), ordinal_digits(103)
    ('21st', '12th', '103rd')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
