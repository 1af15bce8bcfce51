"""Voice activity of many callers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.engine.cache.digest import chain_digest, state_digest
from asr_serve.engine.cache.lru import LruCache
from asr_serve.engine.request import VadChunk, VadSessionState
from asr_serve.engine.state_cache import StateCacheManager, StateSlot
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES, Silero, SileroState

ENTRY_BYTES = 400
"""Of what is kept of a piece, beside its numbers."""


class CachedVad(NamedTuple):
    """Of a piece: its probabilities, and the caller's row after it."""

    probabilities: np.ndarray
    state: bytes


class VadCache:
    """Voice activity of what was heard before: the same pieces, in the same order, from a fresh row or the same
    one.

    Whoever brings them again is told the same numbers, and the network hears nothing; its row is brought up to
    date once something else comes.
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
        """This is put after all that it has put."""
        if not windows.audio_digest:
            self.disable(listener)
        else:
            windows.history_digest = listener.history_digest = chain_digest(
                listener.history_digest, windows.audio_digest
            )

    def lookup(self, listener: VadSessionState) -> CachedVad | None:
        """Of the first piece that it waits for."""
        if not listener.queue or not listener.cacheable:
            return None
        return self._entries.get(listener.queue[0].history_digest)

    def store(self, listener: VadSessionState, windows: VadChunk, probabilities: np.ndarray, state: bytes) -> None:
        if listener.cacheable:
            nbytes = ENTRY_BYTES + probabilities.nbytes + len(state)
            self._entries.insert(windows.history_digest, CachedVad(probabilities.copy(), state), nbytes)

    def disable(self, listener: VadSessionState) -> None:
        """A piece of its is lost: from here on its row is nobody else's."""
        listener.cacheable = False


class VadRunner:
    """Their states, and the network that reads and writes them."""

    def __init__(self, model: Silero, rows: int) -> None:
        self.model = model
        self.states = StateCacheManager(model.state_specs(), rows)

    @torch.inference_mode()
    def step(self, batch: Sequence[tuple[StateSlot, np.ndarray]]) -> list[np.ndarray]:
        """Probabilities of each caller's windows; its state moves on."""
        slots = [slot for slot, _ in batch]
        counts = [len(pcm) // WINDOW_SAMPLES for _, pcm in batch]
        padded = np.zeros((len(batch), max(counts) * WINDOW_SAMPLES), np.float32)
        for row, (_, pcm) in enumerate(batch):
            padded[row, : len(pcm)] = pcm
        rows, tensors = self.states.prepare_rows(slots), self.states.tensors
        state = SileroState(**{name: tensor[rows] for name, tensor in tensors.items()})
        probabilities, state = self.model.step(torch.from_numpy(padded), state, torch.tensor(counts))
        for name, after in state._asdict().items():
            tensors[name][rows] = after
        return [probabilities[row, :count].numpy() for row, count in enumerate(counts)]
