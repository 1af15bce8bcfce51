"""TTS runners: one whole sentence in a step, or chunks of many, behind one interface (engine/tts/executor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.models.interfaces import SynthesizedSentence, WholeSentenceTtsModel
from asr_serve.types import Sentence


class TtsStepOutput(NamedTuple):
    """Output of a step for one sentence."""

    pcm: np.ndarray
    """(n,) float32; n may be 0."""
    finished: bool


class TtsSequence(Protocol):
    """Sentence in progress. Belongs to its runner."""

    ends: Sequence[int]
    """Sample at which each phoneme ends; known from the first audio on."""


R = TypeVar("R", bound=TtsSequence)


class TtsRunner(Protocol[R]):
    """Runner of a TTS model. Belongs to the loop's thread."""

    rate_hz: int
    rows: int
    """Most sentences in progress at once."""
    step_rows: int
    """Most sentences in one step."""

    @property
    def used(self) -> int:
        """Number of rows in use."""

    def validate(self, sentence: Sentence) -> None:
        """Raises OptionError, UnknownVoice."""

    def start_sequences(self, sentences: Sequence[Sentence]) -> Sequence[R]:
        """Allocates a row for each sentence; so many must be free."""

    def step(self, rows: Sequence[R]) -> Sequence[TtsStepOutput]:
        """Generates the next audio of each row. After an exception the caller frees the rows."""

    def free_sequence(self, row: R) -> None:
        """Frees the row; allowed at any time."""

    def check_invariants(self) -> None:
        """Asserts that every row has at most one owner."""


class WholeTtsSequence:
    def __init__(self, sentence: Sentence) -> None:
        self.sentence = sentence
        self.ends: Sequence[int] = ()


class WholeTtsRunner:
    """TTS runner of one whole sentence at a time."""

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
        sequences = [WholeTtsSequence(sentence) for sentence in sentences]
        self._active.update(sequences)
        return sequences

    def step(self, rows: Sequence[WholeTtsSequence]) -> list[TtsStepOutput]:
        sentences: list[SynthesizedSentence] = [self._model.synthesize(row.sentence) for row in rows]
        for row, sentence in zip(rows, sentences, strict=True):
            row.ends = sentence.phoneme_ends_samples
        return [TtsStepOutput(sentence.pcm, finished=True) for sentence in sentences]

    def free_sequence(self, row: WholeTtsSequence) -> None:
        self._active.remove(row)

    def check_invariants(self) -> None:
        assert len(self._active) <= self.rows, "more sentences than rows"
