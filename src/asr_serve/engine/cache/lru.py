"""Values that are worth their bytes for a while."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class LruCache(Generic[V]):
    """Bounded by bytes: what was not asked for the longest goes first. It belongs to one thread."""

    def __init__(self, most_bytes: int) -> None:
        self.max_bytes = most_bytes
        self.nbytes = 0
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> V | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def insert(self, key: bytes, value: V, nbytes: int) -> None:
        """In the place of what had the key. `nbytes`: of the value and all that is kept for it. What is larger
        than all there may be is not kept."""
        assert nbytes > 0, "a value that takes nothing would have no bound"
        self.discard(key)
        if nbytes > self.max_bytes:
            return
        while self.nbytes + nbytes > self.max_bytes:
            _, (_, less) = self._entries.popitem(last=False)
            self.nbytes -= less
        self._entries[key] = value, nbytes
        self.nbytes += nbytes

    def discard(self, key: bytes) -> None:
        """Nothing happens where it is not there."""
        if (found := self._entries.pop(key, None)) is not None:
            self.nbytes -= found[1]

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0
