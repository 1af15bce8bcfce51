"""Speech activity of a recording, as far as it has been scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.engine.client import VadSession
from asr_serve.pipelines.silence_tracker import SilenceTracker

VAD_BATCH_WINDOWS = 256
"""Limit of windows submitted at once: 8 s."""
MIN_SPEECH_WINDOWS = 2
"""Fewest windows that count as speech: a lone one is a click or a breath."""


class SpeechActivity:
    """Scores consecutive audio and answers whether a range holds speech. Forgets what lies before
    `forget_before`."""

    def __init__(
        self, session: VadSession, threshold: float, most_windows: int, wake: Callable[[Future[Any]], None]
    ) -> None:
        """`most_windows`: limit of the session for one submission."""
        self._most_samples = min(VAD_BATCH_WINDOWS, most_windows) * WINDOW_SAMPLES
        self._session, self._threshold, self._wake = session, threshold, wake
        self.silence = SilenceTracker(threshold)
        """Silences, by a lower threshold than speech."""
        self._unscored = WindowAlignedBuffer()
        self._pending: deque[Future[np.ndarray]] = deque()
        self._speech: deque[bool] = deque()
        """Whether each window holds speech, from `_first_window` on."""
        self._first_window = 0

    def append_audio(self, pcm: np.ndarray) -> None:
        self._unscored.append(pcm)

    def advance(self, *, last: bool) -> bool:
        """Collects scores and submits more audio; returns whether anything was done. `last`: no more audio
        follows. Raises the errors of voice activity."""
        progressed = False
        while self._pending and self._pending[0].done():
            probabilities = self._pending.popleft().result()
            self._speech.extend((probabilities >= self._threshold).tolist())
            self.silence.append_scores(probabilities)
            progressed = True
        samples = self._unscored.samples if last else self._unscored.samples // WINDOW_SAMPLES * WINDOW_SAMPLES
        if samples and not self._pending:
            ends = last and self._unscored.samples <= self._most_samples
            pcm = self._unscored.take_windows(min(samples, self._most_samples), WINDOW_SAMPLES, last=ends)
            future = self._session.submit_windows(pcm)
            self._pending.append(future)
            future.add_done_callback(self._wake)
            progressed = True
        return progressed

    def is_scored_to(self, end_samples: int) -> bool:
        """Returns whether all audio before that sample has been scored, except for an incomplete window."""
        return (self._first_window + len(self._speech) + 1) * WINDOW_SAMPLES > end_samples

    def has_speech(self, start_samples: int, end_samples: int) -> bool:
        """Returns whether the range holds speech."""
        first = -(-start_samples // WINDOW_SAMPLES) - self._first_window
        end = -(-end_samples // WINDOW_SAMPLES) - self._first_window
        return sum(self._speech[i] for i in range(max(0, first), min(end, len(self._speech)))) >= MIN_SPEECH_WINDOWS

    def first_speech(self, start_samples: int, end_samples: int) -> int:
        """Start of the first window with speech in the range; `end_samples` if there is none."""
        first = max(0, -(-start_samples // WINDOW_SAMPLES) - self._first_window)
        end = min(-(-end_samples // WINDOW_SAMPLES) - self._first_window, len(self._speech))
        window = next((i for i in range(first, end) if self._speech[i]), None)
        return end_samples if window is None else (self._first_window + window) * WINDOW_SAMPLES

    def forget_before(self, sample: int) -> None:
        self.silence.forget_before(sample)
        while self._speech and (self._first_window + 1) * WINDOW_SAMPLES <= sample:
            self._speech.popleft()
            self._first_window += 1

    def close(self) -> None:
        self._session.close()
