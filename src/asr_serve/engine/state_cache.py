"""Fixed-size streaming state: rows allocated once, lent to sessions, cleared for each tenant.

A step is told which rows run (`begin`) and reads and writes them in place: no row is gathered, copied or
allocated, and the addresses never change, so that a CUDA graph may be recorded over them.
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
    """A session's row. The lease tells this tenant of the row from the next."""

    row: int
    lease: int


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's, where they lie if that is the host's memory."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def copy_into_tensor(tensor: Tensor, part: BytesLike) -> None:
    """The inverse, into a contiguous tensor of that size."""
    if not tensor.numel():
        return
    into = tensor.detach().view(-1).view(torch.uint8)
    if into.is_cpu:
        into.numpy()[:] = np.frombuffer(part, np.uint8)
    else:
        # Read-only memory torch has no notion of. Of other memory no copy: it is read by the time this returns.
        view = memoryview(part)
        into.copy_(torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8))


def state_row_bytes(specs: Mapping[str, StateSpec]) -> int:
    """What one session's state takes."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


class StateCacheManager:
    """Owns every session's rows of what a model declares; nothing else allocates them.

    `tensors` are by name (slots + 1, *shape), each contiguous. The last row is nobody's: rows that only fill up a
    batch point there. Of who had a row before nothing is left in it: what a session has not written is zero,
    also where it is saved.
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
        """`poison`: what nobody may read holds NaN, or the least number there is, so that a wrong mask shouts."""
        self.specs, self.slots, self.retry_after_ms = dict(specs), slots, retry_after_ms
        self.tensors = {
            name: torch.zeros(slots + 1, *spec.shape, dtype=spec.dtype, device=CPU if spec.on_host else device)
            for name, spec in specs.items()
        }
        self._poison = poison
        self._free = deque(range(slots))
        self._lease = [0] * slots
        self._reset: set[int] = set()
        """Rows that were taken and have not run: they are cleared when they do, all at once."""
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
        """A row that is as good as new. Raises AtCapacity."""
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
        """The rows of a step: (size,) int64 on the device, filled up with the row that is nobody's. Those that run
        for the first time are cleared. It is the same memory at every step."""
        size = size or len(running)
        assert len(running) <= size <= self.slots + 1, f"{len(running)} sessions in a step of {size} rows"
        for slot in running:
            self.check_lease(slot)
        rows = [slot.row for slot in running]
        assert len(set(rows)) == len(rows), "a session runs twice in one step"
        self._clear(self._reset.intersection(rows))
        return self._index(self._rows, rows + [self.slots] * (size - len(rows)))

    def export_state(self, slot: StateSlot) -> bytes:
        """One session as bytes, for another manager of the same state to go on from."""
        return b"".join(self.export_parts(slot))

    def export_parts(self, slot: StateSlot) -> list[memoryview]:
        """The same tensor by tensor; of those in the host's memory not a copy, but what the next step changes."""
        self.check_lease(slot)
        self._clear(self._reset.intersection((slot.row,)))
        return [tensor_bytes(tensor[slot.row]) for tensor in self.tensors.values()]

    def import_state(self, slot: StateSlot, data: bytes) -> None:
        """The inverse of `save`. Raises ValueError for bytes of another size."""
        if len(data) != self.row_bytes:
            raise ValueError(f"{len(data)} bytes of saved state, where a session has {self.row_bytes}")
        ends = list(accumulate(self.sizes, initial=0))
        self.import_parts(slot, [memoryview(data)[start:end] for start, end in pairwise(ends)])

    def import_parts(self, slot: StateSlot, parts: Sequence[BytesLike]) -> None:
        """The inverse of `parts`. Raises ValueError for parts of other sizes."""
        self.check_lease(slot)
        self.check_parts(parts)
        for tensor, part in zip(self.tensors.values(), parts, strict=True):
            copy_into_tensor(tensor[slot.row], part)
        self._reset.discard(slot.row)

    def check_parts(self, parts: Sequence[BytesLike]) -> None:
        """Raises ValueError."""
        if (sizes := [len(part) for part in parts]) != self.sizes:
            raise ValueError(f"saved state of {sizes} bytes, where a session has {self.sizes}")

    @property
    def sizes(self) -> list[int]:
        """Bytes of a session's row of each tensor."""
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
        """Of what the next tenant would not have cleared."""
        for name, spec in self.specs.items():
            if spec.initial_value is None:
                self.tensors[name][row].zero_()

    def _index(self, into: Tensor, rows: list[int]) -> Tensor:
        """Numbers to the device, through memory that is there already."""
        self._host.numpy()[: len(rows)] = rows
        into[: len(rows)].copy_(self._host[: len(rows)])
        return into[: len(rows)]

    def _poison_rows(self, rows: list[int]) -> None:
        for tensor in self.tensors.values():
            bad = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
            tensor[rows] = bad
