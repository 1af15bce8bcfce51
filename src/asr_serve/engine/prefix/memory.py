"""Values that are worth their bytes for a while."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Memory(Generic[V]):
    """Bounded by bytes: what was not asked for the longest goes first. It belongs to one thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._values: OrderedDict[bytes, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def get(self, key: bytes) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: bytes, value: V, nbytes: int) -> None:
        """In the place of what had the key. `nbytes`: of the value and all that is kept for it. What is larger
        than all there may be is not kept."""
        assert nbytes > 0, "a value that takes nothing would have no bound"
        self.drop(key)
        if nbytes > self.most_bytes:
            return
        while self.nbytes + nbytes > self.most_bytes:
            _, (_, less) = self._values.popitem(last=False)
            self.nbytes -= less
        self._values[key] = value, nbytes
        self.nbytes += nbytes

    def drop(self, key: bytes) -> None:
        """Nothing happens where it is not there."""
        if (found := self._values.pop(key, None)) is not None:
            self.nbytes -= found[1]

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0
