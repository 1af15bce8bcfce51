"""Who holds which page of the decoder's memory. Pure accounting: the tensors are the runner's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Fixed pages with reference counts.

    Page 0 is never lent: rows that only pad a batch write and read there. A page is lent by `take` with one
    reference, gains one by `share`, loses one by `give`, and is free again at none.

    One of a page's references may be the cache's: `keep` gives it, `forget` takes it away. A page that only the
    cache holds counts as free: `take` has the cache give up as many as it needs. To share such a page leaves one
    less free, as to take one does.
    """

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, page 0 being scratch; came {pages}")
        self.pages = pages
        self.reclaim: Callable[[int], int] | None = None
        """Of the cache: to give up at least so many pages, of those that nobody else holds; how many it did."""
        self.on_free: Callable[[Sequence[int]], None] | None = None
        """Called with pages that became free, so that tests may fill them with poison."""
        # The page given back last is lent first: it is the one still in the processor's cache, and memory
        # that a quiet engine never reached is never touched.
        self._free = list(range(pages - 1, 0, -1))
        self._references = [0] * pages
        self._in_cache = bytearray(pages)
        self._cached = self._reclaimable = 0

    @property
    def free_count(self) -> int:
        """Pages that `take` could give now, those among them that only the cache holds."""
        return len(self._free) + self._reclaimable

    @property
    def used_count(self) -> int:
        return self.pages - 1 - self.free_count

    @property
    def cached_count(self) -> int:
        """Pages that the cache holds, whoever else does."""
        return self._cached

    @property
    def reclaimable_count(self) -> int:
        """Pages that only the cache holds."""
        return self._reclaimable

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. The planner asked `free` first: too few is our own bug."""
        assert 0 <= count <= self.free_count, f"{count} pages asked of {self.free_count} free"
        if count > len(self._free):
            assert self.reclaim is not None, "pages are kept, and nobody can be asked for them"
            self.reclaim(count - len(self._free))
            assert count <= len(self._free), f"the cache gave up too few: {len(self._free)} free of {count} asked"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._reclaimable -= self.only_cached(page)
            self._references[page] += 1

    def free_pages(self, pages: Iterable[int]) -> list[int]:
        """One holder less for each page; returns those that became free."""
        freed = []
        for page in pages:
            assert self._references[page] > self._in_cache[page], f"page {page} was given back twice"
            if self._decrement(page):
                freed.append(page)
        self._notify_freed(freed)
        return freed

    def copy_on_write(self, pages: Sequence[int], index: int) -> tuple[int, int | None]:
        """Copy on write: the page to write at `pages[index]`, and the page to copy from when it was shared, be it
        with the cache. Copy before anything else is asked of the pool, which may lend that page anew."""
        page = pages[index]
        assert self._references[page] > self._in_cache[page], f"page {page} is not the caller's"
        if self._references[page] == 1:
            return page, None
        (fresh,) = self.allocate(1)
        if self._references[page] == 1:  # the cache forgot it just now
            self.free_pages([fresh])
            return page, None
        self._decrement(page)
        return fresh, page

    # --- the cache --------------------------------------------------------------------------------------

    def only_cached(self, page: int) -> bool:
        """Whether only the cache holds it."""
        return self._references[page] == 1 and self._in_cache[page] == 1

    def add_cache_reference(self, pages: Iterable[int]) -> None:
        """The cache is one more holder of each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be kept"
            assert not self._in_cache[page], f"page {page} is kept already"
            self._references[page] += 1
            self._in_cache[page] = 1
            self._cached += 1

    def drop_cache_reference(self, pages: Iterable[int]) -> list[int]:
        """The cache holds them no more; returns those that became free."""
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
        """One reference; whether that was the last."""
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
        """Free plus used is all there is, no free page has a holder, and what is counted is so. Run when idle."""
        held = sum(1 for count in self._references if count > 0)
        only_kept = sum(map(self.only_cached, range(self.pages)))
        assert held + len(self._free) == self.pages - 1, f"{held} pages have holders, {len(self._free)} are free"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._references[page] == 0 for page in self._free), "a free page has a holder"
        assert only_kept == self._reclaimable, f"{only_kept} pages are only kept, not {self._reclaimable}"
        assert sum(self._in_cache) == self._cached, f"{sum(self._in_cache)} pages are kept, not {self._cached}"
        assert all(not kept or self._references[page] for page, kept in enumerate(self._in_cache)), (
            "a kept page is free"
        )
