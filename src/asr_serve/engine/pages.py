"""Who holds which page of the decoder's memory. Pure accounting: the tensors are the runner's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PagePool:
    """Fixed pages with reference counts.

    Page 0 is never lent: rows that only pad a batch write and read there. A page is lent by `take` with one
    reference, gains one by `share`, loses one by `give`, and is free again at none.
    """

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, page 0 being scratch; came {pages}")
        self.pages = pages
        # The page given back last is lent first: it is the one still in the processor's cache, and memory
        # that a quiet engine never reached is never touched.
        self._free = list(range(pages - 1, 0, -1))
        self._references = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.pages - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each. The planner asked `free` first: too few is our own bug."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def give(self, pages: Iterable[int]) -> list[int]:
        """One holder less for each page; returns those that became free."""
        freed = []
        for page in pages:
            assert self._references[page] > 0, f"page {page} was given back twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def own(self, pages: Sequence[int], index: int) -> tuple[int, int | None]:
        """Copy on write: the page to write at `pages[index]`, and the page to copy from when it was shared."""
        page = pages[index]
        if self._references[page] == 1:
            return page, None
        (fresh,) = self.take(1)
        self._references[page] -= 1
        return fresh, page

    def check(self) -> None:
        """Free plus used is all there is, and no free page has a holder. Run when idle."""
        held = sum(1 for count in self._references if count > 0)
        assert held == self.used, f"{held} pages have holders, {self.used} are lent"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._references[page] == 0 for page in self._free), "a free page has a holder"
