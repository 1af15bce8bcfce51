"""Where somebody speaks in a recording, as far as voice activity has told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.engine.client import VadSession
from asr_serve.pipelines.silence import SilenceTracker

VAD_BATCH_WINDOWS = 256
"""Handed over at once, at most: 8 s."""
MIN_SPEECH_WINDOWS = 2
"""Of speech: a lone one is a click or a breath."""


class SpeechActivity:
    """Audio in, in order; whether there is speech between two samples out. It keeps what it was told behind
    `forget_before`."""

    def __init__(
        self, session: VadSession, threshold: float, most_windows: int, wake: Callable[[Future[Any]], None]
    ) -> None:
        """`most_windows`: that the session takes at once."""
        self._most_samples = min(VAD_BATCH_WINDOWS, most_windows) * WINDOW_SAMPLES
        self._session, self._threshold, self._wake = session, threshold, wake
        self.silence = SilenceTracker(threshold)
        """Where nobody speaks at all."""
        self._unscored = WindowAlignedBuffer()
        self._pending: deque[Future[np.ndarray]] = deque()
        self._speech: deque[bool] = deque()
        """Of the windows from `_from` on."""
        self._first_window = 0

    def append_audio(self, pcm: np.ndarray) -> None:
        self._unscored.append(pcm)

    def advance(self, *, last: bool) -> bool:
        """Ask on, and take what is answered. `last`: no more audio comes. Raises what voice activity does."""
        moved = False
        while self._pending and self._pending[0].done():
            probabilities = self._pending.popleft().result()
            self._speech.extend((probabilities >= self._threshold).tolist())
            self.silence.append_scores(probabilities)
            moved = True
        whole = self._unscored.samples if last else self._unscored.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if whole and not self._pending:
            ends = last and self._unscored.samples <= self._most_samples
            piece = self._unscored.take_windows(min(whole, self._most_samples), WINDOW_SAMPLES, last=ends)
            future = self._session.submit_windows(piece)
            self._pending.append(future)
            future.add_done_callback(self._wake)
            moved = True
        return moved

    def is_scored_to(self, end_samples: int) -> bool:
        """All there is before that sample, but for a window that is not whole."""
        return (self._first_window + len(self._speech) + 1) * WINDOW_SAMPLES > end_samples

    def has_speech(self, start_samples: int, end_samples: int) -> bool:
        """Whether anybody speaks there."""
        first = -(-start_samples // WINDOW_SAMPLES) - self._first_window
        behind = -(-end_samples // WINDOW_SAMPLES) - self._first_window
        return (
            sum(self._speech[i] for i in range(max(0, first), min(behind, len(self._speech))))
            >= MIN_SPEECH_WINDOWS
        )

    def first_speech(self, start_samples: int, end_samples: int) -> int:
        """Where the first window begins there in which anybody speaks; the end, if none does."""
        first = max(0, -(-start_samples // WINDOW_SAMPLES) - self._first_window)
        behind = min(-(-end_samples // WINDOW_SAMPLES) - self._first_window, len(self._speech))
        found = next((i for i in range(first, behind) if self._speech[i]), None)
        return end_samples if found is None else (self._first_window + found) * WINDOW_SAMPLES

    def forget_before(self, sample: int) -> None:
        self.silence.forget_before(sample)
        while self._speech and (self._first_window + 1) * WINDOW_SAMPLES <= sample:
            self._speech.popleft()
            self._first_window += 1

    def close(self) -> None:
        self._session.close()
