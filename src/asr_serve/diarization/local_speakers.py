"""What an engine hears of speakers in a short stretch of audio: who of a few speaks when, and what each sounds
like."""

from __future__ import annotations

import msgspec
import numpy as np

from asr_serve import units

WINDOW_SAMPLES = units.s_to_samples(10)
"""What is listened to at once: what segmentation models were trained on."""

BUDGET_SAMPLES = units.s_to_samples(3)
"""Of a window that is listened to for what its speakers sound like, over all of them: who is alone in it is heard
for so long, of three each for a third."""


class LocalSpeakers(msgspec.Struct, frozen=True):
    """Of one window. Its speakers have no order: the first may be another than the first of the next window."""

    first_samples: int
    """Where the first frame begins, in the window."""
    step_samples: int
    speakers: int
    """How many a window has at most."""
    chances: bytes
    """(frames, speakers) uint8: how likely each of them speaks there, 255 is 1. 1.8 KB for ten seconds."""
    who: tuple[int, ...] = ()
    """Those whose voice is known, in order."""
    clean_samples: tuple[int, ...] = ()
    """Of each of these: how much it was heard alone. 0: it was heard through others."""
    heard_samples: tuple[int, ...] = ()
    """Of each of these: how much of it was listened to, at most what it was asked for."""
    voices: bytes = b""
    """(len(who), width) float32, each of length 1."""

    @property
    def active(self) -> np.ndarray:
        """(frames, speakers) bool: who speaks more likely than not."""
        return self.likely > 127

    @property
    def likely(self) -> np.ndarray:
        """(frames, speakers) uint8."""
        return np.frombuffer(self.chances, np.uint8).reshape(-1, self.speakers)

    @property
    def embeddings(self) -> np.ndarray:
        """(len(who), width) float32."""
        return np.frombuffer(self.voices, np.float32).reshape(len(self.who), -1) if self.who else np.zeros((0, 1))
