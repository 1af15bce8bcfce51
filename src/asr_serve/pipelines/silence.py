"""Where nobody speaks in a recording, so that no word lies there: of voice activity, or of how loud it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.types import Span

SILENCE_THRESHOLD = 0.15
"""Below this probability nobody speaks in a window, for sure. Chosen on sentences of our own voice, whose pauses
are known: Silero falls so far about two windows after a word, and rises in the window in which the next begins."""
MIN_SILENCE_WINDOWS = 4
"""Of a pause between two words, by probabilities or by level; a shorter one may be within a word."""
ONSET_SAMPLES = WINDOW_SAMPLES
"""Before the end of a pause a word may begin: most of its first window may be silent."""
SILENT_DB, MIN_CONTRAST_DB, SILENCE_SHARE = -70.0, 15.0, 0.2
"""By level: below the first is silence anyway; where loud and quiet windows are nearer to each other than the
second, nothing else can be told; and what is quiet lies in the lowest share between the two."""


class SilenceTracker:
    """Windows in, in order; stretches out. It keeps what it was told behind `forget_before`."""

    def __init__(self, threshold: float = 1.0) -> None:
        """`threshold`: speech may end below this probability, and not above."""
        self._threshold = min(SILENCE_THRESHOLD, threshold)
        self._first_window = 0
        self._speech: deque[bool] = deque()
        """Of the windows from `_from` on."""

    def append_scores(self, probabilities: np.ndarray) -> None:
        """Of the next windows, (n,)."""
        self._speech.extend((probabilities >= self._threshold).tolist())

    def silences_in(self, span: Span) -> tuple[Span, ...]:
        """In order, inside `span`. Of windows that were not told, or forgotten, it says nothing."""
        first = max(0, span.start_samples // WINDOW_SAMPLES - self._first_window)
        behind = min(len(self._speech), -(-span.end_samples // WINDOW_SAMPLES) - self._first_window)
        speech = (self._speech[i] for i in range(first, behind))
        return _silent_runs(speech, (self._first_window + first) * WINDOW_SAMPLES, span)

    def forget_before(self, sample: int) -> None:
        while self._speech and (self._first_window + 1) * WINDOW_SAMPLES <= sample:
            self._speech.popleft()
            self._first_window += 1


def silences_by_level(pcm: np.ndarray, span: Span) -> tuple[Span, ...]:
    """The same of audio that nobody asked voice activity about: `pcm` (n,) float32 is that of `span`."""
    whole = pcm[: len(pcm) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    if not len(whole):
        return ()
    power = np.square(whole, dtype=np.float32).mean(axis=1)
    level = np.maximum(10 * np.log10(power + 1e-12), SILENT_DB)
    low, high = np.quantile(level, (0.1, 0.95)).tolist()
    bound = low + SILENCE_SHARE * (high - low) if high - low >= MIN_CONTRAST_DB else SILENT_DB
    return _silent_runs((level > bound).tolist(), span.start_samples, span)


def _silent_runs(speech: Iterable[bool], at: int, span: Span) -> tuple[Span, ...]:
    """Runs without speech, of windows from sample `at` on, as far as they lie in `span`. The ends of the span are
    no words: there a run may be as short as it is."""
    found: list[Span] = []
    since: int | None = None
    for spoken in [*speech, True]:
        if not spoken:
            since = at if since is None else since
        elif since is not None:
            edge = since <= span.start_samples or at >= span.end_samples
            if edge or at - since >= MIN_SILENCE_WINDOWS * WINDOW_SAMPLES:
                start, end = max(since, span.start_samples), min(at, span.end_samples)
                end -= ONSET_SAMPLES if at < span.end_samples else 0
                if start < end:
                    found.append(Span(start, end))
            since = None
        at += WINDOW_SAMPLES
    return tuple(found)
