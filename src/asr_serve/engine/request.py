"""Requests and voice-activity sessions in the engine. Only the loop's thread changes these records."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.errors import AsrServeError, Cancelled
from asr_serve.types import PeerTimings, Priority

if TYPE_CHECKING:
    from asr_serve.decoding.biasing_list import CompiledBiasingList
    from asr_serve.engine.state_cache import StateCacheManager, StateSlot
    from asr_serve.engine.vad_runner import VadCache


URGENT_WITHIN_MS = 100
"""Requests to be encoded within this time are urgent in every later stage."""
VAD_STEP_INTERVAL_S, VAD_STEP_WINDOWS = 0.06, 128
"""Minimum interval between voice-activity steps, unless this many windows are queued."""


class RecognitionRequest(msgspec.Struct):
    """Request to recognize a segment. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once it will not
    be encoded again."""

    id: int
    pcm: np.ndarray | None
    samples: int
    """Length without the padding of short segments to the model's minimum."""
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]
    draft: DraftTokens = NO_DRAFT
    within_ms: int | None = None
    """Time within which it should be encoded; None: decided by its priority."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    encode_start_ns: int = 0
    encode_end_ns: int = 0
    arrived_s: float = 0.0
    """Arrival on the monotonic clock of the engine's process."""
    full_window: bool = False
    """Whether all the silence that fills the model's window is encoded, for models with a window."""
    audio_digest: bytes = b""
    """Digest of the audio, where results are cached (engine/cache/digest)."""
    answer_digest: bytes = b""
    """Digest of everything that determines the result."""
    encoded: bool = False
    """Whether the audio was encoded for this request, because no cached result could be used."""
    peer_timings: PeerTimings | None = None
    """Times of that encoding, if a peer did it."""
    hotwords: CompiledBiasingList | None = None
    """Compiled `options.bias`, once it is ready."""

    @property
    def urgent(self) -> bool:
        """Returns whether a caller waits for this request now."""
        return self.within_ms is not None and self.within_ms <= URGENT_WITHIN_MS

    @property
    def encoder_key(self) -> bytes:
        """Cache key of the encoder frames; empty where the audio has no digest."""
        return self.audio_digest and self.audio_digest + b"whole" * self.full_window


class VadChunk(msgspec.Struct):
    """Audio of one voice-activity session. `pcm` (n,) float32, 16 kHz, a whole number of windows."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]
    audio_digest: bytes = b""
    """Digest of the chunk, where voice activity is cached (engine/cache/digest)."""
    history_digest: bytes = b""
    """Digest of all chunks up to this one."""
    state: bytes | None = None
    """The session's state after these windows, where the loop keeps states: another engine continues from it."""

    @property
    def window_count(self) -> int:
        return len(self.pcm) // WINDOW_SAMPLES


class HypothesisRequest(msgspec.Struct, frozen=True):
    """Request for a hypothesis of a stream, from a decoder that reads the whole utterance each time."""

    samples: int
    """Samples from the start of the stream that the hypothesis covers. Frames that need later audio, because of
    the encoder's look-ahead, are left out unless the stream has ended."""
    options: SearchOptions
    draft: DraftTokens
    priority: Priority


class StreamChunk(msgspec.Struct):
    """Audio of one stream; `last`: the stream ends with it. The future holds the result that is new with this
    chunk, or the requested `hypothesis`."""

    session: int
    pcm: np.ndarray
    last: bool
    future: Future[Any]
    hypothesis: HypothesisRequest | None = None
    with_times: bool = False
    """Whether the result includes the times of all tokens whose times were not returned before; only for streams
    with words."""


class VadSessionState:
    """Voice-activity session: its row of state and its queued chunks."""

    def __init__(self, listener_id: int, slot: StateSlot, live: bool) -> None:
        self.id, self.slot, self.live = listener_id, slot, live
        self.queue: deque[VadChunk] = deque()
        self.in_flight: VadChunk | None = None
        """The chunk in the step that runs now; None once the session is closed."""
        self.history_digest = b""
        """Digest of all chunks so far, where voice activity is cached."""
        self.state: bytes | None = None
        """Cached state after chunks that were served from the cache; restored to the row before the next step."""
        self.cacheable = True
        """Whether the row's state results from all submitted chunks, and from nothing else."""


VadBatch = list[tuple[VadSessionState, VadChunk]]
"""Chunks of one voice-activity step, each of another session."""


class VadScheduler:
    """Scheduler of voice-activity sessions. Belongs to the loop's thread."""

    def __init__(self, states: StateCacheManager, step_windows: int, memory: VadCache | None = None) -> None:
        """`step_windows`: maximum windows in one step, padding included. `memory`: cache of voice activity."""
        self._states, self._step_windows, self._cache = states, step_windows, memory
        self._sessions: dict[int, VadSessionState] = {}
        self.live_count = 0
        """Open sessions of live callers."""
        self.queued_windows = 0
        """Windows queued in all sessions."""
        self.step_in_flight = False
        """Whether a scheduled batch is not completed yet."""
        self._last_step_s = -VAD_STEP_INTERVAL_S

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, listener_id: int, live: bool, state: bytes | None) -> None:
        """Opens a session. `state`: the session's state in an engine before this one. Raises AtCapacity."""
        slot = self._states.allocate()
        if state is not None:
            self._states.import_state(slot, state)
        session = self._sessions[listener_id] = VadSessionState(listener_id, slot, live)
        if self._cache is not None:
            self._cache.start_session(session, state)
        self.live_count += live

    def enqueue(self, windows: VadChunk) -> None:
        session = self._sessions.get(windows.session)
        if session is None:
            reject(windows.future, Cancelled("the session was closed"))
        else:
            session.queue.append(windows)
            self.queued_windows += windows.window_count
            if self._cache is not None:
                self._cache.append_chunk(session, windows)
                self.serve_from_cache(session)

    def serve_from_cache(self, listener: VadSessionState) -> None:
        """Resolves the first queued chunks whose results are cached, after the chunk in flight."""
        if self._cache is None or listener.in_flight is not None:
            return
        while (cached := self._cache.lookup(listener)) is not None:
            windows = listener.queue.popleft()
            self.queued_windows -= windows.window_count
            windows.state = listener.state = cached.state
            resolve(windows.future, cached.probabilities.copy())

    def restore_slot(self, listener: VadSessionState) -> StateSlot:
        """The session's row, after the state from the cache, if any, was restored to it."""
        if listener.state is not None:
            self._states.import_state(listener.slot, listener.state)
            listener.state = None
        return listener.slot

    def close(self, listener_id: int, error: AsrServeError | None = None) -> None:
        session = self._sessions.pop(listener_id, None)
        if session is None:
            return
        error = error or Cancelled("the session was closed")
        for windows in session.queue:
            self.queued_windows -= windows.window_count
            reject(windows.future, error)
        session.queue.clear()
        if session.in_flight is not None:
            reject(session.in_flight.future, error)
            session.in_flight = None
        self._states.free(session.slot)
        self.live_count -= session.live

    def close_all(self, error: AsrServeError) -> None:
        for listener_id in list(self._sessions):
            self.close(listener_id, error)

    @property
    def due_s(self) -> float | None:
        """Time of the next step on the monotonic clock; None when nothing is queued, and while a step is in flight. A
        few windows wait for those of other sessions: a step costs as much for one as for VAD_STEP_WINDOWS."""
        if self.step_in_flight or not self.queued_windows:
            return None
        return self._last_step_s + (VAD_STEP_INTERVAL_S if self.queued_windows < VAD_STEP_WINDOWS else 0.0)

    def schedule(self, now_s: float) -> VadBatch:
        """Pops one chunk of each session that has any, within the step's limit; empty before the step is due. They
        are in flight until `complete`, which the caller calls before the next step."""
        if self.due_s is None or now_s < self.due_s:
            return []
        self._last_step_s = now_s
        batch: VadBatch = []
        longest = 0
        for session in self._sessions.values():
            if not session.queue:
                continue
            padded = max(longest, session.queue[0].window_count)
            if batch and (len(batch) + 1) * padded > self._step_windows:
                continue
            longest = padded
            batch.append((session, session.queue.popleft()))
        self.queued_windows -= sum(windows.window_count for _, windows in batch)
        for session, windows in batch:
            self._sessions[session.id] = self._sessions.pop(session.id)  # served sessions move to the back
            session.in_flight = windows
        self.step_in_flight = bool(batch)
        return batch

    def complete(self, batch: VadBatch) -> list[int]:
        """Ends the step of a scheduled batch. Returns the indices in it of the sessions that are still open."""
        indices = [index for index, (session, windows) in enumerate(batch) if session.in_flight is windows]
        for index in indices:
            batch[index][0].in_flight = None
        self.step_in_flight = False
        return indices


def resolve(future: Future[Any], value: Any) -> None:
    """Sets the result, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
