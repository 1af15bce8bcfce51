"""What is said in recordings, by a recogniser of our own, and how it is read aloud."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np

from asr_serve.library import Model
from asr_serve.models.card import VoiceCard
from asr_serve.pipelines.speaking.fronts import front_of
from asr_serve.text.spoken.passages import Clause
from asr_serve.train.cloning.clips import Heard

RECOGNISER = "moonshine-tiny-en"
SEGMENT_MS = 12_000
"""Longest clip that is cut of a longer recording."""


class Aloud:
    """Phonemes of what is said: numbers, dates and all as people read them."""

    def __init__(self, card: VoiceCard, voice: str) -> None:
        """As that voice of the card's model reads it, in its alphabet. Raises OptionError, ProgramMissing."""
        self._front = front_of(card, voice)

    def __call__(self, text: str) -> str:
        """Raises OptionError for what cannot be read."""
        found = (each for each in self._front.passages(text) if isinstance(each, Clause))
        return " ".join(each.phonemes for each in found)


class Listener:
    """An Ear. Segments are cut at pauses."""

    def __init__(self, model: str = RECOGNISER, weights: str | None = None) -> None:
        """Raises UnknownModel, WeightsMissing."""
        self._model = Model.load(model, device="cpu", weights=weights)

    def __call__(self, pcm: np.ndarray) -> list[Heard]:
        (found,) = self._model.transcribe([pcm], max_segment_ms=SEGMENT_MS)
        return [Heard(each.start_samples, each.end_samples, each.text) for each in found.segments]

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
