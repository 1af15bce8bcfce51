"""Lists of hot words, made ready for searches beside the loop, and kept for those that come with the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

BiasingListT = TypeVar("BiasingListT")
MAX_CACHED_LISTS = 16
MAX_CACHED_CHARACTERS = 1 << 20
"""Of all lists that are kept, of which each has up to a quarter of it: ten thousand words have some hundred
thousand, and take 25 MB. As graphs of single letters so many take half a gigabyte."""
SHORT_LIST_CHARACTERS = 4_096
"""A list of up to so many is made in some hundredths of a second, on a thread that long ones do not keep busy."""


class BiasingListCache(Generic[BiasingListT]):
    """On the loop's thread."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[str, bool], Future[BiasingListT]] = OrderedDict()
        """Those that were asked for of late."""
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """For short ones, and for others."""

    def get_or_build(
        self, bias: str, make: Callable[[], BiasingListT], *, beams: bool = False
    ) -> Future[BiasingListT]:
        """`bias`: as SearchOptions has it. `beams`: made for these, which is another than without."""
        if (found := self._cached.get((bias, beams))) is None:
            short = len(bias) <= SHORT_LIST_CHARACTERS
            if short not in self._threads:
                self._threads[short] = ThreadPoolExecutor(1, thread_name_prefix="asr-serve-hotwords")
            found = self._cached[bias, beams] = self._threads[short].submit(make)
        self._cached.move_to_end((bias, beams))
        while len(self._cached) > 1 and (
            len(self._cached) > MAX_CACHED_LISTS or self.characters > MAX_CACHED_CHARACTERS
        ):
            self._cached.popitem(last=False)
        return found

    @property
    def characters(self) -> int:
        return sum(len(bias) for bias, _ in self._cached)

    def __len__(self) -> int:
        return len(self._cached)

    def cancel(self, made: Future[BiasingListT]) -> None:
        """Nobody waits for it any more. If it was not begun, it is not made."""
        if made.cancel():
            for key in [key for key, other in self._cached.items() if other is made]:
                del self._cached[key]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
