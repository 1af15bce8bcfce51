"""LRU cache bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class LruCache(Generic[V]):
    """LRU cache bounded by bytes; belongs to one thread."""

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
        """Inserts or replaces a value. `nbytes`: size of the value and of all that is stored for it; a value
        larger than the cache is not stored."""
        assert nbytes > 0, "a value that takes nothing would have no bound"
        self.discard(key)
        if nbytes > self.max_bytes:
            return
        while self.nbytes + nbytes > self.max_bytes:
            _, (_, evicted_bytes) = self._entries.popitem(last=False)
            self.nbytes -= evicted_bytes
        self._entries[key] = value, nbytes
        self.nbytes += nbytes

    def discard(self, key: bytes) -> None:
        """Removes a value, if there is one."""
        if (found := self._entries.pop(key, None)) is not None:
            self.nbytes -= found[1]

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0
