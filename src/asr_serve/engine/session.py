"""What the engine holds of requests and callers. Only the loop touches these records."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asr_serve.decoding.attention import NO_DRAFT, Draft, Recognition, SearchOptions
from asr_serve.errors import AsrServeError, Cancelled
from asr_serve.types import Priority
from asr_serve.vad.endpoint import WINDOW_SAMPLES

if TYPE_CHECKING:
    from asr_serve.engine.states import Slot, StateCacheManager


URGENT_MS = 100
"""What is to be encoded so soon is urgent in everything."""
TICK_S, TICK_WINDOWS = 0.06, 128
"""Voice-activity steps are at least so far apart, unless so many windows wait."""


class Utterance(msgspec.Struct):
    """A segment to recognise. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once encoded."""

    id: int
    pcm: np.ndarray | None
    samples: int
    """Without what pads a short one to the model's least."""
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]
    draft: Draft = NO_DRAFT
    within_ms: int | None = None
    """How soon it should be encoded; None: as its priority asks."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    encode_start_ns: int = 0
    encode_end_ns: int = 0

    @property
    def urgent(self) -> bool:
        """Somebody waits for just this, now."""
        return self.within_ms is not None and self.within_ms <= URGENT_MS


class Windows(msgspec.Struct):
    """Audio of one caller whose voice activity is wanted. `pcm` a whole number of windows long."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]
    state: bytes | None = None
    """The caller's row after these windows, where the loop was told to keep it: what another engine needs to
    go on from here."""

    @property
    def count(self) -> int:
        return len(self.pcm) // WINDOW_SAMPLES


class Listener:
    """A caller's voice-activity row, and what it has put that is not yet computed."""

    def __init__(self, listener_id: int, slot: Slot, live: bool) -> None:
        self.id, self.slot, self.live = listener_id, slot, live
        self.waiting: deque[Windows] = deque()


class Listeners:
    """Callers whose voice activity is followed, and whose turn it is. Belongs to the loop's thread."""

    def __init__(self, states: StateCacheManager, step_windows: int) -> None:
        """`step_windows`: the most windows in one step, padding included."""
        self._states, self._step_windows = states, step_windows
        self._open: dict[int, Listener] = {}
        self.live = 0
        """Those who speak, in real time."""
        self.windows = 0
        """Waiting, of all of them."""
        self._served_s = -TICK_S

    def __len__(self) -> int:
        return len(self._open)

    def open(self, listener_id: int, live: bool, state: bytes | None) -> None:
        """`state`: where the caller stood in an engine before this one. Raises AtCapacity."""
        slot = self._states.take()
        if state is not None:
            self._states.unpack(slot, state)
        self._open[listener_id] = Listener(listener_id, slot, live)
        self.live += live

    def put(self, windows: Windows) -> None:
        listener = self._open.get(windows.session)
        if listener is None:
            reject(windows.future, Cancelled("the session was closed"))
        else:
            listener.waiting.append(windows)
            self.windows += windows.count

    def close(self, listener_id: int, error: AsrServeError | None = None) -> None:
        listener = self._open.pop(listener_id, None)
        if listener is None:
            return
        for windows in listener.waiting:
            self.windows -= windows.count
            reject(windows.future, error or Cancelled("the session was closed"))
        self._states.give(listener.slot)
        self.live -= listener.live

    def close_all(self, error: AsrServeError) -> None:
        for listener_id in list(self._open):
            self.close(listener_id, error)

    @property
    def due_s(self) -> float | None:
        """When the next step is due, on the monotonic clock; None when nothing waits. A few windows wait a
        moment for those of other callers: a step costs as much for one as for TICK_WINDOWS."""
        if not self.windows:
            return None
        return self._served_s + (TICK_S if self.windows < TICK_WINDOWS else 0.0)

    def take(self, now_s: float) -> list[tuple[Listener, Windows]]:
        """One piece of each caller that has any, within the step's bound; nothing before it is due."""
        if self.due_s is None or now_s < self.due_s:
            return []
        self._served_s = now_s
        batch: list[tuple[Listener, Windows]] = []
        longest = 0
        for listener in self._open.values():
            if not listener.waiting:
                continue
            longer = max(longest, listener.waiting[0].count)
            if batch and (len(batch) + 1) * longer > self._step_windows:
                continue
            longest = longer
            batch.append((listener, listener.waiting.popleft()))
        self.windows -= sum(windows.count for _, windows in batch)
        for listener, _ in batch:  # whoever was served goes to the back
            self._open[listener.id] = self._open.pop(listener.id)
        return batch


def resolve(future: Future[Any], value: Any) -> None:
    """Answer, unless nobody waits any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
