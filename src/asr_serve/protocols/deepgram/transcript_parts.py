"""Parts that Deepgram's answers about recordings and about live audio share: words."""

from __future__ import annotations

import msgspec

from asr_serve.protocols.segment_text import CONFIDENCE_PLACES, is_spoken, plain_text
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.types import Segment

PLACES = 3
"""Decimal places of times."""


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
        if is_spoken(word.text)
    ]
