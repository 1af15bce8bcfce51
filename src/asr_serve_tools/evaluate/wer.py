"""Word and character error rate of a corpus, in percent, after Whisper's English normaliser.

The rate is over the corpus: all errors over all reference words, so a long utterance weighs more than a
short one. This is what papers print; the mean of per-utterance rates is something else.

Source  jiwer for the alignment; openai/whisper's EnglishTextNormalizer, as packaged by whisper_normalizer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from asr_serve.errors import OptionError

INSTALL = "pip install jiwer whisper-normalizer"


class ErrorRate(msgspec.Struct, frozen=True):
    """Counts over a corpus, in words for `wer` and in characters for `cer`, and the rate they make."""

    substitutions: int
    deletions: int
    insertions: int
    hits: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def reference(self) -> int:
        """Words (or characters) in the references: what the errors are divided by."""
        return self.substitutions + self.deletions + self.hits

    @property
    def percent(self) -> float:
        """Above 100 when more was invented than was said."""
        return 100.0 * self.errors / self.reference


def normalize(text: str) -> str:
    """Lower case, no punctuation or fillers, numbers as digits, British spelling as American.

    Exactly the published normaliser, oddities included (of "..." it leaves a "."): else the rates could not
    be compared with other people's.
    Raises OptionError when whisper_normalizer is not installed.
    """
    return " ".join(_normalizer()(text).split())


def wer(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRate:
    """Word error rate. Raises OptionError for lists that do not match, or with nothing to compare with."""
    return _error_rate(_jiwer().process_words, references, hypotheses, lambda text: len(text.split()))


def cer(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRate:
    """Character error rate; the spaces between words count. Raises as `wer` does."""
    return _error_rate(_jiwer().process_characters, references, hypotheses, len)


def _error_rate(
    align: Callable[[list[str], list[str]], Any],
    references: Sequence[str],
    hypotheses: Sequence[str],
    units_in: Callable[[str], int],
) -> ErrorRate:
    # A string is a sequence of strings too: it would be scored letter against letter, without a word.
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise OptionError("a single string", "a list of texts, one for each utterance", "put it in a list")
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses",
            "as many of one as of the other, in the same order",
        )
    pairs = [(normalize(said), normalize(heard)) for said, heard in zip(references, hypotheses, strict=True)]
    spoken = [(said, heard) for said, heard in pairs if said]
    if not spoken:
        raise OptionError(
            f"{len(pairs)} references without a word", "an error rate needs at least one reference word"
        )
    aligned = align([said for said, _ in spoken], [heard for _, heard in spoken])
    # Whatever was heard where nothing was said is an insertion; not every jiwer takes an empty reference.
    invented = sum(units_in(heard) for said, heard in pairs if not said)
    return ErrorRate(
        substitutions=aligned.substitutions,
        deletions=aligned.deletions,
        insertions=aligned.insertions + invented,
        hits=aligned.hits,
    )


@cache
def _normalizer() -> Callable[[str], str]:
    try:
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as missing:
        raise _not_installed("whisper_normalizer") from missing
    normalizer: Callable[[str], str] = EnglishTextNormalizer()
    return normalizer


def _jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError as missing:
        raise _not_installed("jiwer") from missing
    return jiwer


def _not_installed(package: str) -> OptionError:
    return OptionError(
        f"{package} is not installed",
        "error rates need jiwer and whisper_normalizer",
        f"install them with: {INSTALL}",
    )
