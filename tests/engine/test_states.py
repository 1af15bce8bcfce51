"""Rows of streaming state: lent once at a time, cleared for each tenant, full is an answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.engine.states import Slot, StateCacheManager
from asr_serve.errors import AtCapacity


def manager(rows: int = 3) -> StateCacheManager:
    """Two tensors of state, poisoned: a row that is not cleared would show."""
    return StateCacheManager((torch.full((rows, 2), torch.nan), torch.full((rows, 1, 3), torch.nan)))


def test_a_row_is_cleared_for_each_tenant():
    states = manager(1)
    for _ in range(3):
        slot = states.take()
        for tensor in states.load([slot]):
            assert torch.equal(tensor, torch.zeros_like(tensor))
        states.save([slot], (torch.full((1, 2), torch.nan), torch.full((1, 1, 3), torch.nan)))
        states.give(slot)


def test_what_is_saved_is_loaded_in_any_order():
    states = manager(4)
    slots = [states.take() for _ in range(4)]
    states.save(slots[1:3], (torch.tensor([[1.0, 1], [2, 2]]), torch.tensor([[[1.0] * 3], [[2.0] * 3]])))
    flat, deep = states.load([slots[2], slots[0], slots[1]])
    assert flat.tolist() == [[2, 2], [0, 0], [1, 1]]
    assert deep.tolist() == [[[2, 2, 2]], [[0, 0, 0]], [[1, 1, 1]]]


def test_what_is_loaded_is_a_copy():
    states = manager(1)
    slot = states.take()
    states.load([slot])[0].fill_(torch.nan)
    assert states.load([slot])[0].tolist() == [[0, 0]]


def test_clearing_one_row_leaves_its_neighbours():
    states = manager(2)
    kept = states.take()
    states.save([kept], (torch.ones(1, 2), torch.ones(1, 1, 3)))
    states.give(states.take())
    states.take()
    assert states.load([kept])[0].tolist() == [[1, 1]]


def test_full_says_when_to_try_again():
    states = StateCacheManager((torch.zeros(2, 1),), retry_after_ms=250)
    slots = [states.take(), states.take()]
    with pytest.raises(AtCapacity, match="250 ms") as refused:
        states.take()
    assert refused.value.retry_after_ms == 250
    states.give(slots[0])
    assert states.take().row == slots[0].row


@pytest.mark.parametrize("use", [StateCacheManager.give, StateCacheManager.expect, lambda s, x: s.load([x])])
def test_an_expired_lease_opens_nothing(use):
    states = manager(1)
    old = states.take()
    states.give(old)
    new = states.take()
    assert (new.row, new.lease) == (old.row, old.lease + 1)
    with pytest.raises(AssertionError, match="expired"):
        use(states, old)
    states.expect(new)
    assert states.used == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60))
def test_used_and_free_rows_are_all_rows(choices):
    states, lent = manager(4), []
    for choice in choices:
        if choice < 6 and len(lent) < 4:
            slot = states.take()
            assert slot.row not in {s.row for s in lent}
            lent.append(slot)
        elif lent:
            states.give(lent.pop(choice % len(lent)))
        assert states.used == len(lent)
        states.check()
    for slot in lent:
        states.expect(slot)


def test_the_check_sees_a_row_that_is_free_twice():
    states = manager(2)
    states._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        states.check()


def test_a_slot_is_plain_data():
    assert Slot(3, 1) == (3, 1)
