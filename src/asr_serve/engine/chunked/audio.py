"""One session's audio on its way into chunks: what the next step needs lies in its row, the rest waits."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asr_serve.engine.saved import Part
from asr_serve.models.streaming import FOREVER, Window

MOST_SAMPLES = 1 << 40
"""Of a session that was saved: two years."""


class Place(NamedTuple):
    """Where a session stands in its audio: see Audio."""

    seen: int
    samples: int
    filled: int
    ended: bool


class Audio:
    """What a session has sent and no chunk has taken. Its row begins where the window of the next chunk does."""

    def __init__(self, row: Tensor, window: Window) -> None:
        """`row` (samples,) float32 of the host, zeros: as long as the longest window."""
        self._row = row.numpy()
        self._before = self._filled = window.before
        """Of the row, the samples that are there: those before the session's start are zeros."""
        self._waiting: deque[np.ndarray] = deque()
        self.seen = 0
        """Encoder frames before the next chunk."""
        self.samples = 0
        """Put so far."""
        self.ended = False

    @property
    def end(self) -> int:
        return self.samples if self.ended else FOREVER

    def put(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32; what does not fit is kept."""
        assert not self.ended, "put after finish"
        if len(pcm):
            self.samples += len(pcm)
            self._waiting.append(pcm)
            self._fill()

    @property
    def place(self) -> Place:
        return Place(self.seen, self.samples, self._filled, self.ended)

    @property
    def waiting(self) -> np.ndarray:
        """(n,) float32: what no row holds yet."""
        return np.concatenate([np.zeros(0, np.float32), *self._waiting])

    def expect(self, place: Place, waiting: Part, frame_samples: int) -> None:
        """Raises ValueError for what no audio of such a row can come to."""
        n, odd = divmod(len(waiting), 4)
        sane = min(place) >= 0 and place.samples <= MOST_SAMPLES and place.filled <= len(self._row)
        left = max(0, place.samples + self._before - place.seen * frame_samples)
        if odd or not sane or place.filled + n != left or (n and place.filled < len(self._row)):
            raise ValueError(f"{place}, and {len(waiting)} bytes that wait: no session's audio")

    def resume(self, place: Place, waiting: Part) -> None:
        """Stand where a session stood whose row this one's is a copy of."""
        self.seen, self.samples, self._filled, self.ended = place
        self._waiting = deque([np.frombuffer(bytes(waiting), np.float32)] if len(waiting) else [])

    def holds(self, window: int, frame_samples: int) -> bool:
        """Whether the next `window` samples are there."""
        return self.seen * frame_samples - self._before + window <= self.samples

    def read(self, into: np.ndarray) -> None:
        """The next window; zeros after the end."""
        there = min(len(into), self._filled)
        into[:there] = self._row[:there]
        into[there:] = 0.0

    def advance(self, frames: int, frame_samples: int) -> None:
        """A chunk was taken: its first samples are not needed any more."""
        self.seen += frames
        gone = min(frames * frame_samples, self._filled)
        self._filled -= gone
        self._row[: self._filled] = self._row[gone : gone + self._filled]
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._filled < len(self._row):
            piece = self._waiting.popleft()
            part = piece[: len(self._row) - self._filled]
            self._row[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(part) < len(piece):
                self._waiting.appendleft(piece[len(part) :])
