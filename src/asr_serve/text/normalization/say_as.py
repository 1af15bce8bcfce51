"""SSML's `say-as`: verbalization of a text as a stated kind."""

from __future__ import annotations

import re
from collections.abc import Callable

from asr_serve.errors import TextError
from asr_serve.text.normalization import verbalization_rules, verbalize_numbers, verbalize_signs
from asr_serve.text.normalization.verbalize_addresses import SIGNS

DATES = ("mdy", "dmy", "ymd", "md", "dm", "ym", "my", "y", "m", "d")


def verbalize_say_as(written: str, kind: str, form: str = "", british: bool = False) -> str:
    """Words of `written` read as `kind` in the format `form`. Raises TextError for a text that is not of that
    kind, and for an unknown kind or format."""
    if kind not in KINDS:
        raise TextError(f'interpret-as="{kind}"', ", ".join(KINDS), param="input")
    return KINDS[kind](written, form, british)


def _characters(written: str, _form: str, _british: bool) -> str:
    """Character by character; letters in a row are written as initials."""
    words = []
    for run in re.findall(r"[A-Za-z]+|\S", written):
        if run.isalpha():
            words.append(".".join(run.upper()))
        elif run.isdecimal():
            words.append(verbalize_numbers.one_by_one(run))
        else:
            words.append(SIGNS.get(run) or verbalization_rules.SIGNS.get(run) or NAMES.get(run, ""))
    return " ".join(filter(None, words))


def _digits(written: str, _form: str, _british: bool) -> str:
    digits = re.sub(r"[\s,.-]", "", written)
    _must(digits.isdecimal(), written, "digits", "0123")
    return verbalize_numbers.one_by_one(digits)


def _cardinal(written: str, _form: str, british: bool) -> str:
    found = re.fullmatch(rf"([+-]?)({verbalize_numbers.NUMBER})", written)
    _must(found is not None, written, "a number", "1,234 or -5.5")
    assert found
    return ("minus " if found[1] == "-" else "") + verbalize_numbers.decimal(found[2].replace(",", ""), british)


def _ordinal(written: str, _form: str, british: bool) -> str:
    found = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d+)(?:st|nd|rd|th)?", written)
    _must(found is not None, written, "a number to count by", "3 or 3rd")
    assert found
    return verbalize_numbers.ordinal(found[1], british)


def _date(written: str, form: str, british: bool) -> str:
    form = form or ("dmy" if british else "mdy")
    if form not in DATES:
        raise TextError(f'format="{form}"', ", ".join(DATES), param="input")
    parts = re.findall(r"\d+", written)
    if form in ("mdy", "dmy") and len(parts) == 3 and len(parts[0]) == 4:
        form = "ymd"
    _must(len(parts) == len(form) and not re.search(r"[^\d\s/.-]", written), written, f"a date as {form}", "3/15/2024")
    fields = dict(zip(form, parts, strict=True))
    year, month, day = fields.get("y"), int(fields.get("m", 1)), int(fields.get("d", 1))
    if year and len(year) == 2:
        year = f"{19 if int(year) > 50 else 20}{year}"
    _must(1 <= month <= 12 and 1 <= day <= 31, written, f"a date as {form}", "3/15/2024")
    name = verbalize_signs.MONTHS[month - 1]
    if "m" not in fields:
        return verbalize_numbers.plain(year) if year else verbalize_numbers.ordinal(day)
    if "d" not in fields:
        return f"{name} {verbalize_numbers.plain(year)}" if year else name
    return verbalize_signs.day(month, day, year, british) or ""


def _time(written: str, _form: str, _british: bool) -> str:
    found = re.fullmatch(r"(\d{1,2})(?::(\d\d))?(?::\d\d)?\s?(?:([ap])\.?m\.?)?", written.strip().lower())
    fits = found is not None and int(found[1]) < 25 and int(found[2] or 0) < 60
    _must(fits, written, "a time", "5:30 pm or 17:30")
    assert found
    return verbalize_signs.clock(found[1], found[2] or "", found[3] or "")


def _telephone(written: str, _form: str, _british: bool) -> str:
    _must(bool(re.fullmatch(r"[+(]?\d[\d\s().-]*", written)), written, "a telephone number", "+1 800 555 0199")
    return verbalize_signs.telephone(written)


def _must(fits: bool, written: str, what: str, example: str) -> None:
    if not fits:
        raise TextError(f"{written[:60]!r} is not {what}", f"like {example}", param="input")


NAMES = {
    ",": "comma", ";": "semicolon", "!": "exclamation mark", '"': "quote", "'": "apostrophe",
    "(": "open parenthesis", ")": "close parenthesis", "*": "asterisk", "<": "less than", ">": "greater than",
    "^": "caret", "|": "bar",
}  # fmt: skip
KINDS: dict[str, Callable[[str, str, bool], str]] = {
    "characters": _characters,
    "spell-out": _characters,
    "verbatim": _characters,
    "digits": _digits,
    "cardinal": _cardinal,
    "number": _cardinal,
    "ordinal": _ordinal,
    "date": _date,
    "time": _time,
    "telephone": _telephone,
}
