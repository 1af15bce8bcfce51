"""What a text becomes: clauses to be said, and the silence between them."""

from __future__ import annotations

from typing import NamedTuple

from asr_serve.types import PhonemeSpan

SPEED_RANGE, PITCH_RANGE_SEMITONES, ENERGY_RANGE_DB = (0.25, 4.0), (-12.0, 12.0), (-12.0, 12.0)
"""What a model can do: times as fast, semitones, dB."""


class Pause(NamedTuple):
    """Silence. Every silence between clauses is told: who plays adds none."""

    ms: int
    is_requested: bool = False
    """Somebody said how long. Any other is shorter where speech is faster."""


class ClauseWord(NamedTuple):
    """A written word, or several that are read as one: `15 March`."""

    text: str
    first: int
    """Index of its first phoneme in the clause's."""
    last: int
    """Of its last one, which is still part of it; punctuation is not."""


class Clause(NamedTuple):
    """What is said in one breath. A blank after a word belongs to the stretch of that word."""

    phoneme_spans: tuple[PhonemeSpan, ...]
    words: tuple[ClauseWord, ...]

    @property
    def phonemes(self) -> str:
        return "".join(stretch.phonemes for stretch in self.phoneme_spans)


Passage = Pause | Clause


class ProsodySettings(NamedTuple):
    """How a stretch is said."""

    speed: float = 1.0
    pitch: float = 0.0
    """Semitones."""
    energy: float = 0.0
    """dB."""

    def combined_with(self, outer: ProsodySettings) -> ProsodySettings:
        """Both together, as far as a model goes: speeds multiply; semitones and dB, which are logarithms, add
        up."""
        return ProsodySettings(
            _clipped(self.speed * outer.speed, SPEED_RANGE),
            _clipped(self.pitch + outer.pitch, PITCH_RANGE_SEMITONES),
            _clipped(self.energy + outer.energy, ENERGY_RANGE_DB),
        )


NEUTRAL_PROSODY = ProsodySettings()


class PronunciationOverride(NamedTuple):
    """What is written in one way and said in another, as the caller asked: in words, or in phonemes."""

    written: str
    words: str = ""
    phonemes: str = ""


OVERRIDE_PLACEHOLDER = "Z\ue000"
"""Stands in a text for a Said. It looks like a name to the rules, and no cleaned text has its second character."""


def _clipped(value: float, bounds: tuple[float, float]) -> float:
    return round(min(max(value, bounds[0]), bounds[1]), 4)
