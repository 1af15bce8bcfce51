"""Cache of biasing lists: hotwords compiled for a search on threads beside the loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

BiasingListT = TypeVar("BiasingListT")
MAX_CACHED_LISTS = 16
MAX_CACHED_CHARACTERS = 1 << 20
"""Characters of all cached lists together; one list may have up to a quarter of this. Ten thousand words have some
hundred thousand characters and take 25 MB. As graphs of single letters, this many take half a gigabyte."""
SHORT_LIST_CHARACTERS = 4_096
"""Characters of a short list, which compiles in some hundredths of a second, on a thread that long lists do not
keep busy."""


class BiasingListCache(Generic[BiasingListT]):
    """LRU cache of compiled lists; belongs to the loop's thread."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[str, bool], Future[BiasingListT]] = OrderedDict()
        """Futures of lists by text and `beams`, least recently used first."""
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """Compiling threads, by whether they serve short lists."""

    def get_or_build(self, bias: str, make: Callable[[], BiasingListT], *, beams: bool = False) -> Future[BiasingListT]:
        """Returns the future of a list, which `make` compiles if it is not cached. `bias`: as in SearchOptions.
        `beams`: the list is for beam search, and another than the one for greedy search."""
        if (future := self._cached.get((bias, beams))) is None:
            short = len(bias) <= SHORT_LIST_CHARACTERS
            if short not in self._threads:
                self._threads[short] = ThreadPoolExecutor(1, thread_name_prefix="asr-serve-hotwords")
            future = self._cached[bias, beams] = self._threads[short].submit(make)
        self._cached.move_to_end((bias, beams))
        while len(self._cached) > 1 and (
            len(self._cached) > MAX_CACHED_LISTS or self.characters > MAX_CACHED_CHARACTERS
        ):
            self._cached.popitem(last=False)
        return future

    @property
    def characters(self) -> int:
        return sum(len(bias) for bias, _ in self._cached)

    def __len__(self) -> int:
        return len(self._cached)

    def cancel(self, made: Future[BiasingListT]) -> None:
        """Cancels a list that nobody waits for any more, unless its compilation has begun."""
        if made.cancel():
            for key in [key for key, other in self._cached.items() if other is made]:
                del self._cached[key]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
