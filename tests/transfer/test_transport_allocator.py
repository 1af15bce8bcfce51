"""Extents against a map of every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.transfer.transports import allocator
from asr_serve.transfer.transports.allocator import ALIGN, BufferAllocator

ORDERS = st.lists(st.one_of(st.integers(1, 6 * ALIGN), st.integers(-8, -1)), max_size=200)
"""How much to take; or, below 0, which of what was taken to give back."""


@settings(max_examples=200, deadline=None)
@given(nbytes=st.integers(0, 20 * ALIGN), orders=ORDERS)
def test_regions_are_never_leased_twice_or_lost(nbytes: int, orders: list[int]) -> None:
    memory = BufferAllocator(nbytes)
    owners: list[int | None] = [None] * (nbytes // ALIGN)
    taken: dict[int, int] = {}
    for order in orders:
        if order < 0:
            if taken:
                at = list(taken)[order % len(taken)]
                blocks = taken.pop(at)
                memory.free_at(at)
                owners[at // ALIGN : at // ALIGN + blocks] = [None] * blocks
        else:
            blocks = -(-order // ALIGN)
            gaps = "".join(" " if owner is None else "x" for owner in owners)
            at = memory.allocate(order)
            assert (at is None) == (" " * blocks not in gaps), "room there is, or there is not"
            if at is not None:
                assert at % ALIGN == 0
                assert set(owners[at // ALIGN : at // ALIGN + blocks]) == {None}
                owners[at // ALIGN : at // ALIGN + blocks] = [at] * blocks
                taken[at] = blocks
        memory.check_invariants()
        assert memory.free_bytes == owners.count(None) * ALIGN
    for at in taken:
        memory.free_at(at)
    memory.check_invariants()
    assert memory.allocate(max(1, nbytes // ALIGN * ALIGN)) == (0 if nbytes >= ALIGN else None)


def test_the_smallest_gap_that_is_enough_is_taken() -> None:
    memory = BufferAllocator(10 * ALIGN)
    first, _, second, _ = (memory.allocate(blocks * ALIGN) for blocks in (3, 1, 2, 1))
    memory.free_at(first)
    memory.free_at(second)
    assert memory.allocate(2 * ALIGN) == second
    assert memory.allocate(3 * ALIGN) == first


def test_the_number_of_regions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "MAX_ALLOCATIONS", 2)
    memory = BufferAllocator(10 * ALIGN)
    assert [memory.allocate(1) for _ in range(3)] == [0, ALIGN, None]
    memory.free_at(0)
    assert memory.allocate(1) == 0
