"""Fixed-size streaming state: rows allocated once, lent to sessions, cleared when taken."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.errors import AtCapacity


class Slot(NamedTuple):
    """A session's row. The lease tells this tenant of the row from the next."""

    row: int
    lease: int


class StateCacheManager:
    """Owns every session's rows of one stage's state; nothing else allocates them."""

    def __init__(self, state: tuple[Tensor, ...], retry_after_ms: int = 1_000) -> None:
        """`state`: the stage's tensors, one row per session in the first dimension."""
        self.tensors = state
        self.rows = state[0].shape[0]
        self.retry_after_ms = retry_after_ms
        self._free = deque(range(self.rows))
        self._lease = [0] * self.rows

    @property
    def used(self) -> int:
        return self.rows - len(self._free)

    def take(self) -> Slot:
        """A cleared row. Raises AtCapacity."""
        if not self._free:
            raise AtCapacity(
                f"all {self.rows} session rows are taken", "wait for a session to end", self.retry_after_ms
            )
        row = self._free.popleft()
        for tensor in self.tensors:
            tensor[row] = 0
        return Slot(row, self._lease[row])

    def give(self, slot: Slot) -> None:
        self.expect(slot)
        self._lease[slot.row] += 1
        self._free.append(slot.row)

    def expect(self, slot: Slot) -> None:
        assert self._lease[slot.row] == slot.lease, f"row {slot.row} was given back: its lease has expired"

    def load(self, slots: list[Slot]) -> tuple[Tensor, ...]:
        """The rows of several sessions as one batch."""
        for slot in slots:
            self.expect(slot)
        rows = torch.tensor([slot.row for slot in slots], device=self.tensors[0].device)
        return tuple(tensor[rows] for tensor in self.tensors)

    def save(self, slots: list[Slot], state: tuple[Tensor, ...]) -> None:
        rows = torch.tensor([slot.row for slot in slots], device=self.tensors[0].device)
        for tensor, new in zip(self.tensors, state, strict=True):
            tensor[rows] = new

    def pack(self, slot: Slot) -> bytes:
        """One row as bytes, for another manager of the same stage to go on from."""
        self.expect(slot)
        return b"".join(tensor[slot.row].cpu().contiguous().numpy().tobytes() for tensor in self.tensors)

    def unpack(self, slot: Slot, data: bytes) -> None:
        """The inverse. Raises ValueError for bytes of another shape."""
        self.expect(slot)
        for tensor in self.tensors:
            row = tensor[slot.row]
            size_bytes = row.numel() * row.element_size()
            piece, data = data[:size_bytes], data[size_bytes:]
            if len(piece) < size_bytes:
                raise ValueError("the saved state is shorter than the stage's")
            row.copy_(torch.frombuffer(bytearray(piece), dtype=row.dtype).view(row.shape))
        if data:
            raise ValueError("the saved state is longer than the stage's")

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a row is free twice"
