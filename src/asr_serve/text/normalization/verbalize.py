"""Verbalization: written text to text as it is read, with only words and punctuation, no digits and no signs.

Three steps: our rules for signs (verbalization_rules); the library's rules for dates, titles, units, abbreviations
and Roman numbers (expand_abbreviations); then the remaining numbers (verbalize_numbers).

Choice of library: hibari-tts and WeTextProcessing's runtime (wetext 0.1.8) were compared on the table of
tests/text/normalization/test_verbalize.py, of 132 rows then. Alone, hibari agrees with 77 of them, wetext with 60,
some differences being style only; wetext fails on 7 (`#1`, `5¢`, `±3`), reads `1990s` as seconds, and takes 7 ms
for a sentence instead of 0.1. Hence hibari, with rules for what it lacks.
"""

from __future__ import annotations

import re

from asr_serve.errors import UnsupportedOption
from asr_serve.text import hibari_english
from asr_serve.text.normalization import verbalization_rules, verbalize_numbers

VERBALIZE_LANGUAGES = ("en", "en-gb")
_british = {
    "meter": "metre", "liter": "litre", "kilometer": "kilometre", "centimeter": "centimetre",
    "millimeter": "millimetre", "milliliter": "millilitre",
}  # fmt: skip
_american = re.compile(rf"\b({'|'.join(_british)})(s?)\b")
_blanks = re.compile(r"\s+")
_before_points = re.compile(r"\s+([.,;:!?…)”]+)(?=\s|$)")
_long = re.compile(r"[^\s]{40}")


def verbalize(text: str, language: str = "en") -> str:
    """Verbalize a text. Never fails on a text: anything without a rule stays as it is. `en-gb`: days before
    months, `and` in numbers. Raises UnsupportedOption for a language that is not in VERBALIZE_LANGUAGES."""
    if language not in VERBALIZE_LANGUAGES:
        raise UnsupportedOption(f"language={language!r}", ", ".join(VERBALIZE_LANGUAGES), param="language")
    british = language == "en-gb"
    text = _blanks.sub(" ", text).strip()
    text = hibari_english.expand_abbreviations(verbalization_rules.apply_rules(text, british))
    text = verbalize_numbers.finish(verbalization_rules.replace_remaining_signs(text), british)
    if british:
        text = _american.sub(lambda m: _british[m[1]] + m[2], text)
    text = _long.sub(lambda m: f"{m[0]} ", text)
    return _before_points.sub(r"\1", _blanks.sub(" ", text)).strip()
