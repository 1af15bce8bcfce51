"""What an engine hears of speakers in a short stretch of audio: who of a few speaks when, and what each sounds
like."""

from __future__ import annotations

import msgspec
import numpy as np

from asr_serve import units

WINDOW_SAMPLES = units.s_to_samples(10)
"""What is listened to at once: what segmentation models were trained on."""


class LocalVoices(msgspec.Struct, frozen=True):
    """Of one window. Its speakers have no order: the first may be another than the first of the next window."""

    first_samples: int
    """Where the first frame begins, in the window."""
    step_samples: int
    speakers: int
    """How many a window has at most."""
    sets: bytes
    """(frames,) uint8: who speaks, a bit for each speaker."""
    who: tuple[int, ...] = ()
    """Those whose voice is known, in order."""
    clean_samples: tuple[int, ...] = ()
    """Of each of these: how much it was heard alone. 0: it was heard through others."""
    voices: bytes = b""
    """(len(who), width) float32, each of length 1."""

    @property
    def active(self) -> np.ndarray:
        """(frames, speakers) bool."""
        bits = np.frombuffer(self.sets, np.uint8)[:, None] >> np.arange(self.speakers, dtype=np.uint8)
        return (bits & 1).astype(bool)

    @property
    def embeddings(self) -> np.ndarray:
        """(len(who), width) float32."""
        return np.frombuffer(self.voices, np.float32).reshape(len(self.who), -1) if self.who else np.zeros((0, 1))
