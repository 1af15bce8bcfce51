"""Pages are never lost, never lent twice, and copied before a shared one is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from asr_serve.engine.cache.page_pool import PagePool

PAGES = 24


class Tables(RuleBasedStateMachine):
    """Block tables that take, share, fork and give pages, and a cache that keeps some, beside a plain count of who
    holds what."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.pool.reclaim, self.pool.on_free = self.give_up, self.freed
        self.holders: Counter[int] = Counter()
        self.kept: list[int] = []
        self.told: list[int] = []

    def give_up(self, count: int) -> int:
        """As a cache does: of what nobody else holds, the first that was kept."""
        gone = [page for page in self.kept if not self.holders[page]][:count]
        self.kept = [page for page in self.kept if page not in gone]
        assert self.pool.drop_cache_reference(gone) == gone
        return len(gone)

    def freed(self, pages: Sequence[int]) -> None:
        self.told += pages

    @rule(target=tables, share_of_free=st.floats(0, 1))
    def take(self, share_of_free: float) -> list[int]:
        count = int(self.pool.free_count * share_of_free)
        really = PAGES - 1 - len(set(self.kept) | set(+self.holders))
        before = len(self.kept)
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert before - len(self.kept) == max(0, count - really), "the cache gave up more than it had to"
        assert not set(pages) & set(self.kept), "a page that is kept was lent again"
        assert not set(pages) & set(+self.holders), "a page that is held was lent again"
        self.holders.update(pages)
        return pages

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> list[int]:
        self.pool.share(table)
        self.holders.update(table)
        return list(table)

    @rule(table=consumes(tables))
    def give(self, table: list[int]) -> None:
        expected = [page for page in table if self.holders[page] == 1 and page not in self.kept]
        self.told.clear()
        assert self.pool.free_pages(table) == self.told == expected
        self.holders.subtract(table)

    @rule(table=tables)
    def keep(self, table: list[int]) -> None:
        new = [page for page in table if page not in self.kept]
        self.pool.add_cache_reference(new)
        self.kept += new

    @rule(target=tables, count=st.integers(0, 4))
    def find(self, count: int) -> list[int]:
        """What is kept, whoever else holds it."""
        self.pool.share(self.kept[:count])
        self.holders.update(self.kept[:count])
        return self.kept[:count]

    @rule(count=st.integers(0, 4))
    def forget(self, count: int) -> None:
        gone, self.kept = self.kept[:count], self.kept[count:]
        expected = [page for page in gone if not self.holders[page]]
        self.told.clear()
        assert self.pool.drop_cache_reference(gone) == self.told == expected

    @rule(target=tables, table=consumes(tables), data=st.data())
    def write(self, table: list[int], data: st.DataObject) -> list[int]:
        """Make one page of a table its own: nobody else's page changes."""
        if not table:
            return table
        index = data.draw(st.integers(0, len(table) - 1))
        old = table[index]
        shared = self.holders[old] + (old in self.kept) > 1
        if shared and not self.pool.free_count:
            return table
        page, copy_from = self.pool.copy_on_write(table, index)
        assert copy_from == (old if shared else None)
        assert (page == old) is not shared
        assert page not in self.kept
        if shared:
            assert not self.holders[page]
            self.holders[old] -= 1
            self.holders[page] = 1
        assert self.holders[page] == 1
        return [*table[:index], page, *table[index + 1 :]]

    @invariant()
    def nothing_is_lost(self) -> None:
        held = +self.holders
        assert self.pool.used_count == len(held)
        assert self.pool.free_count + self.pool.used_count == PAGES - 1
        assert self.pool.cached_count == len(self.kept)
        assert self.pool.reclaimable_count == len(set(self.kept) - set(held))
        assert 0 not in held, "page 0 is scratch and is never lent"
        self.pool.check()


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("misuse", "match"),
    [
        (lambda pool, pages: pool.free_pages(pages[:1]), "given back twice"),
        (lambda pool, pages: pool.share([2]), "is free"),
        (lambda pool, pages: pool.add_cache_reference([2]), "is free"),
        (lambda pool, pages: pool.allocate(-1), None),
        (lambda pool, pages: pool.allocate(4), None),
        (lambda pool, pages: pool.free_pages([0]), None),
    ],
    ids=["free twice", "share a free page", "cache a free page", "allocate -1", "allocate too many", "free page 0"],
)
def test_misuse_raises_and_changes_nothing(misuse, match):
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free_pages(pages)
    with pytest.raises(AssertionError, match=match):
        misuse(pool, pages)
    assert (pool.free_count, pool.used_count) == (3, 0)
    pool.check()


def test_page_0_is_never_allocated():
    pool = PagePool(8)
    assert 0 not in pool.allocate(pool.free_count)


def test_a_pool_needs_a_page_beside_the_scratch_page():
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)


@pytest.mark.parametrize("wrong", ["_free", "_reclaimable", "_cached"])
def test_check_finds_wrong_counts_and_a_page_both_free_and_held(wrong):
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    if wrong == "_free":
        pool._free.append(page)
    else:
        setattr(pool, wrong, 1)
    with pytest.raises(AssertionError):
        pool.check()


def test_pages_that_only_the_cache_holds_cannot_be_freed_by_a_caller():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.add_cache_reference(pages)
    assert (pool.free_pages(pages), pool.free_count, pool.used_count) == ([], 3, 0)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.free_pages(pages[:1])
    with pytest.raises(AssertionError, match="kept already"):
        pool.add_cache_reference(pages)
    pool.check()
    assert (pool.drop_cache_reference(pages), pool.free_count, pool.reclaimable_count) == (pages, 3, 0)
    with pytest.raises(AssertionError, match="not kept"):
        pool.drop_cache_reference(pages)
    pool.check()


@pytest.mark.parametrize("reclaim", [None, lambda count: 0], ids=["nobody to ask", "who gives up too few"])
def test_a_cache_that_does_not_reclaim_what_counts_as_free_is_an_error(reclaim):
    pool = PagePool(4)
    pool.reclaim = reclaim
    pages = pool.allocate(3)
    pool.add_cache_reference(pages)
    pool.free_pages(pages)
    assert pool.free_count == 3
    with pytest.raises(AssertionError):
        pool.allocate(1)
