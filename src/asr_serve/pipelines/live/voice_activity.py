"""A live caller's samples to the speech probabilities of its windows: one piece under way, what comes meanwhile is
the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.engine.client import VadSession
from asr_serve.errors import StepFailed
from asr_serve.pipelines.live.segment_hypotheses import MAX_TRIES


class LiveVoiceActivity:
    """Call from one thread at a time; `wake` comes from any."""

    def __init__(self, session: VadSession, most_windows: int, wake: Callable[[], None]) -> None:
        """`most_windows`: of one piece."""
        self._session, self._most_windows, self._wake = session, most_windows, wake
        self._unscored = WindowAlignedBuffer()
        self._pending: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._tries = 0
        self._finishing = False
        self._ready: deque[np.ndarray] = deque()

    def append_audio(self, pcm: np.ndarray) -> None:
        self._unscored.append(pcm)

    def finish(self) -> None:
        """No more will come; the last window is filled up with silence."""
        self._finishing = True

    @property
    def idle(self) -> bool:
        return self._pending is None and not self._ready

    @property
    def finished(self) -> bool:
        """After `finish`: every window was taken."""
        return self._finishing and self.idle and not self._unscored.samples

    def next_probability(self) -> np.ndarray | None:
        """The next window's probability, (1,); None while it is not known. Raises StepFailed after TRIES."""
        if not self._ready:
            self.advance()
        return self._ready.popleft() if self._ready else None

    def advance(self) -> None:
        """Take an answer, and have the next piece scored."""
        if self._pending is not None and self._pending[1].done():
            (pcm, future), self._pending = self._pending, None
            try:
                self._ready.extend(future.result()[:, None])
                self._tries = 0
            except StepFailed:
                self._tries += 1
                if self._tries == MAX_TRIES:
                    raise
                self._submit(pcm)  # the session's state has not moved
        whole = self._unscored.samples // WINDOW_SAMPLES
        if self._pending is not None or not (whole or (self._finishing and self._unscored.samples)):
            return
        last = self._finishing and whole < self._most_windows
        self._submit(
            self._unscored.take_windows(min(whole, self._most_windows) * WINDOW_SAMPLES, WINDOW_SAMPLES, last=last)
        )

    def _submit(self, pcm: np.ndarray) -> None:
        future = self._session.submit_windows(pcm)
        self._pending = pcm, future
        future.add_done_callback(lambda _: self._wake())
