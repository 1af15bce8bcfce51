"""A live caller's samples to the speech probabilities of its windows: one piece under way, what comes meanwhile is
the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from asr_serve.audio.buffers import Piece
from asr_serve.engine.client import VadSession
from asr_serve.errors import StepFailed
from asr_serve.pipelines.live.hypotheses import TRIES
from asr_serve.vad.endpoint import WINDOW_SAMPLES


class Scores:
    """Call from one thread at a time; `wake` comes from any."""

    def __init__(self, session: VadSession, most_windows: int, wake: Callable[[], None]) -> None:
        """`most_windows`: of one piece."""
        self._session, self._most_windows, self._wake = session, most_windows, wake
        self._piece = Piece()
        self._under_way: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._tries = 0
        self._finishing = False
        self._ready: deque[np.ndarray] = deque()

    def put(self, pcm: np.ndarray) -> None:
        self._piece.add(pcm)

    def finish(self) -> None:
        """No more will come; the last window is filled up with silence."""
        self._finishing = True

    @property
    def idle(self) -> bool:
        return self._under_way is None and not self._ready

    @property
    def over(self) -> bool:
        """After `finish`: every window was taken."""
        return self._finishing and self.idle and not self._piece.samples

    def take(self) -> np.ndarray | None:
        """The next window's probability, (1,); None while it is not known. Raises StepFailed after TRIES."""
        if not self._ready:
            self.advance()
        return self._ready.popleft() if self._ready else None

    def advance(self) -> None:
        """Take an answer, and have the next piece scored."""
        if self._under_way is not None and self._under_way[1].done():
            (pcm, future), self._under_way = self._under_way, None
            try:
                self._ready.extend(future.result()[:, None])
                self._tries = 0
            except StepFailed:
                self._tries += 1
                if self._tries == TRIES:
                    raise
                self._put(pcm)  # the session's state has not moved
        whole = self._piece.samples // WINDOW_SAMPLES
        if self._under_way is not None or not (whole or (self._finishing and self._piece.samples)):
            return
        last = self._finishing and whole < self._most_windows
        self._put(self._piece.take(min(whole, self._most_windows) * WINDOW_SAMPLES, WINDOW_SAMPLES, last=last))

    def _put(self, pcm: np.ndarray) -> None:
        future = self._session.put(pcm)
        self._under_way = pcm, future
        future.add_done_callback(lambda _: self._wake())
