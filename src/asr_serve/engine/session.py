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
    from asr_serve.decoding.hotwords import HotWords
    from asr_serve.engine.states import Slot, StateCacheManager
    from asr_serve.engine.voice import VoiceMemory


URGENT_MS = 100
"""What is to be encoded so soon is urgent in everything."""
TICK_S, TICK_WINDOWS = 0.06, 128
"""Voice-activity steps are at least so far apart, unless so many windows wait."""


class Utterance(msgspec.Struct):
    """A segment to recognise. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once it will not be
    encoded again."""

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
    arrived_s: float = 0.0
    """By the clock of the engine; that of its process."""
    whole: bool = False
    """Whether all of the silence is encoded that fills its window, of a model that has one."""
    heard: bytes = b""
    """Its audio's name, where what was heard is kept (engine/prefix/names)."""
    wanted: bytes = b""
    """That of the answer."""
    encoded: bool = False
    """It was, for this request: nothing that was kept would do."""
    hotwords: HotWords | None = None
    """Of `options.bias`, once they are ready."""

    @property
    def urgent(self) -> bool:
        """Somebody waits for just this, now."""
        return self.within_ms is not None and self.within_ms <= URGENT_MS

    @property
    def root(self) -> bytes:
        """What its frames are known by; empty: by nothing."""
        return self.heard and self.heard + b"whole" * self.whole


class Windows(msgspec.Struct):
    """Audio of one caller whose voice activity is wanted. `pcm` a whole number of windows long."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]
    heard: bytes = b""
    """The piece's name, where voice activity is kept (engine/prefix/names)."""
    chain: bytes = b""
    """That of all pieces up to this one."""
    state: bytes | None = None
    """The caller's row after these windows, where the loop was told to keep it: what another engine needs to
    go on from here."""

    @property
    def count(self) -> int:
        return len(self.pcm) // WINDOW_SAMPLES


class Wanted(msgspec.Struct, frozen=True):
    """A hypothesis of a stream, from a decoder that hears all of it each time."""

    samples: int
    """Of the stream, from its start, as far as the hypothesis is to hear it. What the encoder knows only later,
    because it looks ahead, is left out, unless the stream has ended."""
    options: SearchOptions
    draft: Draft
    priority: Priority


class Piece(msgspec.Struct):
    """Audio of one stream; `last`: the stream ends with it. The future has what all audio up to here says that the
    pieces before did not; or where something is `wanted`, just that."""

    session: int
    pcm: np.ndarray
    last: bool
    future: Future[Any]
    wanted: Wanted | None = None
    timed: bool = False
    """The answer tells when all tokens so far were said, as far as no answer has; of a stream with words."""


class Listener:
    """A caller's voice-activity row, and what it has put that is not yet computed."""

    def __init__(self, listener_id: int, slot: Slot, live: bool) -> None:
        self.id, self.slot, self.live = listener_id, slot, live
        self.waiting: deque[Windows] = deque()
        self.chain = b""
        """What it has put so far is known by, where voice activity is kept."""
        self.state: bytes | None = None
        """It has heard on, in what was kept: its row is to be brought there before the next step."""
        self.remembers = True
        """Whether what its row holds comes of all that it has put, and of nothing else."""


class Listeners:
    """Callers whose voice activity is followed, and whose turn it is. Belongs to the loop's thread."""

    def __init__(self, states: StateCacheManager, step_windows: int, memory: VoiceMemory | None = None) -> None:
        """`step_windows`: the most windows in one step, padding included. `memory`: what was heard before."""
        self._states, self._step_windows, self._memory = states, step_windows, memory
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
            self._states.load(slot, state)
        listener = self._open[listener_id] = Listener(listener_id, slot, live)
        if self._memory is not None:
            self._memory.begin(listener, state)
        self.live += live

    def put(self, windows: Windows) -> None:
        listener = self._open.get(windows.session)
        if listener is None:
            reject(windows.future, Cancelled("the session was closed"))
        else:
            listener.waiting.append(windows)
            self.windows += windows.count
            if self._memory is not None:
                self._memory.follow(listener, windows)
                self.recall(listener)

    def recall(self, listener: Listener) -> None:
        """Answer of what it waits for all that is known."""
        while self._memory is not None and (known := self._memory.recall(listener)) is not None:
            windows = listener.waiting.popleft()
            self.windows -= windows.count
            windows.state = listener.state = known.state
            resolve(windows.future, known.probabilities.copy())

    def row(self, listener: Listener) -> Slot:
        """Its row, for a step."""
        if listener.state is not None:
            self._states.load(listener.slot, listener.state)
            listener.state = None
        return listener.slot

    def close(self, listener_id: int, error: AsrServeError | None = None) -> None:
        listener = self._open.pop(listener_id, None)
        if listener is None:
            return
        for windows in listener.waiting:
            self.windows -= windows.count
            reject(windows.future, error or Cancelled("the session was closed"))
        listener.waiting.clear()
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
