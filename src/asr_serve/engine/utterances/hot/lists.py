"""Lists of hot words, made ready for searches beside the loop, and kept for those that come with the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")
KEPT = 16
MOST_CHARACTERS = 1 << 20
"""Of all lists that are kept, of which each has up to a quarter of it: ten thousand words have some hundred
thousand, and take 25 MB. As graphs of single letters so many take half a gigabyte."""
SHORT_CHARACTERS = 4_096
"""A list of up to so many is made in some hundredths of a second, on a thread that long ones do not keep busy."""


class Lists(Generic[Made]):
    """On the loop's thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, bool], Future[Made]] = OrderedDict()
        """Those that were asked for of late."""
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """For short ones, and for others."""

    def ask(self, bias: str, make: Callable[[], Made], *, beams: bool = False) -> Future[Made]:
        """`bias`: as SearchOptions has it. `beams`: made for these, which is another than without."""
        if (found := self._kept.get((bias, beams))) is None:
            short = len(bias) <= SHORT_CHARACTERS
            if short not in self._threads:
                self._threads[short] = ThreadPoolExecutor(1, thread_name_prefix="asr-serve-hotwords")
            found = self._kept[bias, beams] = self._threads[short].submit(make)
        self._kept.move_to_end((bias, beams))
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self.characters > MOST_CHARACTERS):
            self._kept.popitem(last=False)
        return found

    @property
    def characters(self) -> int:
        return sum(len(bias) for bias, _ in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def drop(self, made: Future[Made]) -> None:
        """Nobody waits for it any more. If it was not begun, it is not made."""
        if made.cancel():
            for key in [key for key, other in self._kept.items() if other is made]:
                del self._kept[key]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
