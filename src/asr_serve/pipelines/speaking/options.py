"""What a caller may choose, and what they get."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.errors import MissingOption, OptionError
from asr_serve.text.spoken.passages import ENERGY, PITCH, SPEED
from asr_serve.types import Priority
from asr_serve.units import samples_to_s
from asr_serve.values import unknown

MAX_SEED = (1 << 62) - 1
LIMITS: dict[str, tuple[float, float]] = {"speed": SPEED, "pitch": PITCH, "energy": ENERGY}


class SpeakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Raises OptionError for what cannot be."""

    voice: str | None = None
    """None: the model's first."""
    speed: float = 1.0
    """0.25 to 4 times as fast; with SSML's own, both together."""
    pitch: float = 0.0
    """Semitones, -12 to 12."""
    energy: float = 0.0
    """dB, -12 to 12."""
    ssml: bool = False
    """The text is SSML: break, prosody, say-as, phoneme, sub, p, s."""
    phonemes: bool = False
    """The text is phonemes in the model's alphabet."""
    seed: int = 0
    """Of what is random in a voice: the same text and seed give the same samples."""
    rate_hz: int | None = None
    """Of the samples that come. None: the model's own."""
    watermark: bool = False
    """An inaudible mark that asr_serve.audio.watermark.detect finds again."""
    priority: Priority = "interactive"

    def __post_init__(self) -> None:
        if self.priority not in ("interactive", "bulk"):
            raise unknown("priority", str(self.priority), ["interactive", "bulk"])
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise OptionError(f"{name}={_shown(value)}", f"a number, {least:g} to {most:g}", param=name)
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"seed={_shown(self.seed)}", f"a whole number, 0 to {MAX_SEED}", param="seed")
        if self.rate_hz is not None and not MIN_RATE_HZ <= self.rate_hz <= MAX_RATE_HZ:
            raise OptionError(
                f"rate_hz={self.rate_hz}", f"{MIN_RATE_HZ} to {MAX_RATE_HZ}, or none", param="rate_hz"
            )
        if self.ssml and self.phonemes:
            raise OptionError(
                "ssml and phonemes", "one of them", "in SSML, <phoneme> holds phonemes", param="phonemes"
            )

    @classmethod
    def of(cls, options: dict[str, Any]) -> SpeakOptions:
        """From keyword arguments; an unknown one fails and names the nearest."""
        for name in options:
            if name not in cls.__struct_fields__:
                raise unknown("option", name, cls.__struct_fields__)
        return cls(**options)


class SpokenWord(msgspec.Struct, frozen=True):
    """A written word, and when it sounds."""

    text: str
    start_samples: int
    """Since the speech began, at the rate that comes out."""
    end_samples: int


class Spoken(msgspec.Struct, frozen=True):
    """A piece of speech, in order. Nothing is missing between two."""

    pcm: np.ndarray
    """(n,) int16; now and then none."""
    rate_hz: int
    start_samples: int
    """Of its first sample, since the speech began."""
    sentence: str = ""
    """Where one begins to be said: its words. Empty elsewhere."""
    words: tuple[SpokenWord, ...] = ()
    """Of that sentence, all of them: when each will sound."""

    @property
    def samples(self) -> np.ndarray:
        """(n,) float32 in -1..1."""
        return np.asarray(self.pcm * np.float32(1 / 32_768))

    @property
    def start_s(self) -> float:
        return samples_to_s(self.start_samples, self.rate_hz)


def expect_text(text: object) -> str:
    """Raises OptionError, MissingOption."""
    if text is None:
        raise MissingOption("no text to speak", "some", param="input")
    if not isinstance(text, str):
        raise OptionError(f"a {type(text).__name__} to speak", "text", param="input")
    return text


def _shown(value: object) -> str:
    return str(value)[:20]
