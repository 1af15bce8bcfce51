"""Text as it is written to text as it is read: no digits, no signs, only words and punctuation.

Three steps: our rules for what stands in signs (verbalization_rules); the library's, for dates, titles, units,
abbreviations and Roman numbers (expand_abbreviations); then the numbers that are left (verbalize_numbers).

Which library: both hibari-tts's and WeTextProcessing's runtime (wetext 0.1.8) were given the table of
tests/text/normalization/test_verbalize.py, of 132 rows then. Alone, hibari sounds as it says in 77 of
them, wetext in 60, some for style only; wetext fails on 7 (`#1`, `5¢`, `±3`), makes seconds of `1990s`, and takes
7 ms for a sentence instead of 0.1. So hibari's, and rules for what it lacks.
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
    """Raises UnsupportedOption for another language than LANGUAGES. Never fails on a text: what no rule knows
    stays as it is. `en-gb`: days before months, `and` in numbers."""
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
