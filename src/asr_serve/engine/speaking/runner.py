"""What says sentences: a whole one in a step, or chunks of many. The same to the work that asks (engine/speaking/
work)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from asr_serve.engine.speaking.voices import Voices
from asr_serve.models.speaking import Spoken, Whole
from asr_serve.types import Sentence


class Piece(NamedTuple):
    """What a step made of one sentence."""

    pcm: np.ndarray
    """(n,) float32; n may be 0."""
    over: bool


class Row(Protocol):
    """A sentence that is being said. Belongs to its runner."""

    ends: Sequence[int]
    """The sample at which each phoneme ends; known from the first sound on."""


R = TypeVar("R", bound=Row)


class Runner(Protocol[R]):
    """Belongs to the loop's thread."""

    rate_hz: int
    rows: int
    """Sentences that it may be saying at once."""
    step_rows: int
    """Those in one step."""

    @property
    def used(self) -> int:
        """Rows that were lent."""

    def expect(self, sentence: Sentence) -> None:
        """Raises OptionError, UnknownVoice."""

    def begin(self, sentences: Sequence[Sentence]) -> Sequence[R]:
        """A row for each; there must be so many."""

    def step(self, rows: Sequence[R]) -> Sequence[Piece]:
        """What comes next of each. Should it fail, give them back."""

    def leave(self, row: R) -> None:
        """It is given back, at any moment."""

    def check(self) -> None:
        """Every row has at most one holder."""


class WholeRow:
    def __init__(self, sentence: Sentence) -> None:
        self.sentence = sentence
        self.ends: Sequence[int] = ()


class WholeRunner:
    """A sentence at a time."""

    rows = step_rows = 1

    def __init__(self, model: Whole, voices: Voices) -> None:
        self._model, self._voices, self.rate_hz = model, voices, model.rate_hz
        self._held: set[WholeRow] = set()

    @property
    def used(self) -> int:
        return len(self._held)

    def expect(self, sentence: Sentence) -> None:
        self._voices.expect(sentence)

    def begin(self, sentences: Sequence[Sentence]) -> list[WholeRow]:
        assert len(self._held) + len(sentences) <= self.rows, "more sentences than rows"
        made = [WholeRow(sentence) for sentence in sentences]
        self._held.update(made)
        return made

    def step(self, rows: Sequence[WholeRow]) -> list[Piece]:
        spoken: list[Spoken] = [self._model.say(row.sentence) for row in rows]
        for row, each in zip(rows, spoken, strict=True):
            row.ends = each.ends
        return [Piece(each.pcm, over=True) for each in spoken]

    def leave(self, row: WholeRow) -> None:
        self._held.remove(row)

    def check(self) -> None:
        assert len(self._held) <= self.rows, "more sentences than rows"
