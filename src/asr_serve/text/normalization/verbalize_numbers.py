"""Numbers in words, as they are read aloud: `1066`, `1,234.5`, `007`, `21st`, `1990s`.

The words are hibari's (`hibari_english.number_words`); this file chooses among the readings of a number.
"""

from __future__ import annotations

import re

from asr_serve.text import hibari_english

LONGEST = 15
"""Most digits of a quantity; longer numbers are read digit by digit."""
GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
NUMBER = rf"(?:(?:{GROUPED})(?:\.\d+)?|\.\d+)"
_years = range(1_010, 2_100)


def cardinal(number: str | int, british: bool = False) -> str:
    """`1,234` -> `one thousand two hundred thirty-four`; British English has an `and` before the last two
    digits."""
    digits = str(number).replace(",", "")
    if len(digits) > LONGEST:
        return one_by_one(digits)
    words = str(hibari_english.number_words().cardinal(int(digits))).replace(",", "")
    return words if british else words.replace(" and ", " ")


def ordinal(number: str | int, british: bool = False) -> str:
    digits = str(number).replace(",", "")
    if len(digits) > LONGEST:
        return one_by_one(digits)
    words = str(hibari_english.number_words().ordinal(int(digits))).replace(",", "")
    return words if british else words.replace(" and ", " ")


def decimal(number: str, british: bool = False) -> str:
    """`3.10` -> `three point one zero`; trailing zeros are read."""
    whole, _, part = number.partition(".")
    words = cardinal(whole or "0", british)
    return f"{words} point {one_by_one(part)}" if part else words


def year(number: str | int) -> str:
    """`1905` -> `nineteen oh five`."""
    return str(hibari_english.number_words().year(int(number))).replace("-", " ").replace(" and ", " ")


def one_by_one(digits: str, gap: str = " ") -> str:
    """`555` -> `five five five`."""
    ones = hibari_english.number_words().ONES
    return gap.join(ones[int(digit)] for digit in digits if digit.isdecimal())


def in_pairs(digits: str) -> str:
    """Number of a room, flight or road: `101` -> `one oh one`, `1240` -> `twelve forty`."""
    if digits.startswith("0") or len(digits) > 4:
        return one_by_one(digits)
    if len(digits) < 3 or digits.endswith("00"):
        return cardinal(digits)
    head, tail = digits[:-2], digits[-2:]
    return f"{cardinal(head)} {'oh ' if tail[0] == '0' else ''}{cardinal(int(tail))}"


def plain(number: str, british: bool = False) -> str:
    """Number without context. Four digits without a comma may be a year."""
    if "." in number:
        return decimal(number, british)
    if "," not in number:
        if number.startswith("0") and len(number) > 1:
            return one_by_one(number)
        if len(number) == 4 and int(number) in _years:
            return year(number)
    return cardinal(number, british)


def decade(digits: str) -> str:
    """`1990s` -> `nineteen nineties`, `80s` -> `eighties`."""
    words = plain(digits) if len(digits) == 4 else cardinal(digits)
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}es" if words.endswith("x") else f"{words}s"


def finish(text: str, british: bool) -> str:
    """Verbalize all remaining digits; the last of all rules."""
    text = re.sub(rf"({GROUPED})(?:st|nd|rd|th)\b", lambda m: ordinal(m[1], british), text)
    text = re.sub(rf"(?<![\w)])[-−](?={NUMBER})", "minus ", text)
    text = re.sub(rf"(?<![\w.])({NUMBER})(?![\w])", lambda m: plain(m[1], british), text)
    # Numbers inside a word are separated from its letters.
    return re.sub(r"\d+", lambda m: f" {in_pairs(m[0])} ", text)
