"""Voice activity of many sessions in one step, and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.engine.cache.digest import chain_digest, state_digest
from asr_serve.engine.cache.lru_cache import LruCache
from asr_serve.engine.request import VadChunk, VadSessionState
from asr_serve.engine.state_cache import StateCacheManager, StateSlot
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

    def start_session(self, listener: VadSessionState, state: bytes | None) -> None:
        if state is not None:
            listener.history_digest = chain_digest(b"state", state_digest(state))

    def append_chunk(self, listener: VadSessionState, windows: VadChunk) -> None:
        """Extends the session's digest by this chunk."""
        if not windows.audio_digest:
            self.disable(listener)
        else:
            windows.history_digest = listener.history_digest = chain_digest(
                listener.history_digest, windows.audio_digest
            )

    def lookup(self, listener: VadSessionState) -> CachedVad | None:
        """Result of the first queued chunk, if it is cached."""
        if not listener.queue or not listener.cacheable:
            return None
        return self._entries.get(listener.queue[0].history_digest)

    def store(self, listener: VadSessionState, windows: VadChunk, probabilities: np.ndarray, state: bytes) -> None:
        if listener.cacheable:
            nbytes = ENTRY_BYTES + probabilities.nbytes + len(state)
            self._entries.insert(windows.history_digest, CachedVad(probabilities.copy(), state), nbytes)

    def disable(self, listener: VadSessionState) -> None:
        """Stops caching for the session: its state no longer follows from its chunks alone."""
        listener.cacheable = False


class VadRunner:
    """Voice-activity network and the states of its sessions."""

    def __init__(self, model: Silero, rows: int) -> None:
        self.model = model
        self.states = StateCacheManager(model.state_specs(), rows)

    @torch.inference_mode()
    def step(self, batch: Sequence[tuple[StateSlot, np.ndarray]]) -> list[np.ndarray]:
        """Runs the windows of each session and updates its state. Returns speech probabilities, one per window."""
        slots = [slot for slot, _ in batch]
        counts = [len(pcm) // WINDOW_SAMPLES for _, pcm in batch]
        padded = np.zeros((len(batch), max(counts) * WINDOW_SAMPLES), np.float32)
        for row, (_, pcm) in enumerate(batch):
            padded[row, : len(pcm)] = pcm
        rows, tensors = self.states.prepare_rows(slots), self.states.tensors
        state = SileroState(**{name: tensor[rows] for name, tensor in tensors.items()})
        probabilities, state = self.model.step(torch.from_numpy(padded), state, torch.tensor(counts))
        for name, updated in state._asdict().items():
            tensors[name][rows] = updated
        return [probabilities[row, :count].numpy() for row, count in enumerate(counts)]
