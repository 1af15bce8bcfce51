"""Who waits for a slot, and whose turn it is. Pure: no clock, no slots."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain

from asr_serve.errors import AtCapacity
from asr_serve.types import Priority

LIVE_RESERVED_SLOTS = 4
"""While callers are on line, one in so many slots is kept for them: a recording holds its slot to its end."""

MAX_WAITING = 512
"""Callers' streams without a slot; one more is refused."""
MAX_WAIT_S = 10.0
"""So long somebody who speaks waits for a slot; then it is said that there is none. Who sends faster than anybody
speaks waits as a recording does."""
RETRY_MS = 5_000
"""Slots become free as segments end."""


class SlotQueue:
    """Who waits for a slot: each class gets its share of the slots that are given, in the order of coming.

    Source  start-time fair queueing, Goyal et al., SIGCOMM 1996, as in engine/seq2seq/scheduler
    """

    def __init__(self, shares: Mapping[Priority, float]) -> None:
        self._shares = shares
        self._waiting: dict[Priority, dict[int, None]] = {priority: {} for priority in shares}
        self._granted = dict.fromkeys(shares, 0.0)
        self._due = 0.0
        self._speaking: dict[int, float] = {}

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._waiting.values())

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def waiting_priorities(self, but: Container[int]) -> set[Priority]:
        """Classes of whom anybody waits, but for those in `but`."""
        return {priority for priority, those in self._waiting.items() if any(each not in but for each in those)}

    @property
    def longest_waiting(self) -> tuple[int, float] | None:
        """Who has waited longest of those whose wait is bounded, and since when."""
        return next(iter(self._speaking.items()), None)

    def at_capacity(self, slots: int) -> AtCapacity:
        """What callers without one of so many slots are told."""
        return AtCapacity(
            f"{self.count('live')} callers wait for one of {slots} slots",
            f"up to {MAX_WAITING}, and {MAX_WAIT_S:g} s while somebody speaks",
            RETRY_MS,
        )

    def enqueue(self, number: int, priority: Priority, speaking_s: float | None = None) -> None:
        """`speaking_s`: its wait is bounded, and begins now."""
        if not self._waiting[priority]:
            # A class that had nothing to do does not save up slots for later.
            self._granted[priority] = max(self._granted[priority], self._due)
        self._waiting[priority][number] = None
        if speaking_s is not None:
            self._speaking[number] = speaking_s

    def remove(self, number: int, priority: Priority) -> None:
        self._waiting[priority].pop(number, None)
        self._speaking.pop(number, None)

    def pop(self, allowed: Iterable[Priority], but: Container[int] = ()) -> int | None:
        """Whose turn it is, of these classes, if anybody's. Those in `but` are passed over, and stay."""
        first: dict[Priority, int] = {}
        for priority in allowed:
            if (number := next((each for each in self._waiting[priority] if each not in but), None)) is not None:
                first[priority] = number
        if not first:
            return None
        chosen = min(first, key=self._granted.__getitem__)
        self._due = self._granted[chosen]
        self._granted[chosen] += 1 / self._shares[chosen]
        self.remove(first[chosen], chosen)
        return first[chosen]
