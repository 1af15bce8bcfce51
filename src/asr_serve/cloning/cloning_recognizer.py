"""Recognition of the recordings' texts by a model of this package, and their phonemes."""

from __future__ import annotations

from typing import Self

import numpy as np

from asr_serve.api.library import Model
from asr_serve.cloning.clips import RecognizedClipSpan
from asr_serve.models.registry import TtsCard
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.text.g2p.clauses import Clause

RECOGNISER = "moonshine-tiny-en"
SEGMENT_MS = 12_000
"""Longest clip that is cut from a longer recording."""


class TextPhonemizer:
    """Phonemes of a text, with numbers, dates and the like verbalized."""

    def __init__(self, card: TtsCard, voice: str) -> None:
        """Makes phonemes for a voice of the card's model, in its alphabet. Raises OptionError, ProgramMissing."""
        self._front = frontend_for(card, voice)

    def __call__(self, text: str) -> str:
        """Returns the phonemes of a text. Raises OptionError for text that cannot be converted."""
        clauses = (each for each in self._front.passages(text) if isinstance(each, Clause))
        return " ".join(each.phonemes for each in clauses)


class CloningRecognizer:
    """ClipRecognizer with a model of this package. Segments are cut at pauses."""

    def __init__(self, model: str = RECOGNISER, weights: str | None = None) -> None:
        """Loads the model. Raises UnknownModel, WeightsMissing."""
        self._model = Model.load(model, device="cpu", weights=weights)

    def __call__(self, pcm: np.ndarray) -> list[RecognizedClipSpan]:
        (transcript,) = self._model.transcribe([pcm], max_segment_ms=SEGMENT_MS)
        return [RecognizedClipSpan(each.start_samples, each.end_samples, each.text) for each in transcript.segments]

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
