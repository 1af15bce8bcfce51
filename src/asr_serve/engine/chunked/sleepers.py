"""Who is quiet, who sleeps and who wakes: of streams, by number. What a sleeper knew lies in the tiers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from asr_serve.engine.saved import Held, Part
from asr_serve.engine.work import Keeper

if TYPE_CHECKING:
    from asr_serve.engine.chunked.stream import Stream

PRESSED_S = 1.0
"""Who is quiet for so long gives up its slot to somebody who waits for one."""
FULL_S = 0.25
"""When there was no room for a sleeper, nobody tries for so long: the disk may make some."""
MOST_TAKEN = 16
"""Of those that wake, so many may have what they knew outside of the tiers before they have a slot."""
READ_S = 2.0
"""A sleeper that cannot be read within that is lost: a disk may stall, and nobody waits for it for ever."""
HASTE_S = 0.05
"""Where the loop itself waited for one in vain, it waits so long for each that comes within READ_S: everybody else
stands still meanwhile."""
SLEEPS_AT_ONCE = 4
"""Streams that are put to sleep between two steps, at most: each is a copy of its state."""


class Tiers(Protocol):
    """Host memory, then a file. See engine/tiers."""

    def put(self, name: bytes, parts: Sequence[Part], *, keep: bool) -> bool: ...
    def get(self, name: bytes, done: Callable[[list[memoryview] | None], None]) -> None: ...
    def drop(self, name: bytes) -> None: ...


class Sleepers:
    """Belongs to the loop's thread. Without tiers nobody is quiet, and so nobody sleeps."""

    def __init__(self, tiers: Tiers | None, after_s: float) -> None:
        """`after_s`: who is quiet for so long sleeps."""
        self._tiers, self._after_s = tiers, after_s
        self._quiet: dict[int, float] = {}
        """Those with a slot and nothing to hear, and since when: the longest first."""
        self._not_before_s = self._unread_s = -math.inf
        """When the next one may be put there; and when the loop waited in vain for all of READ_S."""
        self._stored: set[int] = set()
        """Of whom the tiers hold something."""
        self.asleep: dict[int, None] = {}
        """Of these, those that nobody has called: the longest asleep first."""
        self.coming: dict[int, Callable[[Held | None], None]] = {}
        """Those that were called and are not read yet, the longest first; and who is to be told."""
        self._called: dict[int, float] = {}
        """Those that were called, and when."""

    def begin(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def possible(self) -> bool:
        """Whether anybody sleeps."""
        return self._tiers is not None

    def quiet(self, number: int) -> None:
        if self._tiers is not None:
            self._quiet[number] = time.monotonic()

    def loud(self, number: int) -> None:
        self._quiet.pop(number, None)

    def due_s(self, pressed: bool) -> float | None:
        """When the next one is to sleep, or is lost, on the monotonic clock. `pressed`: somebody wants a slot."""
        return min((due for due in (self._sleep_s(pressed), self._late_s) if due is not None), default=None)

    def _sleep_s(self, pressed: bool) -> float | None:
        if not self._quiet:
            return None
        after_s = min(PRESSED_S, self._after_s) if pressed else self._after_s
        return max(next(iter(self._quiet.values())) + after_s, self._not_before_s)

    def next(self, pressed: bool) -> int | None:
        """Who is to sleep now."""
        due_s = self._sleep_s(pressed)
        return next(iter(self._quiet)) if due_s is not None and due_s <= time.monotonic() else None

    @property
    def _late_s(self) -> float | None:
        """When the next one of those that are read is lost."""
        return next((self._called[number] + READ_S for number in self.coming), None)

    def give_up(self) -> None:
        """Those that were called and could not be read in time are lost. What comes of them later is not heard."""
        while (late_s := self._late_s) is not None and late_s <= time.monotonic():
            next(iter(self.coming.values()))(None)

    def put(self, number: int, held: Held, waiting: Iterable[tuple[int, Stream]] = ()) -> bool:
        """It sleeps from here on; False: there is no room, and if it was quiet it is so as if from now on.

        `waiting`: those that wait for a slot. Where all room is taken, one of them that is called makes some: else
        who wakes would wait for a slot, and who has it for room to sleep.
        """
        assert number not in self._stored
        if not self._store(number, held) and not (self._take_out(waiting) and self._store(number, held)):
            if number in self._quiet:
                self.loud(number)
                self.quiet(number)
            self._not_before_s = time.monotonic() + FULL_S
            return False
        self._not_before_s = -math.inf
        self.loud(number)
        self._stored.add(number)
        self.asleep[number] = None
        self._keeper.stats.slept()
        self._keeper.stats.asleep(len(self.asleep))
        return True

    def _store(self, number: int, held: Held) -> bool:
        assert self._tiers is not None
        return self._tiers.put(_name(number), [held.numbers, *held.parts], keep=True)

    def _take_out(self, waiting: Iterable[tuple[int, Stream]]) -> bool:
        if len(self._called.keys() - self._stored) >= MOST_TAKEN:
            return False
        for number, stream in waiting:
            if number in self._stored and stream.held is not None:
                stream.held = Held(stream.held.numbers, tuple(map(bytes, stream.held.parts)))
                self._drop(number)
                return True
        return False

    def call(self, number: int, done: Callable[[int, Held | None], None]) -> None:
        """Read what it knew. `done` is called with that, on the loop's thread; with None: it is lost. What it is
        given lies where it is until nobody has it any more."""
        self._rouse(number)
        self._called[number] = time.monotonic()

        def came(held: Held | None) -> None:
            if self.coming.get(number) is came:  # it may have been given up, and sleep or be called again
                del self.coming[number]
                done(number, held)

        self.coming[number] = came
        self._get(number, lambda held: self._keeper.call(lambda: came(held)))

    def read(self, number: int) -> Held | None:
        """Now; the loop waits for it. None: it is lost."""
        read: Future[Held | None] = Future()
        self._get(number, read.set_result)
        whole = time.monotonic() >= self._unread_s + READ_S
        try:
            return read.result(READ_S if whole else HASTE_S)
        except TimeoutError:
            if whole:  # else one slow read would have all be lost that come after it
                self._unread_s = time.monotonic()
            return None

    def _get(self, number: int, done: Callable[[Held | None], None]) -> None:
        assert self._tiers is not None
        self._tiers.get(
            _name(number), lambda parts: done(Held(bytes(parts[0]), parts[1:]) if parts is not None else None)
        )

    def wake(self, number: int) -> None:
        """It has a slot, and has taken what it knew."""
        if (called_s := self._called.get(number)) is not None:
            self._keeper.stats.woke(time.monotonic() - called_s)
        self.forget(number)

    def forget(self, number: int) -> None:
        """It is awake, or gone. Idempotent."""
        self._called.pop(number, None)
        self.loud(number)
        self._rouse(number)
        self.coming.pop(number, None)
        if number in self._stored:
            self._drop(number)

    def _drop(self, number: int) -> None:
        assert self._tiers is not None
        self._stored.remove(number)
        self._tiers.drop(_name(number))

    def _rouse(self, number: int) -> None:
        if number in self.asleep:
            del self.asleep[number]
            self._keeper.stats.asleep(len(self.asleep))

    def check(self, quiet: set[int], silent: set[int]) -> None:
        """`quiet`: streams with a slot and nothing to hear. `silent`: those with neither."""
        assert self._tiers is None or self._quiet.keys() == quiet, "a quiet stream is not known to be one"
        assert self.asleep.keys() <= self._stored & silent, "who sleeps has a slot, or waits for one"
        assert self.coming.keys() <= self._called.keys() & self._stored, "what is read was not stored"


def _name(number: int) -> bytes:
    return b"stream %d" % number
