"""Voice activity of many callers in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.engine.prefix.memory import Memory
from asr_serve.engine.prefix.names import chained, of_state
from asr_serve.engine.session import Listener, Windows
from asr_serve.engine.states import Slot, StateCacheManager
from asr_serve.models.vad.silero import WINDOW_SAMPLES, Silero, SileroState

ENTRY_BYTES = 400
"""Of what is kept of a piece, beside its numbers."""


class Known(NamedTuple):
    """Of a piece: its probabilities, and the caller's row after it."""

    probabilities: np.ndarray
    state: bytes


class VoiceMemory:
    """Voice activity of what was heard before: the same pieces, in the same order, from a fresh row or the same
    one.

    Whoever brings them again is told the same numbers, and the network hears nothing; its row is brought up to
    date once something else comes.
    """

    def __init__(self, most_bytes: int) -> None:
        self._pieces: Memory[Known] = Memory(most_bytes)

    @property
    def nbytes(self) -> int:
        return self._pieces.nbytes

    def begin(self, listener: Listener, state: bytes | None) -> None:
        if state is not None:
            listener.chain = chained(b"state", of_state(state))

    def follow(self, listener: Listener, windows: Windows) -> None:
        """This is put after all that it has put."""
        if not windows.heard:
            self.forget(listener)
        else:
            windows.chain = listener.chain = chained(listener.chain, windows.heard)

    def recall(self, listener: Listener) -> Known | None:
        """Of the first piece that it waits for."""
        if not listener.waiting or not listener.remembers:
            return None
        return self._pieces.get(listener.waiting[0].chain)

    def keep(self, listener: Listener, windows: Windows, probabilities: np.ndarray, state: bytes) -> None:
        if listener.remembers:
            nbytes = ENTRY_BYTES + probabilities.nbytes + len(state)
            self._pieces.put(windows.chain, Known(probabilities.copy(), state), nbytes)

    def forget(self, listener: Listener) -> None:
        """A piece of its is lost: from here on its row is nobody else's."""
        listener.remembers = False


class VadRunner:
    """Their states, and the network that reads and writes them."""

    def __init__(self, model: Silero, rows: int) -> None:
        self.model = model
        self.states = StateCacheManager(model.state_specs(), rows)

    @torch.inference_mode()
    def run(self, batch: Sequence[tuple[Slot, np.ndarray]]) -> list[np.ndarray]:
        """Probabilities of each caller's windows; its state moves on."""
        slots = [slot for slot, _ in batch]
        counts = [len(pcm) // WINDOW_SAMPLES for _, pcm in batch]
        padded = np.zeros((len(batch), max(counts) * WINDOW_SAMPLES), np.float32)
        for row, (_, pcm) in enumerate(batch):
            padded[row, : len(pcm)] = pcm
        rows, tensors = self.states.begin(slots), self.states.tensors
        state = SileroState(**{name: tensor[rows] for name, tensor in tensors.items()})
        probabilities, state = self.model.step(torch.from_numpy(padded), state, torch.tensor(counts))
        for name, after in state._asdict().items():
            tensors[name][rows] = after
        return [probabilities[row, :count].numpy() for row, count in enumerate(counts)]
