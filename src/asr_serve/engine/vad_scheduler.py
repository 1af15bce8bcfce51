"""Scheduler of voice activity: which chunks of which sessions are in the next step. Pure: the clock is passed in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asr_serve.engine.request import VadChunk, reject, resolve
from asr_serve.errors import AsrServeError, Cancelled

if TYPE_CHECKING:
    from asr_serve.engine.state_cache import StateCacheManager, StateSlot
    from asr_serve.engine.vad_runner import VadCache

VAD_STEP_INTERVAL_S, VAD_STEP_WINDOWS = 0.06, 128
"""Minimum interval between voice-activity steps, unless this many windows are queued."""


class VadSessionState:
    """Voice-activity session: its row of state and its queued chunks."""

    def __init__(self, session_id: int, slot: StateSlot, live: bool) -> None:
        self.id, self.slot, self.live = session_id, slot, live
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

    def __init__(self, states: StateCacheManager, step_windows: int, cache: VadCache | None = None) -> None:
        """`step_windows`: maximum windows in one step, padding included. `cache`: of voice activity."""
        self._states, self._step_windows, self._cache = states, step_windows, cache
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

    def open(self, session_id: int, live: bool, state: bytes | None) -> None:
        """Opens a session. `state`: the session's state in an engine before this one. Raises AtCapacity."""
        slot = self._states.allocate()
        if state is not None:
            self._states.import_state(slot, state)
        session = self._sessions[session_id] = VadSessionState(session_id, slot, live)
        if self._cache is not None:
            self._cache.start_session(session, state)
        self.live_count += live

    def enqueue(self, chunk: VadChunk) -> None:
        session = self._sessions.get(chunk.session)
        if session is None:
            reject(chunk.future, Cancelled("the session was closed"))
        else:
            session.queue.append(chunk)
            self.queued_windows += chunk.window_count
            if self._cache is not None:
                self._cache.append_chunk(session, chunk)
                self.serve_from_cache(session)

    def serve_from_cache(self, session: VadSessionState) -> None:
        """Resolves the first queued chunks whose results are cached, after the chunk in flight."""
        if self._cache is None or session.in_flight is not None:
            return
        while (cached := self._cache.lookup(session)) is not None:
            chunk = session.queue.popleft()
            self.queued_windows -= chunk.window_count
            chunk.future.state = session.state = cached.state
            resolve(chunk.future, cached.probabilities.copy())

    def restore_slot(self, session: VadSessionState) -> StateSlot:
        """The session's row, after the state from the cache, if any, was restored to it."""
        if session.state is not None:
            self._states.import_state(session.slot, session.state)
            session.state = None
        return session.slot

    def close(self, session_id: int, error: AsrServeError | None = None) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        error = error or Cancelled("the session was closed")
        for chunk in session.queue:
            self.queued_windows -= chunk.window_count
            reject(chunk.future, error)
        session.queue.clear()
        if session.in_flight is not None:
            reject(session.in_flight.future, error)
            session.in_flight = None
        self._states.free(session.slot)
        self.live_count -= session.live

    def close_all(self, error: AsrServeError) -> None:
        for session_id in list(self._sessions):
            self.close(session_id, error)

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
        self.queued_windows -= sum(chunk.window_count for _, chunk in batch)
        for session, chunk in batch:
            self._sessions[session.id] = self._sessions.pop(session.id)  # served sessions move to the back
            session.in_flight = chunk
        self.step_in_flight = bool(batch)
        return batch

    def complete(self, batch: VadBatch) -> list[int]:
        """Ends the step of a scheduled batch. Returns the indices in it of the sessions that are still open."""
        indices = [index for index, (session, chunk) in enumerate(batch) if session.in_flight is chunk]
        for index in indices:
            batch[index][0].in_flight = None
        self.step_in_flight = False
        return indices
