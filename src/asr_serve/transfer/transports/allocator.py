"""Allocator of a memory buffer: extents are allocated, freed, and merged with their neighbours.

Best fit, offsets on multiples of ALIGN. Bounded: at most MAX_ALLOCATIONS at a time. Not thread-safe.
"""

from __future__ import annotations

import bisect

ALIGN = 64
"""Alignment: a cache line, and best for vector instructions."""
MAX_ALLOCATIONS = 4_096


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class BufferAllocator:
    """Allocator of `nbytes`, all free at first. A remainder under ALIGN at the end is never allocated."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []  # (at, bytes), by `at`
        self._allocated: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.nbytes - sum(self._allocated.values())

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes`, 1 or more, and returns their offset; None when no gap is large enough."""
        assert nbytes > 0
        needed = rounded(nbytes)
        fits = [(length, at) for at, length in self._free if length >= needed]
        if not fits or len(self._allocated) == MAX_ALLOCATIONS:
            return None
        length, at = min(fits)
        i = bisect.bisect_left(self._free, (at, 0))
        self._free[i : i + 1] = [(at + needed, length - needed)] if length > needed else []
        self._allocated[at] = needed
        return at

    def free_at(self, at: int) -> None:
        """Frees an extent that `allocate` returned, and merges the gap with its neighbours."""
        length = self._allocated.pop(at)
        i = bisect.bisect_left(self._free, (at, 0))
        if i < len(self._free) and self._free[i][0] == at + length:
            length += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == at:
            i -= 1
            before, gap = self._free.pop(i)
            at, length = before, gap + length
        self._free.insert(i, (at, length))

    def check_invariants(self) -> None:
        """Asserts that every byte is free or allocated, and that no two gaps touch."""
        at = 0
        gap_before = False
        for start, length, gap in sorted(
            [(*each, True) for each in self._free] + [(*each, False) for each in self._allocated.items()]
        ):
            assert start == at, f"{at} to {start} is nobody's"
            assert length > 0
            assert length % ALIGN == 0
            assert not (gap and gap_before), f"two gaps touch at {start}"
            at, gap_before = start + length, gap
        assert at == self.nbytes
