"""Phoneme alphabets: misaki's, for our own voice and Kokoro, and espeak-ng's IPA, for Piper's voices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from asr_serve.errors import OptionError, UnknownPhoneme
from asr_serve.text import hibari_english
from asr_serve.text.name_pronunciations import possessive

Alphabet = Literal["misaki", "espeak"]
PUNCTUATION = frozenset(';:,.!?—…"()“” ')
"""Symbols without sound, which belong to no word."""
ESPEAK_LETTERS = (
    PUNCTUATION | set("abcdefhijklmnopqrstuvwxyzæçðøħŋœβθχᵻⱱˈˌːˑ˞ʰʲʷˠˤⁿ̪̩̯̃̊̆") | {chr(code) for code in range(0x250, 0x2B0)}
)
LEXICON_LIMITS = (1_000, 64, 200)
"""Most words of a lexicon, letters of a word, phonemes of it."""
_from_ipa = {
    "eɪ": "A", "aɪ": "I", "oʊ": "O", "əʊ": "Q", "ɔɪ": "Y", "aʊ": "W", "dʒ": "ʤ", "tʃ": "ʧ", "ɝ": "ɜɹ", "ɚ": "əɹ",
    "n̩": "ᵊn", "l̩": "ᵊl", "m̩": "ᵊm", "r": "ɹ", "g": "ɡ", "ɫ": "l", "e": "ɛ", "ʍ": "w", "'": "ˈ", "ɨ": "ᵻ",
    "͡": "", "͜": "", ".": "", "‿": "", "-": "",
}  # fmt: skip
_from_misaki = {
    "A": "eɪ", "I": "aɪ", "O": "oʊ", "Q": "əʊ", "Y": "ɔɪ", "W": "aʊ", "ʤ": "dʒ", "ʧ": "tʃ", "ᵊ": "ə", "T": "ɾ",
    "S": "ʃ", "ʦ": "ts", "ʣ": "dz",
}  # fmt: skip
_ipa = re.compile("|".join(map(re.escape, sorted(_from_ipa, key=len, reverse=True))))
_misaki = re.compile("|".join(_from_misaki))


def alphabet_letters(alphabet: Alphabet) -> frozenset[str]:
    return hibari_english.misaki_letters() if alphabet == "misaki" else frozenset(ESPEAK_LETTERS)


def from_ipa(phonemes: str, alphabet: Alphabet, british: bool = False) -> str:
    """Convert IPA to the voice's alphabet. American English in misaki's alphabet has no length: `fˈɑðəɹ`."""
    if alphabet == "espeak":
        return re.sub("[.‿͜͡-]", "", phonemes).replace("g", "ɡ").replace("'", "ˈ")
    found = _ipa.sub(lambda m: _from_ipa[m[0]], phonemes)
    return found if british else re.sub("ɜː?(?!ɹ)", "ɜɹ", found).replace("ː", "")


def from_misaki(phonemes: str, alphabet: Alphabet) -> str:
    return phonemes if alphabet == "misaki" else _misaki.sub(lambda m: _from_misaki[m[0]], phonemes)


def check_phonemes(phonemes: str, alphabet: Alphabet, of: str = "the text", param: str = "input") -> str:
    """Return `phonemes` unchanged. Raises UnknownPhoneme for a symbol that is not in the alphabet, and for
    phonemes without any sound."""
    known = alphabet_letters(alphabet)
    for at, letter in enumerate(phonemes):
        if letter not in known:
            raise UnknownPhoneme(
                f"{of} has {letter!r} (U+{ord(letter):04X}) as its phoneme {at + 1}",
                f"{alphabet}'s: {''.join(sorted(known - {' '}))}",
                param=param,
            )
    if not set(phonemes) - PUNCTUATION:
        raise UnknownPhoneme(f"{of} has no phonemes", f"{alphabet}'s: {''.join(sorted(known - {' '}))}", param=param)
    return phonemes


class Lexicon:
    """Requested pronunciations of words.

    A word in lower case also matches the same word with capitals; a word with a capital matches only itself. A
    possessive `'s` may follow.
    """

    def __init__(self, words: Mapping[str, str], alphabet: Alphabet) -> None:
        """Raises OptionError, and UnknownPhoneme, both with `param` lexicon."""
        most, longest, most_phonemes = LEXICON_LIMITS
        if len(words) > most:
            raise OptionError(f"a lexicon of {len(words):,} words", f"at most {most:,}", param="lexicon")
        for word, phonemes in words.items():
            if not word or len(word) > longest or any(letter.isspace() for letter in word):
                raise OptionError(
                    f"the lexicon's word {word[: longest + 1]!r}", f"1 to {longest} letters, no blanks", param="lexicon"
                )
            if len(phonemes) > most_phonemes:
                raise OptionError(
                    f"{len(phonemes)} phonemes of the lexicon's word {word!r}", f"1 to {most_phonemes}", param="lexicon"
                )
            check_phonemes(phonemes, alphabet, f"the lexicon's word {word!r}", "lexicon")
        self._words = dict(words)

    def __bool__(self) -> bool:
        return bool(self._words)

    def get(self, word: str) -> str | None:
        found = self._words.get(word) or self._words.get(word.lower())
        if found is None and word[-2:] in ("'s", "'S") and (stem := self.get(word[:-2])):
            return possessive(stem)
        return found
