"""Queue of streams and utterances that wait for a slot. Pure: no clock, no slots."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain

from asr_serve.errors import AtCapacity
from asr_serve.types import Priority

LIVE_SLOTS_DIVISOR = 4
"""Share of slots reserved for live callers while they are connected, one in this many: a recording holds its slot
to its end."""

MAX_WAITING = 512
"""Maximum streams of callers without a slot; one more is refused."""
MAX_WAIT_S = 10.0
"""Maximum wait of a live stream for a slot before it is refused. Streams that send faster than real time wait like
recordings."""
RETRY_MS = 5_000
"""Retry time of refused streams: slots become free as segments end."""


class SlotQueue:
    """Queue for slots: each class gets its share of the slots that are assigned, first in, first out.

    Source: start-time fair queueing, Goyal et al., SIGCOMM 1996, as in engine/seq2seq/scheduler.
    """

    def __init__(self, shares: Mapping[Priority, float]) -> None:
        self._shares = shares
        self._waiting: dict[Priority, dict[int, None]] = {priority: {} for priority in shares}
        self._virtual_time = dict.fromkeys(shares, 0.0)
        """Slots assigned to each class, divided by its share; the class with the least is next."""
        self._system_virtual_time = 0.0
        """Virtual time of the class that was served last."""
        self._bounded_since_s: dict[int, float] = {}
        """Entries whose wait is bounded, longest waiting first, with the time at which it began."""

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._waiting.values())

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def waiting_priorities(self, excluded: Container[int]) -> set[Priority]:
        """Returns the classes with waiting entries, apart from those in `excluded`."""
        return {
            priority for priority, numbers in self._waiting.items() if any(number not in excluded for number in numbers)
        }

    @property
    def longest_waiting(self) -> tuple[int, float] | None:
        """Returns the entry with a bounded wait that has waited longest, and since when; None: there is none."""
        return next(iter(self._bounded_since_s.items()), None)

    def at_capacity(self, slots: int) -> AtCapacity:
        """Error for callers that get none of `slots` slots."""
        return AtCapacity(
            f"{self.count('live')} callers wait for one of {slots} slots",
            f"up to {MAX_WAITING} may wait, each {MAX_WAIT_S:g} s unless it sends faster than real time",
            RETRY_MS,
        )

    def enqueue(self, number: int, priority: Priority, bounded_since_s: float | None = None) -> None:
        """Adds an entry. `bounded_since_s`: time at which its wait began, if that is bounded."""
        if not self._waiting[priority]:
            # A class without waiting entries does not save up slots for later.
            self._virtual_time[priority] = max(self._virtual_time[priority], self._system_virtual_time)
        self._waiting[priority][number] = None
        if bounded_since_s is not None:
            self._bounded_since_s[number] = bounded_since_s

    def remove(self, number: int, priority: Priority) -> None:
        self._waiting[priority].pop(number, None)
        self._bounded_since_s.pop(number, None)

    def pop(self, allowed: Iterable[Priority], excluded: Container[int] = ()) -> int | None:
        """Removes and returns the next entry of the `allowed` classes, or None. Entries in `excluded` stay."""
        first: dict[Priority, int] = {}
        for priority in allowed:
            candidates = (number for number in self._waiting[priority] if number not in excluded)
            if (number := next(candidates, None)) is not None:
                first[priority] = number
        if not first:
            return None
        selected = min(first, key=self._virtual_time.__getitem__)
        self._system_virtual_time = self._virtual_time[selected]
        self._virtual_time[selected] += 1 / self._shares[selected]
        self.remove(first[selected], selected)
        return first[selected]
