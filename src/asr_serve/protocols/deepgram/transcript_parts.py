"""Parts that Deepgram's answers about recordings and about live audio share: words, transcripts, confidences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.text.normalization.inverse import strip_punctuation
from asr_serve.text.word_timing import is_spoken_character
from asr_serve.types import Segment, Word

PLACES = 3
"""Decimal places of times."""
CONFIDENCE_PLACES = 4


class DeepgramWord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Word; times in seconds."""

    word: str
    """Text in lower case, without punctuation."""
    start: float
    end: float
    confidence: float
    punctuated_word: str | None = None
    speaker: int | None = None


def deepgram_words(segment: Segment) -> list[DeepgramWord]:
    """Words of a segment; none where the model has no times of words."""
    return [
        DeepgramWord(
            plain_text(word.text),
            round(word.start_s, PLACES),
            round(word.end_s, PLACES),
            round(word.confidence, CONFIDENCE_PLACES),
            word.text,
            speaker_number(word.speaker or segment.speaker),
        )
        for word in segment.words
        if _is_spoken(word.text)
    ]


def plain_text(text: str) -> str:
    """Text without punctuation and capitals.

    >>> plain_text("Ever tried, ever failed; it's no matter.")
    "ever tried ever failed it's no matter"
    """
    return " ".join(strip_punctuation(word) for word in text.split() if _is_spoken(word)).lower()


def _is_spoken(text: str) -> bool:
    return any(map(is_spoken_character, text))


def transcript_text(text: str, *, plain: bool) -> str:
    return plain_text(text) if plain else text


def segment_confidence(segment: Segment) -> float:
    """Confidence of a segment, 0 to 1: the mean of its words', or else the geometric mean of its tokens'
    probabilities."""
    if segment.words:
        return mean_confidence(segment.words)
    return round(min(1.0, math.exp(segment.avg_logprob)), CONFIDENCE_PLACES)


def mean_confidence(words: Sequence[Word]) -> float:
    return round(sum(word.confidence for word in words) / len(words), CONFIDENCE_PLACES)
