"""Passages of a text: clauses to synthesize, and the silence between them."""

from __future__ import annotations

from typing import NamedTuple

from asr_serve.types import PhonemeSpan

SPEED_RANGE, PITCH_RANGE_SEMITONES, ENERGY_RANGE_DB = (0.25, 4.0), (-12.0, 12.0), (-12.0, 12.0)
"""Ranges that models support: speed factor, semitones, dB."""


class Pause(NamedTuple):
    """Silence. Every silence between clauses is explicit: players add none."""

    ms: int
    is_requested: bool = False
    """Whether the text set its length. Other pauses are shorter where speech is faster."""


class ClauseWord(NamedTuple):
    """A written word, or several that are read as one: `15 March`."""

    text: str
    first: int
    """Index of its first phoneme in the clause."""
    last: int
    """Index of its last phoneme, inclusive and without punctuation."""


class Clause(NamedTuple):
    """Clause that is synthesized as a unit. A space after a word belongs to the span of that word."""

    phoneme_spans: tuple[PhonemeSpan, ...]
    words: tuple[ClauseWord, ...]

    @property
    def phonemes(self) -> str:
        return "".join(span.phonemes for span in self.phoneme_spans)


Passage = Pause | Clause


class ProsodySettings(NamedTuple):
    """Prosody of a part of a text."""

    speed: float = 1.0
    pitch: float = 0.0
    """Semitones."""
    energy: float = 0.0
    """dB."""

    def combined_with(self, outer: ProsodySettings) -> ProsodySettings:
        """Both settings combined, clipped to the models' ranges: speeds multiply; semitones and dB, which are
        logarithms, add up."""
        return ProsodySettings(
            _clipped(self.speed * outer.speed, SPEED_RANGE),
            _clipped(self.pitch + outer.pitch, PITCH_RANGE_SEMITONES),
            _clipped(self.energy + outer.energy, ENERGY_RANGE_DB),
        )


NEUTRAL_PROSODY = ProsodySettings()


class PronunciationOverride(NamedTuple):
    """Text with a requested pronunciation, in words or in phonemes."""

    written: str
    words: str = ""
    phonemes: str = ""


OVERRIDE_PLACEHOLDER = "Z\ue000"
"""Placeholder for a PronunciationOverride in a text. The rules take it for a name, and no cleaned text contains
its second character."""


def _clipped(value: float, bounds: tuple[float, float]) -> float:
    return round(min(max(value, bounds[0]), bounds[1]), 4)
