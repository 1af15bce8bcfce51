"""Audio buffers: chunks joined to whole windows, and a history of recent audio."""

from __future__ import annotations

from collections import deque

import numpy as np

from asr_serve.types import Span


class WindowAlignedBuffer:
    """Chunks of any size to pieces of whole windows; the last window is padded with silence."""

    def __init__(self) -> None:
        self.chunks: list[np.ndarray] = []
        self.samples = 0

    def append(self, chunk: np.ndarray) -> None:
        self.chunks.append(chunk)
        self.samples += len(chunk)

    def take_windows(self, limit: int, window: int, *, last: bool) -> np.ndarray:
        """Remove and return up to `limit` samples; with `last` all of them, padded to a multiple of `window`."""
        if not self.samples:
            return np.zeros(0, np.float32)
        joined = np.concatenate(self.chunks) if len(self.chunks) > 1 else self.chunks[0]
        if last:
            missing = -len(joined) % window
            windows, rest = (np.pad(joined, (0, missing)) if missing else joined), joined[:0]
        else:
            windows, rest = joined[:limit], joined[limit:]
        self.chunks, self.samples = ([rest] if len(rest) else []), len(rest)
        return windows


class AudioHistory:
    """Recent audio that a future segment may still need."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self.chunks: deque[np.ndarray] = deque()

    def append(self, pcm: np.ndarray) -> None:
        self.chunks.append(pcm)
        self.end += len(pcm)

    def slice(self, span: Span) -> np.ndarray:
        """The samples of `span`; a view where they lie in one piece."""
        parts: list[np.ndarray] = []
        at = self.end
        for chunk in reversed(self.chunks):  # spans are mostly recent
            at -= len(chunk)
            first, last = max(span.start_samples - at, 0), min(span.end_samples - at, len(chunk))
            if first < last:
                parts.append(chunk[first:last])
            if at <= span.start_samples:
                break
        cut = parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
        assert len(cut) == span.samples, f"{span} reaches outside the audio that is kept"
        return cut

    def drop_before(self, sample: int) -> None:
        while self.chunks and self.start + len(self.chunks[0]) <= sample:
            self.start += len(self.chunks.popleft())
