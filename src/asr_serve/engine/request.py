"""What the engine holds of requests and callers. Only the loop touches these records."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.decoding.seq2seq import NO_DRAFT, DraftTokens, Recognition, SearchOptions
from asr_serve.errors import AsrServeError, Cancelled
from asr_serve.types import Priority

if TYPE_CHECKING:
    from asr_serve.decoding.biasing_list import CompiledBiasingList
    from asr_serve.engine.state_cache import StateCacheManager, StateSlot
    from asr_serve.engine.vad_runner import VadCache


URGENT_WITHIN_MS = 100
"""What is to be encoded so soon is urgent in everything."""
VAD_STEP_INTERVAL_S, VAD_STEP_WINDOWS = 0.06, 128
"""Voice-activity steps are at least so far apart, unless so many windows wait."""


class RecognitionRequest(msgspec.Struct):
    """A segment to recognise. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once it will not be
    encoded again."""

    id: int
    pcm: np.ndarray | None
    samples: int
    """Without what pads a short one to the model's least."""
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]
    draft: DraftTokens = NO_DRAFT
    within_ms: int | None = None
    """How soon it should be encoded; None: as its priority asks."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    encode_start_ns: int = 0
    encode_end_ns: int = 0
    arrived_s: float = 0.0
    """By the clock of the engine; that of its process."""
    full_window: bool = False
    """Whether all of the silence is encoded that fills its window, of a model that has one."""
    audio_digest: bytes = b""
    """Its audio's name, where what was heard is kept (engine/cache/digest)."""
    answer_digest: bytes = b""
    """That of the answer."""
    encoded: bool = False
    """It was, for this request: nothing that was kept would do."""
    hotwords: CompiledBiasingList | None = None
    """Of `options.bias`, once they are ready."""

    @property
    def urgent(self) -> bool:
        """Somebody waits for just this, now."""
        return self.within_ms is not None and self.within_ms <= URGENT_WITHIN_MS

    @property
    def encoder_key(self) -> bytes:
        """What its frames are known by; empty: by nothing."""
        return self.audio_digest and self.audio_digest + b"whole" * self.full_window


class VadChunk(msgspec.Struct):
    """Audio of one caller whose voice activity is wanted. `pcm` a whole number of windows long."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]
    audio_digest: bytes = b""
    """The piece's name, where voice activity is kept (engine/cache/digest)."""
    history_digest: bytes = b""
    """That of all pieces up to this one."""
    state: bytes | None = None
    """The caller's row after these windows, where the loop was told to keep it: what another engine needs to
    go on from here."""

    @property
    def window_count(self) -> int:
        return len(self.pcm) // WINDOW_SAMPLES


class HypothesisRequest(msgspec.Struct, frozen=True):
    """A hypothesis of a stream, from a decoder that hears all of it each time."""

    samples: int
    """Of the stream, from its start, as far as the hypothesis is to hear it. What the encoder knows only later,
    because it looks ahead, is left out, unless the stream has ended."""
    options: SearchOptions
    draft: DraftTokens
    priority: Priority


class StreamChunk(msgspec.Struct):
    """Audio of one stream; `last`: the stream ends with it. The future has what all audio up to here says that the
    pieces before did not; or where something is `wanted`, just that."""

    session: int
    pcm: np.ndarray
    last: bool
    future: Future[Any]
    hypothesis: HypothesisRequest | None = None
    with_times: bool = False
    """The answer tells when all tokens so far were said, as far as no answer has; of a stream with words."""


class VadSessionState:
    """A caller's voice-activity row, and what it has put that is not yet computed."""

    def __init__(self, listener_id: int, slot: StateSlot, live: bool) -> None:
        self.id, self.slot, self.live = listener_id, slot, live
        self.queue: deque[VadChunk] = deque()
        self.history_digest = b""
        """What it has put so far is known by, where voice activity is kept."""
        self.state: bytes | None = None
        """It has heard on, in what was kept: its row is to be brought there before the next step."""
        self.cacheable = True
        """Whether what its row holds comes of all that it has put, and of nothing else."""


class VadScheduler:
    """Callers whose voice activity is followed, and whose turn it is. Belongs to the loop's thread."""

    def __init__(self, states: StateCacheManager, step_windows: int, memory: VadCache | None = None) -> None:
        """`step_windows`: the most windows in one step, padding included. `memory`: what was heard before."""
        self._states, self._step_windows, self._cache = states, step_windows, memory
        self._sessions: dict[int, VadSessionState] = {}
        self.live_count = 0
        """Those who speak, in real time."""
        self.queued_windows = 0
        """Waiting, of all of them."""
        self._last_step_s = -VAD_STEP_INTERVAL_S

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, listener_id: int, live: bool, state: bytes | None) -> None:
        """`state`: where the caller stood in an engine before this one. Raises AtCapacity."""
        slot = self._states.allocate()
        if state is not None:
            self._states.import_state(slot, state)
        listener = self._sessions[listener_id] = VadSessionState(listener_id, slot, live)
        if self._cache is not None:
            self._cache.start_session(listener, state)
        self.live_count += live

    def enqueue(self, windows: VadChunk) -> None:
        listener = self._sessions.get(windows.session)
        if listener is None:
            reject(windows.future, Cancelled("the session was closed"))
        else:
            listener.queue.append(windows)
            self.queued_windows += windows.window_count
            if self._cache is not None:
                self._cache.append_chunk(listener, windows)
                self.serve_from_cache(listener)

    def serve_from_cache(self, listener: VadSessionState) -> None:
        """Answer of what it waits for all that is known."""
        while self._cache is not None and (known := self._cache.lookup(listener)) is not None:
            windows = listener.queue.popleft()
            self.queued_windows -= windows.window_count
            windows.state = listener.state = known.state
            resolve(windows.future, known.probabilities.copy())

    def restore_slot(self, listener: VadSessionState) -> StateSlot:
        """Its row, for a step."""
        if listener.state is not None:
            self._states.import_state(listener.slot, listener.state)
            listener.state = None
        return listener.slot

    def close(self, listener_id: int, error: AsrServeError | None = None) -> None:
        listener = self._sessions.pop(listener_id, None)
        if listener is None:
            return
        for windows in listener.queue:
            self.queued_windows -= windows.window_count
            reject(windows.future, error or Cancelled("the session was closed"))
        listener.queue.clear()
        self._states.free(listener.slot)
        self.live_count -= listener.live

    def close_all(self, error: AsrServeError) -> None:
        for listener_id in list(self._sessions):
            self.close(listener_id, error)

    @property
    def due_s(self) -> float | None:
        """When the next step is due, on the monotonic clock; None when nothing waits. A few windows wait a
        moment for those of other callers: a step costs as much for one as for TICK_WINDOWS."""
        if not self.queued_windows:
            return None
        return self._last_step_s + (VAD_STEP_INTERVAL_S if self.queued_windows < VAD_STEP_WINDOWS else 0.0)

    def schedule(self, now_s: float) -> list[tuple[VadSessionState, VadChunk]]:
        """One piece of each caller that has any, within the step's bound; nothing before it is due."""
        if self.due_s is None or now_s < self.due_s:
            return []
        self._last_step_s = now_s
        batch: list[tuple[VadSessionState, VadChunk]] = []
        longest = 0
        for listener in self._sessions.values():
            if not listener.queue:
                continue
            longer = max(longest, listener.queue[0].window_count)
            if batch and (len(batch) + 1) * longer > self._step_windows:
                continue
            longest = longer
            batch.append((listener, listener.queue.popleft()))
        self.queued_windows -= sum(windows.window_count for _, windows in batch)
        for listener, _ in batch:  # whoever was served goes to the back
            self._sessions[listener.id] = self._sessions.pop(listener.id)
        return batch


def resolve(future: Future[Any], value: Any) -> None:
    """Answer, unless nobody waits any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
