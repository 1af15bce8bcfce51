"""Folding of text to characters that can be read; others are dropped, or refused by name.

Latin letters with diacritics beyond Latin-1 lose them; digits of any script become ASCII; a single Greek letter is
named, as in formulas. Emoji, pictures and control characters are not read. A letter of any other script is
refused, so that no word is silently left out.
"""

from __future__ import annotations

import re
import unicodedata

from asr_serve.errors import UnsupportedScript
from asr_serve.text.g2p.clauses import OVERRIDE_PLACEHOLDER

SIGNS = set("$£€¥¢₹₩%&+@#*=<>~^|°§¶±×÷™®©→←½¼¾⅓⅔⅕⅖⅗⅘⅙⅛⅜⅝⅞²³µ≈≤≥≠√∞−`_\\/")
"""Symbols that are read, and symbols of markup, which are dropped later."""
POINTS = {
    "。": ". ", "．": ". ", "、": ", ", "，": ", ", "！": "! ", "？": "? ", "：": ": ", "；": "; ",
    "‐": "-", "‑": "-", "‒": "-", "―": "— ", "—": "— ", "–": "–", "…": "…",
    "«": "“", "»": "”", "„": "“", "‟": "“", "“": "“", "”": "”", "「": "“", "」": "”", "『": "“", "』": "”",
    "‘": "'", "’": "'", "‚": "'", "‛": "'", "′": "'", "″": '"', "‹": "'", "›": "'", "·": " ", "¡": "", "¿": "",
}  # fmt: skip
"""Punctuation -> the punctuation that voices know. A dash ends a word, like a space."""
PLAIN_LETTERS = {"ł": "l", "đ": "d", "œ": "oe", "ı": "i", "ŋ": "ng", "ĸ": "k", "ſ": "s", "ƒ": "f", "ʻ": "'", "ʼ": "'"}
"""Letters that Unicode does not decompose."""
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "ο": "omicron", "π": "pi",
    "ρ": "rho", "ς": "sigma", "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega",
}  # fmt: skip
ALLOWED = "Latin letters, digits, punctuation; emoji are left out"
FOREIGN = "\ufffe"
"""Noncharacter that letters of other scripts are folded to."""
_grouped = re.compile(
    r"(?<![\d+.,])(?<!\d[\xa0\u2009\u202f])[1-9]\d{0,2}(?:[\xa0\u2009\u202f]\d{3})+(?![\d\xa0\u2009\u202f])"
)
"""Number whose thousands are separated by non-breaking spaces."""
_greek = re.compile("[Ͱ-Ͽἀ-῿]+")
_speakable = re.compile(rf"[^\W_]|{OVERRIDE_PLACEHOLDER[1]}|[%&+=@$£€¥¢₹₩°§¶±×÷©½¼¾⅓-⅞≈≤≥≠√∞]")


class _Folded(dict[int, str]):
    """Cached folding of each character."""

    def __missing__(self, code: int) -> str:
        self[code] = found = _folded(chr(code))
        return found


def fold_characters(text: str, of: str = "the text", start: int = 0) -> str:
    """Text in characters that can be read; line ends stay. Raises UnsupportedScript, whose message calls the text
    `of` and counts characters from `start`."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = _grouped.sub(lambda m: re.sub(r"\D", ",", m[0]), text)
    found = text.translate(_table)
    if FOREIGN in found:
        at = next(at for at, letter in enumerate(text) if _table[ord(letter)] == FOREIGN)
        raise unsupported_script_error(text[at], f"{of}, character {start + at + 1},")
    return found if found.isascii() else _greek.sub(lambda run: _named(run, of), found)


def has_speech(text: str) -> bool:
    """Returns whether anything in a cleaned text has a sound."""
    return bool(_speakable.search(text))


def unsupported_script_error(letter: str, where: str) -> UnsupportedScript:
    name = unicodedata.name(letter, f"U+{ord(letter):04X}")
    return UnsupportedScript(
        f"{where} has {letter!r} ({name})",
        f"this voice reads English: {ALLOWED}",
        "write it in Latin letters, or say how it sounds: [word](/phonemes/)",
        param="input",
    )


def _folded(letter: str) -> str:
    if letter in POINTS:
        return POINTS[letter]
    kind = unicodedata.category(letter)
    if letter in SIGNS or (letter.isascii() and kind[0] != "C"):
        return letter
    if letter in "\n\u2028\u2029\x85\x0b\x0c":
        return "\n"
    if kind[0] == "Z" or letter in "\t\r":
        return " "
    if kind[0] in "CM" or letter == FOREIGN:
        return ""
    if kind == "Nd":
        return str(unicodedata.digit(letter))
    if kind[0] in "LN":
        return _letter(letter)
    return _compatible(letter) or " "


def _letter(letter: str) -> str:
    if letter in "ªº":
        return ""
    if letter <= "ÿ" or letter.lower() in GREEK or _greek.fullmatch(letter):
        return letter
    if letter.lower() in PLAIN_LETTERS:
        plain = PLAIN_LETTERS[letter.lower()]
        return plain if letter.islower() else plain.capitalize()
    return _compatible(letter) or FOREIGN


def _compatible(letter: str) -> str:
    """Unicode's compatibility decomposition of full-width forms, ligatures, letters of formulas and diacritics;
    empty if it is not ASCII."""
    parts = (part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.category(part).startswith("M"))
    found = "".join(POINTS.get(part, part) for part in parts)
    return found if found.isascii() and found.isprintable() else ""


def _named(run: re.Match[str], of: str) -> str:
    letters = unicodedata.normalize("NFC", run[0])
    if len(letters) == 1 and letters.lower() in GREEK:
        return f" {GREEK[letters.lower()]} "
    raise unsupported_script_error(letters[0], of)


_table = _Folded()
