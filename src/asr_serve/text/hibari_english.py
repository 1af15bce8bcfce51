"""English phonemes in misaki's alphabet by hibari-tts; the only file that imports it.

Its lexicons are misaki's (American and British), its tagger chooses between readings (`I read`, `to read`), and a
small network (onnxruntime) reads words that no lexicon has. Everything is loaded once, at first use, and shared:
reading does not change it.

Source  hibari-tts (Apache-2.0), after misaki (Apache-2.0).
"""

from __future__ import annotations

import importlib.util
import json
import threading
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from asr_serve.errors import ProgramMissing
from asr_serve.text.name_pronunciations import name_pronunciations, possessive

HIBARI_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that the library may raise on unusual text."""
_PROTECT, _RESTORE = str.maketrans("ɾʔ", "\ue010\ue011"), str.maketrans("\ue010\ue011", "ɾʔ")
"""Tables that protect two phonemes from hibari, which would rewrite them, and restore them where they were
given."""
_loading = threading.Lock()


class PhonemeOverride(NamedTuple):
    """Part of a chunk whose phonemes are given."""

    written: str
    phonemes: str


Chunk = tuple[str | PhonemeOverride, ...]
"""Text between two spaces."""


class HibariPronouncer:
    """Grapheme-to-phoneme conversion by lexicon, tagger and network. Thread-safe."""

    def __init__(self, british: bool, like: HibariPronouncer | None = None) -> None:
        """`like`: another instance, whose parts that do not depend on the accent are shared."""
        _folder()
        from hibari.g2p import G2P
        from hibari.g2p.token import Tok

        self._token: Any = Tok
        self._g2p: Any = G2P(british=british)
        if like:
            self._g2p.tagger, self._g2p.tokenizer = like._g2p.tagger, like._g2p.tokenizer
        self._g2p.oov  # noqa: B018  loads the network, before several threads could do so
        self.letters, self._names = misaki_letters(), name_pronunciations(british)

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]:
        """Phonemes of each chunk of a sentence, with a trailing space."""
        try:
            found = self._pronounce(chunks)
        except HIBARI_ERRORS:
            found = [self._alone(chunk) for chunk in chunks]
        return [
            known + " " if (known := "".join(c for c in phonemes if c in self.letters)) else "" for phonemes in found
        ]

    def _pronounce(self, chunks: Sequence[Chunk]) -> list[str]:
        tokens = []
        for at, chunk in enumerate(chunks):
            for part in chunk:
                if isinstance(part, PhonemeOverride):
                    tokens.append(self._token(part.written, "NN", phonemes=part.phonemes.translate(_PROTECT), rating=5))
                else:
                    tokens += self._tokens(part, _letter_a(chunk, at, len(chunks)))
            if tokens:
                tokens[-1].whitespace = " "
        tags = self._g2p.tagger([token.text for token in tokens])
        for token, tag in zip(tokens, tags, strict=True):
            token.tag = tag
        spoken = self._g2p.phonemize_tokens(tokens)
        found = [""]
        for token in spoken:
            found[-1] += (token.phonemes or "").translate(_RESTORE)
            if token.whitespace:
                found.append("")
        found.pop()
        if len(found) != len(chunks):
            raise ValueError(f"{len(chunks)} chunks, {len(found)} read")
        return found

    def _alone(self, chunk: Chunk) -> str:
        try:
            return self._pronounce([chunk])[0]
        except HIBARI_ERRORS:
            return "".join(
                part.phonemes if isinstance(part, PhonemeOverride) else self._g2p.oov(part) or "" for part in chunk
            )

    def _tokens(self, part: str, letter_a: bool) -> list[Any]:
        tokens: list[Any] = []
        name = None
        for text in self._g2p.tokenizer.split(part):
            if name and text == "'s":
                tokens[-1].phonemes = possessive(name)
            else:
                name = self._names.get(_unmarked(text).lower())
                tokens.append(self._token(self._known(text), phonemes="ˈA" if letter_a and text == "A" else name))
        return tokens

    def _known(self, word: str) -> str:
        """Word without the diacritics of letters that neither lexicon nor network has: `ő`, but not the `é` of
        `résumé`."""
        if word.isascii():
            return word
        return "".join(c if c in self._g2p.oov.cin else _unmarked(c) for c in word) or word


def load_hibari(british: bool = False) -> HibariPronouncer:
    """Pronouncer of an accent, loaded at first use in a third of a second. Raises ProgramMissing."""
    with _loading:
        return _english(british)


@cache
def _english(british: bool) -> HibariPronouncer:
    return HibariPronouncer(british, None if not british else _english(False))


@cache
def misaki_letters() -> frozenset[str]:
    """Symbols of misaki's alphabet, as in the voices' vocabulary."""
    return frozenset(json.loads((_folder() / "assets" / "vocab.json").read_text(encoding="utf-8")))


def number_words() -> Any:
    """hibari's module of number words: ONES, cardinal, ordinal, year."""
    _folder()
    from hibari.g2p import numbers

    return numbers


def expand_abbreviations(text: str) -> str:
    """Write dates, times, units, titles, abbreviations and Roman numbers in words; plain numbers stay. Returns the
    text itself where the library fails on it."""
    _folder()
    from hibari.g2p.normalize import normalize

    try:
        return str(normalize(text))
    except HIBARI_ERRORS:
        return text


@cache
def _folder() -> Path:
    """Folder of hibari's package. Raises ProgramMissing."""
    found = importlib.util.find_spec("hibari")
    if found is None or found.origin is None:
        raise ProgramMissing(
            "hibari-tts is not installed", "English is read by it", "pip install 'hibari-tts[fast]==0.2.1'"
        )
    return Path(found.origin).parent


def _letter_a(chunk: Chunk, at: int, of: int) -> bool:
    """Returns whether a capital A is the letter: the article has a capital only at the beginning of a sentence."""
    return at > 0 or of == 1


def _unmarked(word: str) -> str:
    """Latin letters without diacritics: `café` -> `cafe`."""
    special = word.replace("ß", "ss").replace("æ", "ae").replace("ø", "o").replace("ð", "th").replace("þ", "th")
    return "".join(letter for letter in unicodedata.normalize("NFKD", special) if letter.isascii())
