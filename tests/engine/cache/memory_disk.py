"""A disk in memory that does what disks do: out of order, late, not at all, or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from asr_serve.errors import DiskFailed
from asr_serve.transfer.disk import BLOCK

Extents = Sequence[tuple[int, memoryview]]


class MemoryDisk:
    """Asserts what a disk may expect: whole blocks, one call at a time, and that nobody touches memory or place of
    what is under way."""

    name = "memory"

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.nbytes, self.data = nbytes, bytearray(nbytes)
        self.between: Callable[[], None] = lambda: None
        """Called while something is under way."""
        self.failing_reads = self.failing_writes = self.torn_writes = 0
        """So many of the next ones."""
        self.reads = self.writes = 0
        self.written: list[tuple[int, int]] = []
        self.closed = False
        self._order = random.Random(seed)
        self._busy = False

    def write(self, extents: Extents) -> Iterator[int]:
        self.writes += 1
        came = [bytes(memory) for _, memory in extents]
        for index in self._each(extents):
            at, memory = extents[index]
            assert bytes(memory) == came[index], "written to while it was under way"
            if self._once("failing_writes"):
                raise DiskFailed("a disk that would not write", "one that does")
            half = len(memory) // 2 if self._once("torn_writes") else len(memory)
            self.data[at : at + half] = memory[:half]
            self.written.append((at, len(memory)))
            yield index

    def read(self, extents: Extents) -> Iterator[int]:
        self.reads += 1
        there = [bytes(self.data[at : at + len(memory)]) for at, memory in extents]
        for _, memory in extents:
            memory[:] = b"\xee" * len(memory)
        for index in self._each(extents):
            at, memory = extents[index]
            assert bytes(self.data[at : at + len(memory)]) == there[index], "overwritten while it was under way"
            assert bytes(memory) == b"\xee" * len(memory), "written to while it was under way"
            if self._once("failing_reads"):
                raise DiskFailed("a disk that would not read", "one that does")
            memory[:] = there[index]
            yield index

    def close(self) -> None:
        self.closed = True

    def _each(self, extents: Extents) -> Iterator[int]:
        assert not self._busy, "two calls at a time"
        assert not self.closed
        for at, memory in extents:
            assert at % BLOCK == len(memory) % BLOCK == 0
            assert at >= 0
            assert at + len(memory) <= self.nbytes
        order = list(range(len(extents)))
        self._order.shuffle(order)
        self._busy = True
        try:
            for index in order:
                self.between()
                yield index
        finally:
            self._busy = False

    def _once(self, fault: str) -> bool:
        left = getattr(self, fault)
        setattr(self, fault, max(0, left - 1))
        return bool(left)
