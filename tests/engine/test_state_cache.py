"""Rows of streaming state: lent one at a time, cleared for each tenant, never allocated anew; full is said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asr_serve.engine.state_cache import StateCacheManager, StateSlot
from asr_serve.errors import AtCapacity
from asr_serve.models.interfaces import StateSpec

SPECS = {
    "flat": StateSpec((2,)),
    "deep": StateSpec((1, 3), initial_value=-1.0),
    "count": StateSpec((), torch.int64, initial_value=7),
    "window": StateSpec((4,), initial_value=None),
}


def manager(slots: int = 3, **options) -> StateCacheManager:
    return StateCacheManager(SPECS, slots, poison=True, **options)


def row_of(states: StateCacheManager, slot: StateSlot) -> list:
    return [states.tensors[name][slot.row].tolist() for name in ("flat", "deep", "count")]


FRESH = [[0.0, 0.0], [[-1.0] * 3], 7]


def test_a_row_is_cleared_at_the_first_step_of_each_session():
    states = manager(1)
    for _ in range(3):
        slot = states.allocate()
        rows = states.prepare_rows([slot])
        assert row_of(states, slot) == FRESH
        for tensor in states.tensors.values():
            tensor[rows] = 5
        states.prepare_rows([slot])
        assert row_of(states, slot) == [[5, 5], [[5] * 3], 5]
        states.free(slot)


def test_unused_rows_are_poisoned():
    states = manager(2)
    slot = states.allocate()
    states.prepare_rows([slot], 2)
    assert states.tensors["window"].isnan().all(), "what a session has not written, though it runs"
    others = torch.tensor([1 - slot.row, 2])
    assert states.tensors["flat"][others].isnan().all()
    assert (states.tensors["count"][others] == torch.iinfo(torch.int64).min).all()
    states.free(slot)
    assert states.tensors["flat"].isnan().all()


def test_clearing_one_row_leaves_its_neighbours():
    states = manager(2)
    kept = states.allocate()
    states.tensors["flat"][states.prepare_rows([kept])] = 1.0
    states.prepare_rows([states.allocate(), kept])
    assert row_of(states, kept) == [[1, 1], [[-1.0] * 3], 7]


def test_a_step_has_rows_in_order_and_is_padded_with_the_dummy_row():
    states = manager(3)
    slots = [states.allocate() for _ in range(3)]
    assert states.prepare_rows([slots[2], slots[0]], 4).tolist() == [slots[2].row, slots[0].row, 3, 3]
    assert states.prepare_rows([slots[1]]).tolist() == [slots[1].row]
    with pytest.raises(AssertionError, match="twice"):
        states.prepare_rows([slots[1], slots[1]])
    with pytest.raises(AssertionError, match="4 sessions"):
        states.prepare_rows(slots + slots[:1], 3)


class Allocations(TorchDispatchMode):
    """Counts storages that operations hand out and that were none of their arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in flat((args, kwargs))}
        if any(each.untyped_storage().data_ptr() not in known for each in flat(out)):
            self.fresh.append(str(function))
        return out


def flat(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from flat(each)
    elif isinstance(thing, dict):
        yield from flat(list(thing.values()))


def test_leasing_running_and_releasing_rows_allocates_nothing():
    states = StateCacheManager(SPECS, 4)
    addresses = {name: tensor.data_ptr() for name, tensor in states.tensors.items()}
    with Allocations() as found:
        for _ in range(3):
            slots = [states.allocate() for _ in range(4)]
            rows = states.prepare_rows(slots[1:], 4)
            again = states.prepare_rows(slots[:2])
            for slot in slots:
                states.free(slot)
    assert found.fresh == []
    assert rows.data_ptr() == again.data_ptr(), "rows are written where they were, for a graph to read"
    assert {name: tensor.data_ptr() for name, tensor in states.tensors.items()} == addresses
    assert all(tensor.is_contiguous() and len(tensor) == 5 for tensor in states.tensors.values())
    with Allocations() as found:
        torch.zeros(1)
    assert found.fresh, "it counts"


def test_a_saved_session_continues_in_another_cache():
    ours, theirs = manager(2), manager(3)
    slot = ours.allocate()
    rows = ours.prepare_rows([slot])
    for number, tensor in enumerate(ours.tensors.values()):
        tensor[rows] = number + 1
    theirs.allocate()
    other = theirs.allocate()
    theirs.import_state(other, ours.export_state(slot))
    theirs.prepare_rows([other])
    assert row_of(theirs, other) == row_of(ours, slot) == [[1, 1], [[2] * 3], 3]
    assert theirs.tensors["window"][other.row].tolist() == [4.0] * 4
    for wrong in (b"", ours.export_state(slot)[:-1], ours.export_state(slot) + b"x"):
        with pytest.raises(ValueError, match=f"a session has {ours.row_bytes}"):
            theirs.import_state(other, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_every_dtype_is_saved(dtype: torch.dtype):
    specs = {"row": StateSpec((3, 2), dtype), "one": StateSpec((), dtype), "none": StateSpec((0, 2), dtype)}
    states = StateCacheManager(specs, 2)
    slot, other = states.allocate(), states.allocate()
    states.prepare_rows([slot, other])
    states.tensors["row"][slot.row] = torch.arange(6).view(3, 2).to(dtype)
    states.tensors["one"][slot.row] = 1
    states.import_state(other, states.export_state(slot))
    for tensor in states.tensors.values():
        assert torch.equal(tensor[other.row], tensor[slot.row])
    assert states.tensors["row"][other.row].any()


def test_a_session_that_never_ran_is_saved_fresh():
    states = manager(2)
    slot, other = states.allocate(), states.allocate()
    states.import_state(other, states.export_state(slot))
    assert row_of(states, other) == FRESH


def test_a_saved_state_holds_nothing_of_an_earlier_session():
    states, others = StateCacheManager(SPECS, 1), StateCacheManager(SPECS, 1)
    for _ in range(2):
        slot, never = states.allocate(), others.allocate()
        rows = states.prepare_rows([slot])
        others.prepare_rows([never])
        assert states.export_state(slot) == others.export_state(never), "nothing was written yet"
        for number, tensor in enumerate(states.tensors.values()):
            tensor[rows] = 3 + number
        assert states.export_state(slot) != others.export_state(never)
        states.free(slot)
        assert not states.tensors["window"].any(), "who is gone is forgotten"
        others.free(never)


def test_a_full_cache_refuses_with_a_retry_time():
    states = manager(2, retry_after_ms=250)
    slots = [states.allocate(), states.allocate()]
    with pytest.raises(AtCapacity, match="250 ms") as refused:
        states.allocate()
    assert refused.value.retry_after_ms == 250
    states.free(slots[0])
    assert states.allocate().row == slots[0].row


@pytest.mark.parametrize(
    "use",
    [
        StateCacheManager.free,
        StateCacheManager.check_lease,
        StateCacheManager.export_state,
        lambda s, x: s.prepare_rows([x]),
        lambda s, x: s.import_state(x, bytes(s.row_bytes)),
    ],
)
def test_an_expired_lease_gives_no_access(use):
    states = manager(1)
    old = states.allocate()
    states.free(old)
    new = states.allocate()
    assert (new.row, new.lease) == (old.row, old.lease + 1)
    with pytest.raises(AssertionError, match="expired"):
        use(states, old)
    states.check_lease(new)
    assert states.used == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60))
def test_used_and_free_rows_add_up(choices):
    states, lent = manager(4), []
    for choice in choices:
        if choice < 6 and len(lent) < 4:
            slot = states.allocate()
            assert slot.row not in {s.row for s in lent}
            lent.append(slot)
        elif lent:
            states.free(lent.pop(choice % len(lent)))
        assert states.used == len(lent)
        states.check()
    for slot in lent:
        states.check_lease(slot)


def test_the_check_finds_a_row_that_is_free_twice():
    states = manager(2)
    states._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        states.check()
