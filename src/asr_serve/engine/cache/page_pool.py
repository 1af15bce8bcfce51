"""Page pool for decoder keys and values: reference counts only; the tensors belong to the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Fixed number of pages with reference counts.

    Page 0 is never allocated: rows that only pad a batch write and read there. `allocate` returns pages with one
    reference each, `share` adds one, `free_pages` drops one; a page without references is free.

    One of a page's references may be the prefix cache's: `add_cache_reference` adds it, `drop_cache_reference`
    drops it. A page that only the cache references counts as free: `allocate` has the cache evict as many as it
    needs. Sharing such a page leaves one less free, as allocating one does.
    """

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, page 0 being scratch; came {pages}")
        self.pages = pages
        self.reclaim: Callable[[int], int] | None = None
        """Callback of the cache: evicts at least so many pages of those that only the cache references, if there
        are; returns how many became free."""
        self.on_free: Callable[[Sequence[int]], None] | None = None
        """Called with pages that became free, so that tests may fill them with poison."""
        # The page freed last is allocated first: it may still be in the processor's cache, and an engine
        # under little load never touches the rest of its memory.
        self._free = list(range(pages - 1, 0, -1))
        self._references = [0] * pages
        self._in_cache = bytearray(pages)
        self._cached = self._reclaimable = 0

    @property
    def free_count(self) -> int:
        """Pages that `allocate` can return now, including those that only the cache references."""
        return len(self._free) + self._reclaimable

    @property
    def used_count(self) -> int:
        return self.pages - 1 - self.free_count

    @property
    def cached_count(self) -> int:
        """Pages that the cache references, whoever else does."""
        return self._cached

    @property
    def reclaimable_count(self) -> int:
        """Pages that only the cache references."""
        return self._reclaimable

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages with one reference each. The scheduler checks `free_count` first: too few is a
        bug."""
        assert 0 <= count <= self.free_count, f"{count} pages asked of {self.free_count} free"
        if count > len(self._free):
            assert self.reclaim is not None, "pages are kept, and nobody can be asked for them"
            self.reclaim(count - len(self._free))
            assert count <= len(self._free), f"the cache gave up too few: {len(self._free)} free of {count} asked"
        allocated = [self._free.pop() for _ in range(count)]
        for page in allocated:
            self._references[page] = 1
        return allocated

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._reclaimable -= self.only_cached(page)
            self._references[page] += 1

    def free_pages(self, pages: Iterable[int]) -> list[int]:
        """Drops a reference of each page; returns the pages that became free."""
        freed = []
        for page in pages:
            assert self._references[page] > self._in_cache[page], f"page {page} was given back twice"
            if self._decrement(page):
                freed.append(page)
        self._notify_freed(freed)
        return freed

    def copy_on_write(self, pages: Sequence[int], index: int) -> tuple[int, int | None]:
        """Returns the page to write at `pages[index]`, and the page to copy from if it was shared, also if with
        the cache. Copy before any other call of the pool, which may allocate that page anew."""
        page = pages[index]
        assert self._references[page] > self._in_cache[page], f"page {page} is not the caller's"
        if self._references[page] == 1:
            return page, None
        (fresh,) = self.allocate(1)
        if self._references[page] == 1:  # `allocate` had the cache evict it
            self.free_pages([fresh])
            return page, None
        self._decrement(page)
        return fresh, page

    # --- the cache --------------------------------------------------------------------------------------

    def only_cached(self, page: int) -> bool:
        """Returns whether only the cache references the page."""
        return self._references[page] == 1 and self._in_cache[page] == 1

    def add_cache_reference(self, pages: Iterable[int]) -> None:
        """Adds the cache's reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be kept"
            assert not self._in_cache[page], f"page {page} is kept already"
            self._references[page] += 1
            self._in_cache[page] = 1
            self._cached += 1

    def drop_cache_reference(self, pages: Iterable[int]) -> list[int]:
        """Drops the cache's reference to each page; returns the pages that became free."""
        freed = []
        for page in pages:
            assert self._in_cache[page], f"page {page} is not kept"
            self._reclaimable -= self.only_cached(page)
            self._in_cache[page] = 0
            self._cached -= 1
            if self._decrement(page):
                freed.append(page)
        self._notify_freed(freed)
        return freed

    # --- counting ---------------------------------------------------------------------------------------

    def _decrement(self, page: int) -> bool:
        """Drops one reference; returns whether it was the last."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
            return True
        self._reclaimable += self.only_cached(page)
        return False

    def _notify_freed(self, freed: Sequence[int]) -> None:
        if freed and self.on_free is not None:
            self.on_free(freed)

    def check(self) -> None:
        """Asserts that pages are either free or referenced, and that the counters agree. Run when idle."""
        used = sum(1 for count in self._references if count > 0)
        reclaimable = sum(map(self.only_cached, range(self.pages)))
        assert used + len(self._free) == self.pages - 1, f"{used} pages have holders, {len(self._free)} are free"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._references[page] == 0 for page in self._free), "a free page has a holder"
        assert reclaimable == self._reclaimable, f"{reclaimable} pages are only kept, not {self._reclaimable}"
        assert sum(self._in_cache) == self._cached, f"{sum(self._in_cache)} pages are kept, not {self._cached}"
        assert all(not cached or self._references[page] for page, cached in enumerate(self._in_cache)), (
            "a kept page is free"
        )
