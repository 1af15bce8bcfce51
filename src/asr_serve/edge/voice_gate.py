"""Contract between an audio stream and what tells speech from silence before it is sent on."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput


class VoiceGate(Protocol):
    """Gate of one stream. What it returns has, in all, as many samples as it was fed, in their order."""

    def feed(self, pcm: NDArray[np.int16]) -> list[GateOutput]:
        """Takes (n,) int16 at 16 kHz, and returns what is decided by then."""

    def finish(self) -> list[GateOutput]:
        """Returns the rest."""

    def close(self) -> None:
        """Frees what the gate holds. Idempotent."""


class OpenGate:
    """Gate that lets everything through; only digital zeros become a count."""

    def feed(self, pcm: NDArray[np.int16]) -> list[GateOutput]:
        if not len(pcm):
            return []
        return [GatedSpeech(pcm)] if pcm.any() else [GatedSilence(len(pcm))]

    def finish(self) -> list[GateOutput]:
        return []

    def close(self) -> None:
        """Holds nothing."""
