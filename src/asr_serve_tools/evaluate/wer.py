"""Word and character error rate of a corpus, in percent, after Whisper's normalizers: the English one, or the basic one
of other languages.

The rate is over the corpus: all errors over all reference words, so a long utterance weighs more than a
short one. Papers report this rate, not the mean of per-utterance rates.

Source  jiwer for the alignment; openai/whisper's EnglishTextNormalizer and BasicTextNormalizer, as packaged by
        whisper_normalizer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from asr_serve.errors import OptionError

INSTALL = "pip install jiwer whisper-normalizer"


class ErrorRate(msgspec.Struct, frozen=True):
    """Error counts over a corpus, in words for `wer` and in characters for `cer`, and their rate."""

    substitutions: int
    deletions: int
    insertions: int
    hits: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def reference(self) -> int:
        """Number of words (or characters) in the references, the denominator of the rate."""
        return self.substitutions + self.deletions + self.hits

    @property
    def percent(self) -> float:
        """Error rate in percent; insertions may raise it above 100."""
        return 100.0 * self.errors / self.reference


def normalize(text: str, language: str = "en") -> str:
    """Normalize a text. English: lower case, no punctuation or fillers, numbers as digits, American spelling. Other
    languages: lower case, no punctuation, for an English filler is a word elsewhere (`um` in German).

    Exactly the published normalizers, oddities included ("..." becomes "."), so that rates are comparable with
    published ones. Raises OptionError when whisper_normalizer is not installed.
    """
    return " ".join(_normalizer(english=language == "en")(text).split())


def wer(references: Sequence[str], hypotheses: Sequence[str], language: str = "en") -> ErrorRate:
    """Word error rate. Raises OptionError for lists of different lengths, or without a reference word."""
    return _error_rate(_jiwer().process_words, references, hypotheses, lambda text: len(text.split()), language)


def cer(references: Sequence[str], hypotheses: Sequence[str], language: str = "en") -> ErrorRate:
    """Character error rate; spaces between words count. Raises OptionError as `wer` does."""
    return _error_rate(_jiwer().process_characters, references, hypotheses, len, language)


class Difference(NamedTuple):
    """A stretch of an alignment: words that are the same, or what is there in place of others."""

    kind: str
    """equal, substitute, delete or insert."""
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]


def align_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Difference]:
    """Alignment of two lists of words, without normalization, as `wer` counts its errors. Raises OptionError."""
    if not (reference and hypothesis):
        kind = "delete" if reference else "insert"
        return [Difference(kind, tuple(reference), tuple(hypothesis))] if reference or hypothesis else []
    found = _jiwer().process_words(" ".join(reference), " ".join(hypothesis))
    return [
        Difference(
            chunk.type,
            tuple(reference[chunk.ref_start_idx : chunk.ref_end_idx]),
            tuple(hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]),
        )
        for chunk in found.alignments[0]
    ]


def _error_rate(
    align: Callable[[list[str], list[str]], Any],
    references: Sequence[str],
    hypotheses: Sequence[str],
    units_in: Callable[[str], int],
    language: str,
) -> ErrorRate:
    # A string is a sequence of strings too, and would silently be scored letter by letter.
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise OptionError("a single string", "a list of texts, one for each utterance", "put it in a list")
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses",
            "as many of one as of the other, in the same order",
        )
    pairs = [
        (normalize(reference, language), normalize(hypothesis, language))
        for reference, hypothesis in zip(references, hypotheses, strict=True)
    ]
    spoken = [(reference, hypothesis) for reference, hypothesis in pairs if reference]
    if not spoken:
        raise OptionError(f"{len(pairs)} references without a word", "an error rate needs at least one reference word")
    aligned = align([reference for reference, _ in spoken], [hypothesis for _, hypothesis in spoken])
    # All words of a hypothesis with an empty reference are insertions; not every jiwer accepts an empty reference.
    inserted = sum(units_in(hypothesis) for reference, hypothesis in pairs if not reference)
    return ErrorRate(
        substitutions=aligned.substitutions,
        deletions=aligned.deletions,
        insertions=aligned.insertions + inserted,
        hits=aligned.hits,
    )


@cache
def _normalizer(*, english: bool) -> Callable[[str], str]:
    try:
        from whisper_normalizer.basic import BasicTextNormalizer
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as missing:
        raise _not_installed("whisper_normalizer") from missing
    normalizer: Callable[[str], str] = EnglishTextNormalizer() if english else BasicTextNormalizer()
    return normalizer


def _jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError as missing:
        raise _not_installed("jiwer") from missing
    return jiwer


def _not_installed(package: str) -> OptionError:
    return OptionError(
        f"{package} is not installed", "error rates need jiwer and whisper_normalizer", f"install them with: {INSTALL}"
    )
