"""Silences in a recording, where no word can lie: by voice activity or by level."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.types import Span

SILENCE_THRESHOLD = 0.15
"""Probability below which a window is certainly silent. Chosen on sentences of our own voice, whose pauses are
known: Silero falls this low about two windows after a word, and rises in the window in which the next begins."""
MIN_SILENCE_WINDOWS = 4
"""Shortest pause between two words, by probabilities or by level; a shorter one may be within a word."""
ONSET_SAMPLES = WINDOW_SAMPLES
"""Margin at the end of a pause in which the next word may begin: most of its first window may be silent."""
SILENT_DB, MIN_CONTRAST_DB, SILENCE_SHARE = -70.0, 15.0, 0.2
"""Thresholds by level. Below SILENT_DB a window is silent in any case. If loud and quiet windows differ by less
than MIN_CONTRAST_DB, nothing else is. Otherwise the lowest SILENCE_SHARE of the range between them is silent."""


class SilenceState(msgspec.Struct, frozen=True):
    """State of a SilenceTracker."""

    first_window: int
    speech: bytes
    """One byte for each window from `first_window` on: whether it holds speech."""


class SilenceTracker:
    """Collects the speech probabilities of consecutive windows and returns the silences among them."""

    def __init__(self, threshold: float = 1.0) -> None:
        """`threshold`: probability below which speech may end; the limit of silence is not above it."""
        self._threshold = min(SILENCE_THRESHOLD, threshold)
        self._first_window = 0
        self._speech: deque[bool] = deque()
        """Whether each window holds speech, from `_first_window` on."""

    def export_state(self) -> SilenceState:
        return SilenceState(self._first_window, bytes(self._speech))

    def import_state(self, state: SilenceState) -> None:
        self._first_window, self._speech = state.first_window, deque(map(bool, state.speech))

    def append_scores(self, probabilities: np.ndarray) -> None:
        """Appends the probabilities of the next windows, (n,)."""
        self._speech.extend((probabilities >= self._threshold).tolist())

    def silences_in(self, span: Span) -> tuple[Span, ...]:
        """Returns the silences inside `span`, in order, of the windows that are known and not forgotten."""
        first = max(0, span.start_samples // WINDOW_SAMPLES - self._first_window)
        end = min(len(self._speech), -(-span.end_samples // WINDOW_SAMPLES) - self._first_window)
        speech = (self._speech[i] for i in range(first, end))
        return _silent_runs(speech, (self._first_window + first) * WINDOW_SAMPLES, span)

    def forget_before(self, sample: int) -> None:
        while self._speech and (self._first_window + 1) * WINDOW_SAMPLES <= sample:
            self._speech.popleft()
            self._first_window += 1


def silences_by_level(pcm: np.ndarray, span: Span) -> tuple[Span, ...]:
    """Returns the silences of audio without voice-activity scores. `pcm` (n,) float32 is the audio of `span`."""
    windows = pcm[: len(pcm) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    if not len(windows):
        return ()
    power = np.square(windows, dtype=np.float32).mean(axis=1)
    level = np.maximum(10 * np.log10(power + 1e-12), SILENT_DB)
    low, high = np.quantile(level, (0.1, 0.95)).tolist()
    bound = low + SILENCE_SHARE * (high - low) if high - low >= MIN_CONTRAST_DB else SILENT_DB
    return _silent_runs((level > bound).tolist(), span.start_samples, span)


def _silent_runs(speech: Iterable[bool], at: int, span: Span) -> tuple[Span, ...]:
    """Runs of windows without speech, from sample `at` on, clipped to `span`. A run at an edge of the span may
    be shorter than MIN_SILENCE_WINDOWS: no word lies beyond it."""
    silences: list[Span] = []
    run_start: int | None = None
    for is_speech in [*speech, True]:
        if not is_speech:
            run_start = at if run_start is None else run_start
        elif run_start is not None:
            edge = run_start <= span.start_samples or at >= span.end_samples
            if edge or at - run_start >= MIN_SILENCE_WINDOWS * WINDOW_SAMPLES:
                start, end = max(run_start, span.start_samples), min(at, span.end_samples)
                end -= ONSET_SAMPLES if at < span.end_samples else 0
                if start < end:
                    silences.append(Span(start, end))
            run_start = None
        at += WINDOW_SAMPLES
    return tuple(silences)
