"""Contract between an audio stream and what tells speech from silence before it is sent on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class SpeechAudio(NamedTuple):
    """Samples that are sent: (n,) int16 at 16 kHz."""

    pcm: np.ndarray


class SilenceCount(NamedTuple):
    """Silence, of which only the length is kept."""

    samples: int


GatedAudio = SpeechAudio | SilenceCount


class VoiceGate(Protocol):
    """Gate of one stream. What it returns has, in all, as many samples as it was fed, in their order."""

    def feed(self, pcm: np.ndarray) -> list[GatedAudio]:
        """Takes (n,) int16 at 16 kHz, and returns what is decided by then."""

    def finish(self) -> list[GatedAudio]:
        """Returns the rest."""


class OpenGate:
    """Gate that lets everything through; only digital zeros become a count."""

    def feed(self, pcm: np.ndarray) -> list[GatedAudio]:
        if not len(pcm):
            return []
        return [SpeechAudio(pcm)] if pcm.any() else [SilenceCount(len(pcm))]

    def finish(self) -> list[GatedAudio]:
        return []
