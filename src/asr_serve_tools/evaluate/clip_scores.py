"""Score of one clip: errors in words and in characters, hotwords that were found, and errors of speakers.

Texts are normalized by Whisper's normalizers (evaluate/wer.py), English ones by its own; those in a script without
spaces (Chinese, Japanese) are reduced to letters and digits, and have no error rate of words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import msgspec

from asr_serve.evaluation.store import TextDifference
from asr_serve.text.word_timing import is_unspaced
from asr_serve_tools.evaluate.wer import Difference, align_words, cer, normalize

UNSPACED_LANGUAGES = ("zh", "yue", "ja")


class ClipScore(msgspec.Struct, frozen=True):
    """Counts of one clip; those of words are None in a script without spaces."""

    words: int | None
    word_errors: int | None
    characters: int
    character_errors: int
    hotwords: int | None = None
    hotwords_found: int | None = None
    differences: tuple[TextDifference, ...] = ()


def score_text(reference: str, hypothesis: str, language: str, hotwords: Sequence[str] = ()) -> ClipScore:
    """Counts errors as bench/offline.py does, clip by clip: their sums over a corpus are those of `wer` and `cer`."""
    unspaced = language in UNSPACED_LANGUAGES
    space = "" if unspaced else " "
    differences = text_differences(reference, hypothesis, language)
    said = sum(len(part.reference) for part in differences)
    errors = sum(max(len(part.reference), len(part.hypothesis)) for part in differences if part.kind != "equal")
    if unspaced:
        characters, character_errors = said, errors
    elif normalize(reference, language):
        rate = cer([reference], [hypothesis], language)
        characters, character_errors = rate.reference, rate.errors
    else:
        characters, character_errors = 0, len(normalize(hypothesis, language))
    hot, found = hotwords_of(differences, hotwords, language) if hotwords else (None, None)
    return ClipScore(
        words=None if unspaced else said,
        word_errors=None if unspaced else errors,
        characters=characters,
        character_errors=character_errors,
        hotwords=hot,
        hotwords_found=found,
        differences=tuple(
            TextDifference(part.kind, space.join(part.reference), space.join(part.hypothesis)) for part in differences
        ),
    )


def text_differences(reference: str, hypothesis: str, language: str) -> list[Difference]:
    """Alignment of two normalized texts: by word, or by character in a script without spaces."""
    return align_words(_tokens(reference, language), _tokens(hypothesis, language))


def hotwords_of(differences: Sequence[Difference], hotwords: Sequence[str], language: str) -> tuple[int, int]:
    """Number of hotwords and phrases in the reference, and of those whose words are all in the hypothesis."""
    said = [word for part in differences for word in part.reference]
    heard = [part.kind == "equal" for part in differences for _ in part.reference]
    total = found = 0
    for phrase in {tuple(_tokens(hotword, language)) for hotword in hotwords} - {()}:
        for start in range(len(said) - len(phrase) + 1):
            if tuple(said[start : start + len(phrase)]) == phrase:
                total += 1
                found += all(heard[start : start + len(phrase)])
    return total, found


def guess_language(texts: Sequence[str]) -> str:
    """Language code by the script of most letters: ja, zh, or en, which stands for every script with spaces."""
    letters = [letter for text in texts for letter in text if letter.isalpha()]
    if sum(map(is_unspaced, letters)) * 2 <= len(letters):
        return "en"
    kana = sum("HIRAGANA" in (name := unicodedata.name(letter, "")) or "KATAKANA" in name for letter in letters)
    return "ja" if kana * 10 > len(letters) else "zh"


def _tokens(text: str, language: str) -> list[str]:
    if language in UNSPACED_LANGUAGES:
        folded = unicodedata.normalize("NFKC", text).lower()
        return [letter for letter in folded if unicodedata.category(letter)[0] in "LN"]
    return normalize(text, language).split()
