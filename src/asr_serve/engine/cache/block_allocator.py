"""Allocator of the arena and of the file: free extents that begin and end on blocks."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from asr_serve.transfer.disk import BLOCK


def round_up_to_block(nbytes: int) -> int:
    """Rounds up to whole blocks; 0 bytes take one block too."""
    return max(1, -(-nbytes // BLOCK)) * BLOCK


class BlockExtent(NamedTuple):
    at: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.at + self.nbytes


class BlockAllocator:
    """Free extents in order, no two of them adjacent. Sizes are whole blocks."""

    def __init__(self, nbytes: int, free: Sequence[BlockExtent] | None = None) -> None:
        self.nbytes = nbytes
        self._free = list(free) if free is not None else [BlockExtent(0, nbytes)] * (nbytes > 0)
        self.free = sum(hole.nbytes for hole in self._free)

    @property
    def used(self) -> int:
        return self.nbytes - self.free

    def copy(self) -> BlockAllocator:
        """Copy on which to try out frees and allocations."""
        return BlockAllocator(self.nbytes, self._free)

    def allocate(self, nbytes: int) -> BlockExtent | None:
        """Allocates one extent, from the smallest hole that is large enough. None: there is none."""
        fits = [(hole.nbytes, hole.at) for hole in self._free if hole.nbytes >= nbytes]
        return self.allocate_at(min(fits)[1], nbytes) if fits else None

    def allocate_at(self, at: int, nbytes: int) -> BlockExtent:
        """Allocates from the middle of a hole, or all of it."""
        index = bisect.bisect_right(self._free, (at, self.nbytes)) - 1
        assert index >= 0, "nothing is free there"
        hole = self._free[index]
        assert hole.at <= at, "nothing is free there"
        assert at + nbytes <= hole.end, "so much is not free there"
        remaining = (BlockExtent(hole.at, at - hole.at), BlockExtent(at + nbytes, hole.end - at - nbytes))
        self._free[index : index + 1] = [part for part in remaining if part.nbytes]
        self.free -= nbytes
        return BlockExtent(at, nbytes)

    def allocate_fragments(self, nbytes: int) -> tuple[BlockExtent, ...] | None:
        """Allocates one extent if possible, else as few as the largest holes allow. None: too little is free."""
        whole = self.allocate(nbytes)
        if whole is not None:
            return (whole,)
        if nbytes > self.free:
            return None
        extents: list[BlockExtent] = []
        for hole in sorted(self._free, key=lambda hole: hole.nbytes, reverse=True):
            extents.append(self.allocate_at(hole.at, min(nbytes, hole.nbytes)))
            nbytes -= extents[-1].nbytes
            if not nbytes:
                break
        return tuple(extents)

    def free_extent(self, extent: BlockExtent) -> BlockExtent:
        """Frees the extent; returns the hole that it is now part of."""
        index = bisect.bisect_left(self._free, extent)
        first, last, hole = index, index, extent
        if index < len(self._free):
            after = self._free[index]
            assert extent.end <= after.at, "given twice"
            if extent.end == after.at:
                hole, last = BlockExtent(hole.at, hole.nbytes + after.nbytes), index + 1
        if index > 0:
            before = self._free[index - 1]
            assert before.end <= extent.at, "given twice"
            if before.end == extent.at:
                hole, first = BlockExtent(before.at, before.nbytes + hole.nbytes), index - 1
        self._free[first:last] = [hole]
        self.free += extent.nbytes
        return hole

    def check_invariants(self) -> None:
        assert self.free == sum(hole.nbytes for hole in self._free)
        for hole in self._free:
            assert hole.nbytes > 0
            assert hole.at % BLOCK == hole.nbytes % BLOCK == 0
            assert hole.end <= self.nbytes
        assert all(a.end < b.at for a, b in zip(self._free, self._free[1:], strict=False))
