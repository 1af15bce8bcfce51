"""Texts and confidences of segments, as Deepgram's protocol and Riva's share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asr_serve.text.normalization.inverse import strip_punctuation
from asr_serve.text.word_timing import is_spoken_character
from asr_serve.types import Segment, Word

CONFIDENCE_PLACES = 4
"""Decimal places of confidences."""


def plain_text(text: str) -> str:
    """Text without punctuation and capitals.

    >>> plain_text("Ever tried, ever failed; it's no matter.")
    "ever tried ever failed it's no matter"
    """
    return " ".join(strip_punctuation(word) for word in text.split() if is_spoken(word)).lower()


def is_spoken(text: str) -> bool:
    """Returns whether a text has a letter or digit, and not only punctuation."""
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
