"""One session's audio on its way into chunks: what the next step needs lies in its row, the rest waits."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asr_serve.engine.session_snapshot import BytesLike
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, AudioWindow

MOST_SAMPLES = 1 << 40
"""Of a session that was saved: two years."""


class ChunkAudioPosition(NamedTuple):
    """Where a session stands in its audio: see Audio."""

    seen_frames: int
    buffered_samples: int
    filled_samples: int
    ended: bool


class AudioBuffer:
    """What a session has sent and no chunk has taken. Its row begins where the window of the next chunk does."""

    def __init__(self, row: Tensor, window: AudioWindow) -> None:
        """`row` (samples,) float32 of the host, zeros: as long as the longest window."""
        self._row = row.numpy()
        self._before_samples = self._filled = window.left_samples
        """Of the row, the samples that are there: those before the session's start are zeros."""
        self._overflow: deque[np.ndarray] = deque()
        self.seen_frames = 0
        """Encoder frames before the next chunk."""
        self.samples = 0
        """Put so far."""
        self.ended = False

    @property
    def is_complete(self) -> int:
        return self.samples if self.ended else UNBOUNDED_SAMPLES

    def append(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32; what does not fit is kept."""
        assert not self.ended, "put after finish"
        if len(pcm):
            self.samples += len(pcm)
            self._overflow.append(pcm)
            self._fill()

    @property
    def position(self) -> ChunkAudioPosition:
        return ChunkAudioPosition(self.seen_frames, self.samples, self._filled, self.ended)

    @property
    def unbuffered(self) -> np.ndarray:
        """(n,) float32: what no row holds yet."""
        return np.concatenate([np.zeros(0, np.float32), *self._overflow])

    def validate(self, place: ChunkAudioPosition, waiting: BytesLike, frame_samples: int) -> None:
        """Raises ValueError for what no audio of such a row can come to."""
        n, odd = divmod(len(waiting), 4)
        sane = (
            min(place) >= 0 and place.buffered_samples <= MOST_SAMPLES and place.filled_samples <= len(self._row)
        )
        left = max(0, place.buffered_samples + self._before_samples - place.seen_frames * frame_samples)
        if odd or not sane or place.filled_samples + n != left or (n and place.filled_samples < len(self._row)):
            raise ValueError(f"{place}, and {len(waiting)} bytes that wait: no session's audio")

    def restore(self, place: ChunkAudioPosition, waiting: BytesLike) -> None:
        """Stand where a session stood whose row this one's is a copy of."""
        self.seen_frames, self.samples, self._filled, self.ended = place
        self._overflow = deque([np.frombuffer(bytes(waiting), np.float32)] if len(waiting) else [])

    def has_window(self, window: int, frame_samples: int) -> bool:
        """Whether the next `window` samples are there."""
        return self.seen_frames * frame_samples - self._before_samples + window <= self.samples

    def read_window(self, into: np.ndarray) -> None:
        """The next window; zeros after the end."""
        there = min(len(into), self._filled)
        into[:there] = self._row[:there]
        into[there:] = 0.0

    def advance_frames(self, frames: int, frame_samples: int) -> None:
        """A chunk was taken: its first samples are not needed any more."""
        self.seen_frames += frames
        gone = min(frames * frame_samples, self._filled)
        self._filled -= gone
        self._row[: self._filled] = self._row[gone : gone + self._filled]
        self._fill()

    def _fill(self) -> None:
        while self._overflow and self._filled < len(self._row):
            piece = self._overflow.popleft()
            part = piece[: len(self._row) - self._filled]
            self._row[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(part) < len(piece):
                self._overflow.appendleft(piece[len(part) :])
