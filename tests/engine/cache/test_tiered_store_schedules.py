"""Tiers against a dictionary, under any order of what callers and the disk do."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_disk import MemoryDisk

from asr_serve.engine.cache import TieredStore
from asr_serve.engine.cache.block_allocator import BlockAllocator, BlockExtent
from asr_serve.engine.cache.store_entry import StoreEntry
from asr_serve.transfer.disk import BLOCK

HOST, FILE = 9 * BLOCK, 16 * BLOCK
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
SIZES = st.sampled_from(
    [[], [1, 0, 5], [BLOCK], [2 * BLOCK - 70, 60], [3 * BLOCK - 1], [BLOCK, 3 * BLOCK], [9 * BLOCK]]
)
KEEP = st.booleans()
Later = tuple[str, bytes, list[int], bool]
WRONG = st.tuples(
    st.sampled_from(["nothing", "nothing", "failing_reads", "failing_writes", "torn_writes", "a bit"]),
    st.integers(0, FILE - 1),
    st.integers(0, 7),
)
LATER = st.lists(st.tuples(st.sampled_from(["put", "drop", "get"]), NAMES, SIZES, KEEP), max_size=3)
STEPS = 200
"""More than any schedule here needs until nothing is left to do."""


class Version:
    """What was put under a name once."""

    def __init__(self, parts: list[bytes], keep: bool) -> None:
        self.parts, self.keep = parts, keep
        self.excused = False
        """It may be lost: the disk did wrong while it was there, or it was dropped."""


class Asked:
    """A get. What it is told must be what lay there when it asked, or, for a reason, nothing."""

    def __init__(self, version: Version | None) -> None:
        self.version, self.told = version, 0
        self.views: list[memoryview] | None = None

    def done(self, parts: list[memoryview] | None) -> None:
        self.told += 1
        assert self.told == 1
        if parts is None:
            assert self.version is None or self.version.excused or not self.version.keep
            return
        assert self.version is not None
        self.views = parts
        self.check()

    def check(self) -> None:
        """Also while others come and go, what was given stays as it is."""
        if self.views is not None:
            assert self.version is not None
            assert [bytes(view) for view in self.views] == self.version.parts


class Schedules(RuleBasedStateMachine):
    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk(FILE)
        self.tiers = TieredStore(HOST, lambda: self.disk, key=self.key, threads=False)
        self.shelves = self.tiers._index
        self.there: dict[bytes, Version] = {}
        self.asked: list[Asked] = []
        self.later: list[Later] = []
        self.disk.between = self.between
        self.numbers = random.Random(0)

    def content(self, sizes: list[int]) -> list[bytes]:
        return [self.numbers.randbytes(size) for size in sizes]

    # --- what callers do ----------------------------------------------------------------------------

    def do_put(self, name: bytes, sizes: list[int], keep: bool) -> None:
        version = Version(self.content(sizes), keep)
        version.excused = self.disk_may_lose
        self.do_drop(name, False)
        held = any(one.keep for one in self.there.values()) or self.looking or self.disk._busy
        if self.tiers.put(name, version.parts, pinned=keep):
            self.there[name] = version
        else:
            assert name not in self.tiers
            assert held, "nothing was in its way"

    def do_drop(self, name: bytes, call: bool = True) -> None:
        if name in self.there:
            self.there.pop(name).excused = True
        if call:
            self.tiers.drop(name)
            assert name not in self.tiers

    def do_get(self, name: bytes) -> None:
        asked = Asked(self.there.get(name))
        self.asked.append(asked)
        self.tiers.get(name, asked.done)

    def do_let_go(self, index: int) -> None:
        seen = [asked for asked in self.asked if asked.views]
        if seen:
            seen[index % len(seen)].views = None

    @property
    def disk_may_lose(self) -> bool:
        """Whether it will do wrong with what is, or comes, there; it may do so within the step in which that comes."""
        return bool(self.disk.failing_reads or self.disk.torn_writes)

    @property
    def looking(self) -> bool:
        return any(asked.views is not None for asked in self.asked)

    def excuse(self) -> None:
        for version in self.there.values():
            version.excused = True

    @rule(name=NAMES, sizes=SIZES, keep=KEEP)
    def write(self, name: bytes, sizes: list[int], keep: bool) -> None:
        self.do_put(name, sizes, keep)

    @rule(name=NAMES)
    def drop(self, name: bytes) -> None:
        self.do_drop(name)

    @precondition(lambda self: self.there)
    @rule(index=st.integers(0, 5), look=st.booleans())
    def get(self, index: int, look: bool) -> None:
        self.do_get(sorted(self.there)[index % len(self.there)])
        if not look:
            self.asked[-1].views = None

    @rule(wake=st.lists(NAMES, min_size=1, max_size=4), wrong=WRONG, later=LATER)
    def sink(self, wake: list[bytes], wrong: tuple[str, int, int], later: list[Later]) -> None:
        """All that can goes to the file, and out of memory; some are asked for, and others come meanwhile."""
        for _ in range(2):
            self.do_put(b"large", [HOST], False)
            self.work_until_nothing_is_left()
        self.do_drop(b"large")
        for name in wake:
            self.do_get(name)
        self.go_wrong(wrong)
        self.work(later)

    @rule(index=st.integers(0, 5))
    def let_go(self, index: int) -> None:
        self.do_let_go(index)

    @precondition(lambda self: self.looking)
    @rule()
    def let_go_of_all(self) -> None:
        for asked in self.asked:
            asked.views = None

    # --- what the disk does, and what happens meanwhile ---------------------------------------------

    @rule(wrong=WRONG, later=LATER)
    def work_on(self, wrong: tuple[str, int, int], later: list[Later]) -> None:
        self.go_wrong(wrong)
        self.work(later)

    def work(self, later: list[Later]) -> None:
        self.later = later[::-1]
        if not self.tiers.run_disk_once() and not self.looking:
            assert all(asked.told for asked in self.asked), "there is nothing to do, and somebody waits"

    @rule()
    def work_until_nothing_is_left(self) -> None:
        for _ in range(STEPS):
            if not self.tiers.run_disk_once():
                return
        raise AssertionError("it never comes to an end")

    def between(self) -> None:
        if not self.later:
            return
        what, name, sizes, keep = self.later.pop()
        if what == "put":
            self.do_put(name, sizes, keep)
        elif what == "drop":
            self.do_drop(name)
        else:
            self.do_get(name)

    def go_wrong(self, wrong: tuple[str, int, int]) -> None:
        what, at, bit = wrong
        if what == "nothing" or not self.in_file:
            return
        if what == "a bit":
            entry = self.in_file[at % len(self.in_file)]
            (extent, *_) = entry.file.extents
            self.disk.data[extent.at + at % extent.nbytes] ^= 1 << bit
            self.there[entry.name].excused = True
            return
        setattr(self.disk, what, 1)
        if what != "failing_writes":  # which is no excuse: it is still in memory
            self.excuse()

    @property
    def in_file(self) -> list[StoreEntry]:
        return [entry for entry in self.shelves.entries.values() if entry.file is not None]

    # --- what always holds --------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.shelves.reclaim_returned()
        self.shelves.check_invariants()
        if self.disk_may_lose:
            self.excuse()

    @invariant()
    def nothing_is_there_that_was_not_put(self) -> None:
        for name in (b"a", b"b", b"c", b"d", b"large"):
            if name in self.tiers:
                assert name in self.there
            elif name in self.there:
                version = self.there[name]
                assert version.excused or not version.keep, "lost, and it was to be kept"

    @invariant()
    def bounds_hold(self) -> None:
        beside = self.shelves.reserve
        assert self.shelves.nbytes()["host"] - (beside[0].nbytes if beside else 0) <= HOST
        assert self.shelves.nbytes()["disk"] <= FILE

    @invariant()
    def what_was_given_stays(self) -> None:
        for asked in self.asked:
            asked.check()

    def teardown(self) -> None:
        for asked in self.asked:
            asked.views = None
        for _ in range(STEPS):
            if not self.tiers.run_disk_once():
                break
            for asked in self.asked:
                asked.views = None
        else:
            raise AssertionError("it never comes to an end")
        assert all(asked.told for asked in self.asked)
        for name in list(self.there):
            self.do_drop(name)
        self.shelves.reclaim_returned()
        assert self.shelves.nbytes() == {"host": 0, "disk": 0}
        assert self.shelves.count() == {"host": 0, "disk": 0}
        self.tiers.close()
        assert self.disk.closed


class SealedSchedules(Schedules):
    key = bytes(range(32))


BUSY = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_schedule() -> None:
    _run(Schedules)


@pytest.mark.slow
def test_any_schedule_of_what_is_encrypted() -> None:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    _run(SealedSchedules)


def _run(machine: type[Schedules]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=BUSY)


class Blocks(RuleBasedStateMachine):
    """`Extents` against the set of blocks that are free."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.extents = BlockAllocator(self.SIZE * BLOCK)
        self.free = set(range(self.SIZE))
        self.taken: list[BlockExtent] = []

    def blocks(self, extent: BlockExtent) -> set[int]:
        return set(range(extent.at // BLOCK, extent.end // BLOCK))

    def runs(self) -> list[int]:
        """Lengths of what is free in one piece."""
        line = "".join("." if block in self.free else "#" for block in range(self.SIZE))
        return [len(run) for run in line.split("#") if run]

    def took(self, extents: tuple[BlockExtent, ...], blocks: int) -> None:
        assert sum(extent.nbytes for extent in extents) == blocks * BLOCK
        for extent in extents:
            assert self.blocks(extent) <= self.free
            self.free -= self.blocks(extent)
            self.taken.append(extent)

    @rule(blocks=st.integers(1, 8))
    def take(self, blocks: int) -> None:
        extent = self.extents.allocate(blocks * BLOCK)
        assert (extent is None) == (max(self.runs(), default=0) < blocks)
        if extent is not None:
            self.took((extent,), blocks)

    @rule(blocks=st.integers(1, 12))
    def take_pieces(self, blocks: int) -> None:
        extents = self.extents.allocate_fragments(blocks * BLOCK)
        assert (extents is None) == (len(self.free) < blocks)
        if extents is not None:
            self.took(extents, blocks)

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0, 23))
    def give(self, index: int) -> None:
        extent = self.taken.pop(index % len(self.taken))
        hole = self.extents.free_extent(extent)
        self.free |= self.blocks(extent)
        assert self.blocks(extent) <= self.blocks(hole) <= self.free
        assert hole.at // BLOCK - 1 not in self.free
        assert hole.end // BLOCK not in self.free

    @invariant()
    def books_are_right(self) -> None:
        self.extents.check_invariants()
        assert self.extents.free == len(self.free) * BLOCK


Blocks.TestCase.settings = settings(max_examples=60, deadline=None)
TestExtents = Blocks.TestCase
