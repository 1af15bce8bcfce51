"""Fixed-size streaming state: rows allocated once, assigned to sessions, cleared for each session.

`prepare_rows` selects the rows of a step, which reads and writes them in place: no row is gathered, copied or
allocated, and addresses never change, so that a CUDA graph can be captured over them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.engine.session_snapshot import BytesLike
from asr_serve.errors import AtCapacity
from asr_serve.models.interfaces import StateSpec

CPU = torch.device("cpu")


class StateSlot(NamedTuple):
    """Row of one session. The lease number distinguishes this session from later ones in the same row."""

    row: int
    lease: int


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous tensor; without a copy in host memory."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def copy_into_tensor(tensor: Tensor, part: BytesLike) -> None:
    """Copies bytes into a contiguous tensor of that size; the inverse of `tensor_bytes`."""
    if not tensor.numel():
        return
    target = tensor.detach().view(-1).view(torch.uint8)
    if target.is_cpu:
        target.numpy()[:] = np.frombuffer(part, np.uint8)
    else:
        # torch has no read-only tensors: copy those. Other memory is shared, and read before this returns.
        view = memoryview(part)
        target.copy_(torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8))


def state_row_bytes(specs: Mapping[str, StateSpec]) -> int:
    """Bytes of one session's state."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


class StateCacheManager:
    """Owner of all sessions' rows of the state that a model declares; nothing else allocates them.

    `tensors` by name: (slots + 1, *shape), each contiguous. The last row is a padding row: the unused rows of a
    batch point there. A row contains nothing of earlier sessions: what a session has not written is zero, in saved
    state too.
    """

    def __init__(
        self,
        specs: Mapping[str, StateSpec],
        slots: int,
        device: torch.device = CPU,
        *,
        retry_after_ms: int = 1_000,
        poison: bool = False,
    ) -> None:
        """`poison`: fill memory that must not be read with NaN, or the least integer, so that a wrong mask
        shows."""
        self.specs, self.slots, self.retry_after_ms = dict(specs), slots, retry_after_ms
        self.tensors = {
            name: torch.zeros(slots + 1, *spec.shape, dtype=spec.dtype, device=CPU if spec.on_host else device)
            for name, spec in specs.items()
        }
        self._poison = poison
        self._free = deque(range(slots))
        self._lease = [0] * slots
        self._reset: set[int] = set()
        """Allocated rows that have not run yet: they are cleared together when they first run."""
        self._rows = torch.full((slots + 1,), slots, dtype=torch.int64, device=device)
        self._cleared = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._host = torch.zeros(slots + 1, dtype=torch.int64)
        if poison:
            self._poison_rows(list(range(slots + 1)))

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    @property
    def row_bytes(self) -> int:
        return state_row_bytes(self.specs)

    def allocate(self) -> StateSlot:
        """Allocates a row, cleared before its first step. Raises AtCapacity."""
        if not self._free:
            raise AtCapacity(
                f"all {self.slots} session rows are taken", "wait for a session to end", self.retry_after_ms
            )
        row = self._free.popleft()
        self._reset.add(row)
        return StateSlot(row, self._lease[row])

    def free(self, slot: StateSlot) -> None:
        self.check_lease(slot)
        self._lease[slot.row] += 1
        self._reset.discard(slot.row)
        self._free.append(slot.row)
        if self._poison:
            self._poison_rows([slot.row])
        else:
            self._zero_row(slot.row)

    def check_lease(self, slot: StateSlot) -> None:
        assert self._lease[slot.row] == slot.lease, f"row {slot.row} was given back: its lease has expired"

    def prepare_rows(self, running: Sequence[StateSlot], size: int | None = None) -> Tensor:
        """Row numbers of a step: (size,) int64 on the device, filled up with the padding row. Rows that run for
        the first time are cleared. Returns the same memory at every step."""
        size = size or len(running)
        assert len(running) <= size <= self.slots + 1, f"{len(running)} sessions in a step of {size} rows"
        for slot in running:
            self.check_lease(slot)
        rows = [slot.row for slot in running]
        assert len(set(rows)) == len(rows), "a session runs twice in one step"
        self._clear(self._reset.intersection(rows))
        return self._index(self._rows, rows + [self.slots] * (size - len(rows)))

    def export_state(self, slot: StateSlot) -> bytes:
        """State of one session as bytes, for another manager of the same state."""
        return b"".join(self.export_parts(slot))

    def export_parts(self, slot: StateSlot) -> list[memoryview]:
        """State of one session, tensor by tensor; tensors in host memory are not copied, and the next step changes
        them."""
        self.check_lease(slot)
        self._clear(self._reset.intersection((slot.row,)))
        return [tensor_bytes(tensor[slot.row]) for tensor in self.tensors.values()]

    def import_state(self, slot: StateSlot, data: bytes) -> None:
        """Restores a session's state; the inverse of `export_state`. Raises ValueError for bytes of another
        size."""
        if len(data) != self.row_bytes:
            raise ValueError(f"{len(data)} bytes of saved state, where a session has {self.row_bytes}")
        ends = list(accumulate(self.sizes, initial=0))
        self.import_parts(slot, [memoryview(data)[start:end] for start, end in pairwise(ends)])

    def import_parts(self, slot: StateSlot, parts: Sequence[BytesLike]) -> None:
        """Restores a session's state; the inverse of `export_parts`. Raises ValueError for parts of other
        sizes."""
        self.check_lease(slot)
        self.check_parts(parts)
        for tensor, part in zip(self.tensors.values(), parts, strict=True):
            copy_into_tensor(tensor[slot.row], part)
        self._reset.discard(slot.row)

    def check_parts(self, parts: Sequence[BytesLike]) -> None:
        """Raises ValueError for parts of other sizes."""
        if (sizes := [len(part) for part in parts]) != self.sizes:
            raise ValueError(f"saved state of {sizes} bytes, where a session has {self.sizes}")

    @property
    def sizes(self) -> list[int]:
        """Bytes of a session's row in each tensor."""
        return [math.prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values()]

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a row is free twice"
        assert not free & self._reset, "a row is free, and waits to be cleared for a session"

    def _clear(self, rows: set[int]) -> None:
        if not rows:
            return
        index = self._index(self._cleared, list(rows))
        for name, spec in self.specs.items():
            if spec.initial_value is not None:
                self.tensors[name].index_fill_(
                    0, self._host[: len(rows)] if spec.on_host else index, spec.initial_value
                )
        self._reset -= rows

    def _zero_row(self, row: int) -> None:
        """Zeroes the tensors that are not cleared for the next session."""
        for name, spec in self.specs.items():
            if spec.initial_value is None:
                self.tensors[name][row].zero_()

    def _index(self, into: Tensor, rows: list[int]) -> Tensor:
        """Copies row numbers to the device, into preallocated memory."""
        self._host.numpy()[: len(rows)] = rows
        into[: len(rows)].copy_(self._host[: len(rows)])
        return into[: len(rows)]

    def _poison_rows(self, rows: list[int]) -> None:
        for tensor in self.tensors.values():
            poison = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
            tensor[rows] = poison
