"""Extents against a map of every byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.transfer.roads import extents
from asr_serve.transfer.roads.extents import ALIGN, Extents

ORDERS = st.lists(st.one_of(st.integers(1, 6 * ALIGN), st.integers(-8, -1)), max_size=200)
"""How much to take; or, below 0, which of what was taken to give back."""


@settings(max_examples=200, deadline=None)
@given(nbytes=st.integers(0, 20 * ALIGN), orders=ORDERS)
def test_nothing_is_lent_twice_and_nothing_is_lost(nbytes: int, orders: list[int]) -> None:
    memory = Extents(nbytes)
    owners: list[int | None] = [None] * (nbytes // ALIGN)
    taken: dict[int, int] = {}
    for order in orders:
        if order < 0:
            if taken:
                at = list(taken)[order % len(taken)]
                blocks = taken.pop(at)
                memory.give(at)
                owners[at // ALIGN : at // ALIGN + blocks] = [None] * blocks
        else:
            blocks = -(-order // ALIGN)
            gaps = "".join(" " if owner is None else "x" for owner in owners)
            at = memory.take(order)
            assert (at is None) == (" " * blocks not in gaps), "room there is, or there is not"
            if at is not None:
                assert at % ALIGN == 0
                assert set(owners[at // ALIGN : at // ALIGN + blocks]) == {None}
                owners[at // ALIGN : at // ALIGN + blocks] = [at] * blocks
                taken[at] = blocks
        memory.check()
        assert memory.free_bytes == owners.count(None) * ALIGN
    for at in taken:
        memory.give(at)
    memory.check()
    assert memory.take(max(1, nbytes // ALIGN * ALIGN)) == (0 if nbytes >= ALIGN else None)


def test_the_smallest_gap_that_is_enough_is_taken() -> None:
    memory = Extents(10 * ALIGN)
    first, _, second, _ = (memory.take(blocks * ALIGN) for blocks in (3, 1, 2, 1))
    memory.give(first)
    memory.give(second)
    assert memory.take(2 * ALIGN) == second
    assert memory.take(3 * ALIGN) == first


def test_there_are_at_most_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "MOST_LENT", 2)
    memory = Extents(10 * ALIGN)
    assert [memory.take(1) for _ in range(3)] == [0, ALIGN, None]
    memory.give(0)
    assert memory.take(1) == 0
