"""English number words to numbers, to check the rewrites of a grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_ONES, _TEENS, _TENS, _ORDINALS, _LATER_ORDINALS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine",
        "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
        "first second third fourth fifth sixth seventh eighth ninth",
        "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth",
    )
)
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_BELOW = {
    **{word: number for number, word in enumerate(_ONES)},
    **{word: number for number, word in enumerate(_TEENS, 10)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
}
_LAST = {
    **{word: number for number, word in enumerate(_ORDINALS, 1)},
    **{word: number for number, word in enumerate(_LATER_ORDINALS, 10)},
    **{f"{word[:-1]}ieth": 10 * number for number, word in enumerate(_TENS, 2)},
}
CARDINALS = frozenset({*_BELOW, *SCALES, "hundred"})
"""Cardinal number words, which may stand inside a number."""
NUMBERS = frozenset({*_BELOW, *_LAST, *SCALES, "hundred", "oh"})
"""Words of which numbers are made."""
DECADES = {**{f"{word[:-1]}ies": 10 * number for number, word in enumerate(_TENS, 2)}, "tens": 10, "hundreds": 0}
YEARS = range(1_100, 2_100)
"""Years that are spoken as two numbers."""


def number_value(words: Sequence[str]) -> int | None:
    """Whole number of words, of which the last may be an ordinal; None if they are none.

    >>> [number_value(w.split()) for w in ("one hundred and five", "twenty first", "eleven and twelve")]
    [105, 21, None]
    """
    total = part = 0
    last = "start"
    scale = 10**15
    for at, word in enumerate(words):
        ending = at + 1 == len(words)
        if word == "and":
            if last not in ("hundred", "scale") or ending:
                return None
            last = "and"
            continue
        number = _BELOW.get(word, _LAST.get(word) if ending else None)
        if number is not None:
            if (last == "tens" and 0 < number < 10) or last in ("start", "hundred", "scale", "and"):
                part += number
            else:
                return None
            last = "tens" if number >= 20 else "ones"
        elif word == "hundred" and 0 < part < 100 and last in ("ones", "tens"):
            part, last = part * 100, "hundred"
        elif word in SCALES and part and SCALES[word] < scale and last != "and":
            total, part, scale, last = total + part * SCALES[word], 0, SCALES[word], "scale"
        else:
            return None
    return total + part if words else None


def year_value(words: Sequence[str]) -> int | None:
    """Year that is spoken in two parts; None if the words are none.

    >>> [year_value(w.split()) for w in ("nineteen eighty four", "nineteen oh five", "ten thirty")]
    [1984, 1905, None]
    """
    if len(words) not in (2, 3):
        return None
    century = _BELOW.get(words[0], 0)
    rest = words[1:]
    if len(rest) == 2 and rest[0] in ("oh", "o"):
        ending = _BELOW.get(rest[1], 99)
        found = 100 * century + ending if 0 < ending < 10 else 0
    else:
        ending = number_value(rest) or 0
        found = 100 * century + ending if 10 <= ending < 100 else 0
    return found if found in YEARS else None


def digit_string(words: Sequence[str]) -> str | None:
    """Digits spoken one by one, as in a telephone number; None if the words are none.

    >>> digit_string("five double oh seven".split()), digit_string("five ten".split())
    ('5007', None)
    """
    found, times = "", 1
    for word in words:
        if word in ("double", "triple"):
            times = 2 if word == "double" else 3
        elif word in ("oh", "o") or _BELOW.get(word, 10) < 10:
            found += times * str(_BELOW.get(word, 0))
            times = 1
        else:
            return None
    return found if found and times == 1 else None


def clock_time(words: Sequence[str]) -> tuple[int, int | None] | None:
    """Hour from 1 to 12, and minutes if spoken; None if the words are no time.

    >>> [clock_time(w.split()) for w in ("seven forty five", "seven oh five", "nine", "thirteen")]
    [(7, 45), (7, 5), (9, None), None]
    """
    hour = _BELOW.get(words[0], 0) if words else 0
    rest = words[1:]
    if not 1 <= hour <= 12:
        return None
    if not rest:
        return hour, None
    if len(rest) == 2 and rest[0] in ("oh", "o"):
        minutes = _BELOW.get(rest[1], 60)
        return (hour, minutes) if 0 < minutes < 10 else None
    found = number_value(rest)
    return (hour, found) if found is not None and 10 <= found < 60 else None


def numbers_match(words: Sequence[str], text: str) -> bool:
    """Returns whether the numbers of `text` are those of the words, in order. `text` may have additional zeros.

    >>> numbers_match("twenty five dollars and thirty cents".split(), "$25.30"), numbers_match(["seven"], "07:15")
    (True, False)
    """
    expected = [ways for group in _groups(words) if (ways := _ways(group))]
    remaining: list[str] = re.findall(r"\d+", text.replace(",", ""))
    for ways in expected:
        while remaining and int(remaining[0]) == 0 and remaining[0] not in ways and "0" not in ways:
            remaining.pop(0)
        if not remaining:
            return False
        digits = remaining.pop(0)
        while digits not in ways and digits.lstrip("0") not in ways:
            if not remaining:
                return False
            digits += remaining.pop(0)  # of a telephone
    return not any(int(number) for number in remaining)


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Runs of number words."""
    group: list[str] = []
    for at, word in enumerate(words):
        inside = word == "and" and group and at + 1 < len(words) and words[at + 1] in NUMBERS
        if word in NUMBERS or word in DECADES or word in ("double", "triple", "o") or inside:
            group.append(word)
        else:
            if group:
                yield group
            group = []
    if group:
        yield group


def _ways(group: list[str]) -> set[str]:
    """Possible written forms of a run of number words."""
    found = {digit_string(group) or ""}
    numbers = [number_value(group), year_value(group)]
    if group[-1] in SCALES:  # five million: 5 million
        numbers.append(number_value(group[:-1]))
    if group[-1] in DECADES:
        century = _BELOW.get(group[0], 0) if len(group) == 2 else 0
        numbers.append(100 * century + DECADES[group[-1]])
    for at in range(1, len(group)):  # the fifth two thousand and ten: day and year at once
        day, of = number_value(group[:at]), group[at:]
        ending = year_value(of) or number_value(of)
        if day is not None and day <= 31 and ending in YEARS:
            found.add(f"{day}{ending}")
    return (found | {str(number) for number in numbers if number is not None}) - {""}
