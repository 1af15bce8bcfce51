"""What a text becomes: clauses to be said, and the silence between them."""

from __future__ import annotations

from typing import NamedTuple

from asr_serve.types import Stretch

SPEED, PITCH, ENERGY = (0.25, 4.0), (-12.0, 12.0), (-12.0, 12.0)
"""What a model can do: times as fast, semitones, dB."""


class Pause(NamedTuple):
    """Silence. Every silence between clauses is told: who plays adds none."""

    ms: int
    asked: bool = False
    """Somebody said how long. Any other is shorter where speech is faster."""


class Word(NamedTuple):
    """A written word, or several that are read as one: `15 March`."""

    text: str
    first: int
    """Index of its first phoneme in the clause's."""
    last: int
    """Of its last one, which is still part of it; punctuation is not."""


class Clause(NamedTuple):
    """What is said in one breath. A blank after a word belongs to the stretch of that word."""

    stretches: tuple[Stretch, ...]
    words: tuple[Word, ...]

    @property
    def phonemes(self) -> str:
        return "".join(stretch.phonemes for stretch in self.stretches)


Passage = Pause | Clause


class Manner(NamedTuple):
    """How a stretch is said."""

    speed: float = 1.0
    pitch: float = 0.0
    """Semitones."""
    energy: float = 0.0
    """dB."""

    def within(self, outer: Manner) -> Manner:
        """Both together, as far as a model goes: speeds multiply; semitones and dB, which are logarithms, add
        up."""
        return Manner(
            _clipped(self.speed * outer.speed, SPEED),
            _clipped(self.pitch + outer.pitch, PITCH),
            _clipped(self.energy + outer.energy, ENERGY),
        )


PLAIN = Manner()


class Said(NamedTuple):
    """What is written in one way and said in another, as the caller asked: in words, or in phonemes."""

    written: str
    words: str = ""
    phonemes: str = ""


PRESET = "Z\ue000"
"""Stands in a text for a Said. It looks like a name to the rules, and no cleaned text has its second character."""


def _clipped(value: float, bounds: tuple[float, float]) -> float:
    return round(min(max(value, bounds[0]), bounds[1]), 4)
