"""Speech probabilities of a live session's windows: one chunk is pending, and audio that arrives meanwhile is
the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np

from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.engine.client import VadSession
from asr_serve.errors import StepFailed
from asr_serve.pipelines.live.repeated_segment import MAX_TRIES


class VoiceActivityState(msgspec.Struct, frozen=True):
    """State of a LiveVoiceActivity after the last chunk that was answered."""

    scored_samples: int
    """End of the windows whose probabilities are known."""
    ready: list[float]
    """Probabilities that were not returned yet, of the last of these windows."""
    network: bytes | None
    """State of the network after them; None before the first."""


class LiveVoiceActivity:
    """Voice activity of one session. Call from one thread at a time; `wake` is called from any."""

    def __init__(self, session: VadSession, most_windows: int, wake: Callable[[], None]) -> None:
        """`most_windows`: limit of a chunk."""
        self._session, self._most_windows, self._wake = session, most_windows, wake
        self._unscored = WindowAlignedBuffer()
        self._pending: tuple[np.ndarray, Future[np.ndarray]] | None = None
        self._tries = 0
        self._finishing = False
        self._ready: deque[np.ndarray] = deque()
        self._scored_samples = 0
        self._network: bytes | None = None

    def export_state(self) -> VoiceActivityState | None:
        """Returns the state; None where the engine does not report it."""
        if self._scored_samples and self._network is None:
            return None
        return VoiceActivityState(self._scored_samples, [float(score[0]) for score in self._ready], self._network)

    def import_state(self, state: VoiceActivityState) -> None:
        """Continues after `state.scored_samples`, with a session that was opened with `state.network`. Call before the
        first audio, which begins there."""
        self._scored_samples, self._network = state.scored_samples, state.network
        self._ready.extend(np.array([[score] for score in state.ready], np.float32).reshape(-1, 1))

    def append_audio(self, pcm: np.ndarray) -> None:
        self._unscored.append(pcm)

    def finish(self) -> None:
        """Ends the audio; the last window is padded with silence."""
        self._finishing = True

    @property
    def idle(self) -> bool:
        return self._pending is None and not self._ready

    @property
    def finished(self) -> bool:
        """Whether, after `finish`, the probabilities of all windows have been returned."""
        return self._finishing and self.idle and not self._unscored.samples

    def next_probability(self) -> np.ndarray | None:
        """Returns the probability of the next window, (1,); None while it is unknown. Raises StepFailed after
        MAX_TRIES."""
        if not self._ready:
            self.advance()
        return self._ready.popleft() if self._ready else None

    def advance(self) -> None:
        """Collects a result and submits the next chunk."""
        if self._pending is not None and self._pending[1].done():
            (pcm, future), self._pending = self._pending, None
            try:
                self._ready.extend(future.result()[:, None])
                self._scored_samples += len(pcm)
                self._network = self._session.state
                self._tries = 0
            except StepFailed:
                self._tries += 1
                if self._tries == MAX_TRIES:
                    raise
                self._submit(pcm)  # the session's state has not changed
        windows = self._unscored.samples // WINDOW_SAMPLES
        if self._pending is not None or not (windows or (self._finishing and self._unscored.samples)):
            return
        last = self._finishing and windows < self._most_windows
        self._submit(
            self._unscored.take_windows(min(windows, self._most_windows) * WINDOW_SAMPLES, WINDOW_SAMPLES, last=last)
        )

    def _submit(self, pcm: np.ndarray) -> None:
        future = self._session.submit_windows(pcm)
        self._pending = pcm, future
        future.add_done_callback(lambda _: self._wake())
