"""What says sentences: a whole one in a step, or chunks of many. The same to the work that asks (engine/speaking/
work)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.models.interfaces import SynthesizedSentence, WholeSentenceTtsModel
from asr_serve.types import Sentence


class TtsStepOutput(NamedTuple):
    """What a step made of one sentence."""

    pcm: np.ndarray
    """(n,) float32; n may be 0."""
    finished: bool


class TtsSequence(Protocol):
    """A sentence that is being said. Belongs to its runner."""

    ends: Sequence[int]
    """The sample at which each phoneme ends; known from the first sound on."""


R = TypeVar("R", bound=TtsSequence)


class TtsRunner(Protocol[R]):
    """Belongs to the loop's thread."""

    rate_hz: int
    rows: int
    """Sentences that it may be saying at once."""
    step_rows: int
    """Those in one step."""

    @property
    def used(self) -> int:
        """Rows that were lent."""

    def validate(self, sentence: Sentence) -> None:
        """Raises OptionError, UnknownVoice."""

    def start_sequences(self, sentences: Sequence[Sentence]) -> Sequence[R]:
        """A row for each; there must be so many."""

    def step(self, rows: Sequence[R]) -> Sequence[TtsStepOutput]:
        """What comes next of each. Should it fail, give them back."""

    def free_sequence(self, row: R) -> None:
        """It is given back, at any moment."""

    def check_invariants(self) -> None:
        """Every row has at most one holder."""


class WholeTtsSequence:
    def __init__(self, sentence: Sentence) -> None:
        self.sentence = sentence
        self.ends: Sequence[int] = ()


class WholeTtsRunner:
    """A sentence at a time."""

    rows = step_rows = 1

    def __init__(self, model: WholeSentenceTtsModel, voices: CustomVoiceLoader) -> None:
        self._model, self._voices, self.rate_hz = model, voices, model.rate_hz
        self._active: set[WholeTtsSequence] = set()

    @property
    def used(self) -> int:
        return len(self._active)

    def validate(self, sentence: Sentence) -> None:
        self._voices.ensure_for_sentence(sentence)

    def start_sequences(self, sentences: Sequence[Sentence]) -> list[WholeTtsSequence]:
        assert len(self._active) + len(sentences) <= self.rows, "more sentences than rows"
        made = [WholeTtsSequence(sentence) for sentence in sentences]
        self._active.update(made)
        return made

    def step(self, rows: Sequence[WholeTtsSequence]) -> list[TtsStepOutput]:
        spoken: list[SynthesizedSentence] = [self._model.synthesize(row.sentence) for row in rows]
        for row, each in zip(rows, spoken, strict=True):
            row.ends = each.phoneme_ends_samples
        return [TtsStepOutput(each.pcm, finished=True) for each in spoken]

    def free_sequence(self, row: WholeTtsSequence) -> None:
        self._active.remove(row)

    def check_invariants(self) -> None:
        assert len(self._active) <= self.rows, "more sentences than rows"
