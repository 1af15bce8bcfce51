"""Audio buffer of one session: a row of the state holds what the next step needs, a queue holds the rest."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asr_serve.engine.session_snapshot import BytesLike
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, AudioWindow

MAX_SAMPLES = 1 << 40
"""Maximum audio of a saved session: two years."""


class ChunkAudioPosition(NamedTuple):
    """Position of a session in its audio; see AudioBuffer."""

    seen_frames: int
    buffered_samples: int
    filled_samples: int
    ended: bool


class AudioBuffer:
    """Audio that no chunk has consumed. The row begins where the window of the next chunk begins."""

    def __init__(self, row: Tensor, window: AudioWindow) -> None:
        """`row` (samples,) float32 zeros in host memory, as long as the longest window."""
        self._row = row.numpy()
        self._before_samples = self._filled = window.left_samples
        """Valid samples of the row; those before the session's start are zeros."""
        self._overflow: deque[np.ndarray] = deque()
        self.seen_frames = 0
        """Encoder frames before the next chunk."""
        self.samples = 0
        """Samples appended so far."""
        self.ended = False

    @property
    def end_samples(self) -> int:
        return self.samples if self.ended else UNBOUNDED_SAMPLES

    def append(self, pcm: np.ndarray) -> None:
        """Appends `pcm` (n,) float32; samples that do not fit into the row are queued."""
        assert not self.ended, "audio was appended after its end"
        if len(pcm):
            self.samples += len(pcm)
            self._overflow.append(pcm)
            self._fill()

    @property
    def position(self) -> ChunkAudioPosition:
        return ChunkAudioPosition(self.seen_frames, self.samples, self._filled, self.ended)

    @property
    def unbuffered(self) -> np.ndarray:
        """(n,) float32: samples that are not in the row yet."""
        return np.concatenate([np.zeros(0, np.float32), *self._overflow])

    def validate(self, position: ChunkAudioPosition, queued: BytesLike, frame_samples: int) -> None:
        """Raises ValueError for a position or bytes that do not describe audio of this row."""
        seen_frames, samples, filled, _ = position
        queued_samples, remainder = divmod(len(queued), 4)
        in_range = min(position) >= 0 and samples <= MAX_SAMPLES and filled <= len(self._row)
        remaining = max(0, samples + self._before_samples - seen_frames * frame_samples)
        if (
            remainder
            or not in_range
            or filled + queued_samples != remaining
            or (queued_samples and filled < len(self._row))
        ):
            raise ValueError(f"{position} with {len(queued)} queued bytes does not describe a session's audio")

    def restore(self, position: ChunkAudioPosition, queued: BytesLike) -> None:
        """Restores the position and the queue of a saved session, whose row was already copied into this one's."""
        self.seen_frames, self.samples, self._filled, self.ended = position
        self._overflow = deque([np.frombuffer(bytes(queued), np.float32)] if len(queued) else [])

    def has_window(self, window: int, frame_samples: int) -> bool:
        """Returns whether the next `window` samples have arrived."""
        return self.seen_frames * frame_samples - self._before_samples + window <= self.samples

    def read_window(self, window: np.ndarray) -> None:
        """Fills `window` with the next samples, and with zeros after the end."""
        available = min(len(window), self._filled)
        window[:available] = self._row[:available]
        window[available:] = 0.0

    def advance_frames(self, frames: int, frame_samples: int) -> None:
        """Advances past a processed chunk and discards its first samples."""
        self.seen_frames += frames
        dropped = min(frames * frame_samples, self._filled)
        self._filled -= dropped
        self._row[: self._filled] = self._row[dropped : dropped + self._filled]
        self._fill()

    def _fill(self) -> None:
        while self._overflow and self._filled < len(self._row):
            chunk = self._overflow.popleft()
            part = chunk[: len(self._row) - self._filled]
            self._row[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(part) < len(chunk):
                self._overflow.appendleft(chunk[len(part) :])
