"""Local speakers of a window of audio: who speaks when, and their embeddings."""

from __future__ import annotations

import msgspec
import numpy as np

from asr_serve import units

WINDOW_SAMPLES = units.s_to_samples(10)
"""Window length that segmentation models were trained on."""

BUDGET_SAMPLES = units.s_to_samples(3)
"""Default speech of a window that is embedded, over all its speakers: one gets all of it, each of three a third."""


class LocalSpeakers(msgspec.Struct, frozen=True):
    """Local speakers of one window. Their order is arbitrary, and another in each window."""

    first_samples: int
    """Start of the first frame within the window."""
    step_samples: int
    speakers: int
    """Most speakers of a window."""
    chances: bytes
    """(frames, speakers) uint8: speech probability of each, 255 is 1. 1.8 KB for ten seconds."""
    who: tuple[int, ...] = ()
    """Indices of the speakers with an embedding, in order."""
    clean_samples: tuple[int, ...] = ()
    """Non-overlapped speech of each of these; 0: its embedding is from overlapped speech."""
    heard_samples: tuple[int, ...] = ()
    """Speech of each of these that was embedded, at most the requested budget."""
    voices: bytes = b""
    """(len(who), width) float32, each of length 1."""

    @property
    def active(self) -> np.ndarray:
        """(frames, speakers) bool: probability above one half."""
        return self.likely > 127

    def overlaps(self) -> list[tuple[int, int]]:
        """Returns the (start, end) of stretches in which two speakers or more are active, in samples of the window."""
        both = (self.active.sum(1) > 1).astype(np.int8)
        edges = np.flatnonzero(np.diff(both, prepend=0, append=0)).reshape(-1, 2)
        return [
            (self.first_samples + start, self.first_samples + end)
            for start, end in (edges * self.step_samples).tolist()
        ]

    @property
    def likely(self) -> np.ndarray:
        """(frames, speakers) uint8."""
        return np.frombuffer(self.chances, np.uint8).reshape(-1, self.speakers)

    @property
    def embeddings(self) -> np.ndarray:
        """(len(who), width) float32."""
        return np.frombuffer(self.voices, np.float32).reshape(len(self.who), -1) if self.who else np.zeros((0, 1))
