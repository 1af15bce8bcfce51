"""Voice activity of many sessions in one step, and its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.engine.cache.digest import chain_digest, state_digest
from asr_serve.engine.cache.lru_cache import LruCache
from asr_serve.engine.request import VadChunk
from asr_serve.engine.state_cache import StateCacheManager, StateSlot
from asr_serve.engine.vad_scheduler import VadSessionState
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES, Silero, SileroState

ENTRY_BYTES = 400
"""Overhead of a cache entry, besides its arrays."""


class CachedVad(NamedTuple):
    """Cached result of a chunk: its probabilities, and the session's state after it."""

    probabilities: np.ndarray
    state: bytes


class VadCache:
    """Cache of voice activity: results of the same chunks in the same order, from a new row or from the same
    imported state.

    Repeated audio gets the same probabilities without running the network; the session's row is updated when other
    audio follows.
    """

    def __init__(self, most_bytes: int) -> None:
        self._entries: LruCache[CachedVad] = LruCache(most_bytes)

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def start_session(self, session: VadSessionState, state: bytes | None) -> None:
        if state is not None:
            session.history_digest = chain_digest(b"state", state_digest(state))

    def append_chunk(self, session: VadSessionState, chunk: VadChunk) -> None:
        """Extends the session's digest by this chunk."""
        if not chunk.audio_digest:
            self.disable(session)
        else:
            chunk.history_digest = session.history_digest = chain_digest(session.history_digest, chunk.audio_digest)

    def lookup(self, session: VadSessionState) -> CachedVad | None:
        """Result of the first queued chunk, if it is cached."""
        if not session.queue or not session.cacheable:
            return None
        return self._entries.get(session.queue[0].history_digest)

    def store(self, session: VadSessionState, chunk: VadChunk, probabilities: np.ndarray, state: bytes) -> None:
        if session.cacheable:
            nbytes = ENTRY_BYTES + probabilities.nbytes + len(state)
            self._entries.insert(chunk.history_digest, CachedVad(probabilities.copy(), state), nbytes)

    def disable(self, session: VadSessionState) -> None:
        """Stops caching for the session: its state no longer follows from its chunks alone."""
        session.cacheable = False


class VadStepOutput(NamedTuple):
    """Output of a step, by its rows."""

    probabilities: list[np.ndarray]
    """Speech probabilities, one per window of the row."""
    state: SileroState
    duration_s: float

    def export_states(self) -> list[bytes]:
        """Each row's state after the step, as StateCacheManager.export_state returns it."""
        rows = torch.cat(self.state, 1).numpy()
        data, row_bytes = rows.tobytes(), rows.strides[0]
        return [data[start : start + row_bytes] for start in range(0, len(data), row_bytes)]


class VadRunner:
    """Voice-activity network and the states of its sessions. A step works on a copy of the states: sessions may open
    and close while it runs."""

    def __init__(self, model: Silero, rows: int) -> None:
        self.model = model
        self.states = StateCacheManager(model.state_specs(), rows)

    @torch.inference_mode()
    def gather_states(self, slots: Sequence[StateSlot]) -> SileroState:
        """Copies the sessions' states."""
        rows = self.states.prepare_rows(slots)
        return SileroState(**{name: tensor[rows] for name, tensor in self.states.tensors.items()})

    @torch.inference_mode()
    def scatter_states(self, slots: Sequence[StateSlot], state: SileroState, indices: Sequence[int]) -> None:
        """Updates the sessions' states: that of `slots[i]` is row `indices[i]` of `state`."""
        rows = self.states.prepare_rows(slots)
        for name, updated in state._asdict().items():
            self.states.tensors[name][rows] = updated[list(indices)]

    @torch.inference_mode()
    def step(self, batch: Sequence[np.ndarray], state: SileroState) -> VadStepOutput:
        """Runs the windows of each row on from its state. `batch`: (n,) float32 arrays, whole windows. May be called
        from any thread."""
        started_s = time.perf_counter()
        counts = [len(pcm) // WINDOW_SAMPLES for pcm in batch]
        padded = np.zeros((len(batch), max(counts) * WINDOW_SAMPLES), np.float32)
        for row, pcm in enumerate(batch):
            padded[row, : len(pcm)] = pcm
        probabilities, state = self.model.step(torch.from_numpy(padded), state, torch.tensor(counts))
        found = [probabilities[row, :count].numpy() for row, count in enumerate(counts)]
        return VadStepOutput(found, state, time.perf_counter() - started_s)
