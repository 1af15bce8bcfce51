"""Where somebody speaks in a recording, as far as voice activity has told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.audio.buffers import Piece
from asr_serve.engine.client import VadSession
from asr_serve.pipelines.quiet import Quiet
from asr_serve.vad.endpoint import WINDOW_SAMPLES

PIECE_WINDOWS = 256
"""Handed over at once, at most: 8 s."""
LEAST_WINDOWS = 2
"""Of speech: a lone one is a click or a breath."""


class Spoken:
    """Audio in, in order; whether there is speech between two samples out. It keeps what it was told behind
    `forget_before`."""

    def __init__(
        self, session: VadSession, threshold: float, most_windows: int, wake: Callable[[Future[Any]], None]
    ) -> None:
        """`most_windows`: that the session takes at once."""
        self._most_samples = min(PIECE_WINDOWS, most_windows) * WINDOW_SAMPLES
        self._session, self._threshold, self._wake = session, threshold, wake
        self.quiet = Quiet(threshold)
        """Where nobody speaks at all."""
        self._piece = Piece()
        self._under_way: deque[Future[np.ndarray]] = deque()
        self._speech: deque[bool] = deque()
        """Of the windows from `_from` on."""
        self._from = 0

    def add(self, pcm: np.ndarray) -> None:
        self._piece.add(pcm)

    def advance(self, *, last: bool) -> bool:
        """Ask on, and take what is answered. `last`: no more audio comes. Raises what voice activity does."""
        moved = False
        while self._under_way and self._under_way[0].done():
            probabilities = self._under_way.popleft().result()
            self._speech.extend((probabilities >= self._threshold).tolist())
            self.quiet.add(probabilities)
            moved = True
        whole = self._piece.samples if last else self._piece.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if whole and not self._under_way:
            ends = last and self._piece.samples <= self._most_samples
            piece = self._piece.take(min(whole, self._most_samples), WINDOW_SAMPLES, last=ends)
            future = self._session.put(piece)
            self._under_way.append(future)
            future.add_done_callback(self._wake)
            moved = True
        return moved

    def knows(self, end_samples: int) -> bool:
        """All there is before that sample, but for a window that is not whole."""
        return (self._from + len(self._speech) + 1) * WINDOW_SAMPLES > end_samples

    def within(self, start_samples: int, end_samples: int) -> bool:
        """Whether anybody speaks there."""
        first = -(-start_samples // WINDOW_SAMPLES) - self._from
        behind = -(-end_samples // WINDOW_SAMPLES) - self._from
        return sum(self._speech[i] for i in range(max(0, first), min(behind, len(self._speech)))) >= LEAST_WINDOWS

    def first(self, start_samples: int, end_samples: int) -> int:
        """Where the first window begins there in which anybody speaks; the end, if none does."""
        first = max(0, -(-start_samples // WINDOW_SAMPLES) - self._from)
        behind = min(-(-end_samples // WINDOW_SAMPLES) - self._from, len(self._speech))
        found = next((i for i in range(first, behind) if self._speech[i]), None)
        return end_samples if found is None else (self._from + found) * WINDOW_SAMPLES

    def forget_before(self, sample: int) -> None:
        self.quiet.forget_before(sample)
        while self._speech and (self._from + 1) * WINDOW_SAMPLES <= sample:
            self._speech.popleft()
            self._from += 1

    def close(self) -> None:
        self._session.close()
