"""Who is quiet, who sleeps and who wakes: of streams, by number. What a sleeper knew lies in the tiers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from asr_serve.engine.executor import LoopContext
from asr_serve.engine.session_snapshot import BytesLike, SessionSnapshotView

if TYPE_CHECKING:
    from asr_serve.engine.streaming.request import StreamRequest

IDLE_WHEN_PRESSED_S = 1.0
"""Who is quiet for so long gives up its slot to somebody who waits for one."""
STORE_FULL_RETRY_S = 0.25
"""When there was no room for a sleeper, nobody tries for so long: the disk may make some."""
MAX_RESTORED = 16
"""Of those that wake, so many may have what they knew outside of the tiers before they have a slot."""
READ_TIMEOUT_S = 2.0
"""A sleeper that cannot be read within that is lost: a disk may stall, and nobody waits for it for ever."""
HASTE_S = 0.05
"""Where the loop itself waited for one in vain, it waits so long for each that comes within READ_S: everybody else
stands still meanwhile."""
MAX_OFFLOADS_PER_STEP = 4
"""Streams that are put to sleep between two steps, at most: each is a copy of its state."""


class OffloadStore(Protocol):
    """Host memory, then a file. See engine/tiers."""

    def put(self, name: bytes, parts: Sequence[BytesLike], *, keep: bool) -> bool: ...
    def get(self, name: bytes, done: Callable[[list[memoryview] | None], None]) -> None: ...
    def drop(self, name: bytes) -> None: ...


class StreamOffloader:
    """Belongs to the loop's thread. Without tiers nobody is quiet, and so nobody sleeps."""

    def __init__(self, tiers: OffloadStore | None, after_s: float) -> None:
        """`after_s`: who is quiet for so long sleeps."""
        self._offload_store, self._after_s = tiers, after_s
        self._idle: dict[int, float] = {}
        """Those with a slot and nothing to hear, and since when: the longest first."""
        self._not_before_s = self._unread_s = -math.inf
        """When the next one may be put there; and when the loop waited in vain for all of READ_S."""
        self._stored: set[int] = set()
        """Of whom the tiers hold something."""
        self.offloaded: dict[int, None] = {}
        """Of these, those that nobody has called: the longest asleep first."""
        self.restoring: dict[int, Callable[[SessionSnapshotView | None], None]] = {}
        """Those that were called and are not read yet, the longest first; and who is to be told."""
        self._requested: dict[int, float] = {}
        """Those that were called, and when."""

    def attach(self, keeper: LoopContext) -> None:
        self._keeper = keeper

    @property
    def enabled(self) -> bool:
        """Whether anybody sleeps."""
        return self._offload_store is not None

    def mark_idle(self, number: int) -> None:
        if self._offload_store is not None:
            self._idle[number] = time.monotonic()

    def mark_active(self, number: int) -> None:
        self._idle.pop(number, None)

    def due_s(self, pressed: bool) -> float | None:
        """When the next one is to sleep, or is lost, on the monotonic clock. `pressed`: somebody wants a slot."""
        return min(
            (due for due in (self._next_offload_s(pressed), self._next_read_timeout_s) if due is not None),
            default=None,
        )

    def _next_offload_s(self, pressed: bool) -> float | None:
        if not self._idle:
            return None
        after_s = min(IDLE_WHEN_PRESSED_S, self._after_s) if pressed else self._after_s
        return max(next(iter(self._idle.values())) + after_s, self._not_before_s)

    def next_to_offload(self, pressed: bool) -> int | None:
        """Who is to sleep now."""
        due_s = self._next_offload_s(pressed)
        return next(iter(self._idle)) if due_s is not None and due_s <= time.monotonic() else None

    @property
    def _next_read_timeout_s(self) -> float | None:
        """When the next one of those that are read is lost."""
        return next((self._requested[number] + READ_TIMEOUT_S for number in self.restoring), None)

    def expire_reads(self) -> None:
        """Those that were called and could not be read in time are lost. What comes of them later is not heard."""
        while (late_s := self._next_read_timeout_s) is not None and late_s <= time.monotonic():
            next(iter(self.restoring.values()))(None)

    def offload(
        self, number: int, held: SessionSnapshotView, waiting: Iterable[tuple[int, StreamRequest]] = ()
    ) -> bool:
        """It sleeps from here on; False: there is no room, and if it was quiet it is so as if from now on.

        `waiting`: those that wait for a slot. Where all room is taken, one of them that is called makes some: else
        who wakes would wait for a slot, and who has it for room to sleep.
        """
        assert number not in self._stored
        if not self._store(number, held) and not (self._take_restored(waiting) and self._store(number, held)):
            if number in self._idle:
                self.mark_active(number)
                self.mark_idle(number)
            self._not_before_s = time.monotonic() + STORE_FULL_RETRY_S
            return False
        self._not_before_s = -math.inf
        self.mark_active(number)
        self._stored.add(number)
        self.offloaded[number] = None
        self._keeper.stats.record_offload()
        self._keeper.stats.set_offloaded(len(self.offloaded))
        return True

    def _store(self, number: int, held: SessionSnapshotView) -> bool:
        assert self._offload_store is not None
        return self._offload_store.put(_name(number), [held.header, *held.parts], keep=True)

    def _take_restored(self, waiting: Iterable[tuple[int, StreamRequest]]) -> bool:
        if len(self._requested.keys() - self._stored) >= MAX_RESTORED:
            return False
        for number, stream in waiting:
            if number in self._stored and stream.saved_session is not None:
                stream.saved_session = SessionSnapshotView(
                    stream.saved_session.header, tuple(map(bytes, stream.saved_session.parts))
                )
                self._drop(number)
                return True
        return False

    def prefetch(self, number: int, done: Callable[[int, SessionSnapshotView | None], None]) -> None:
        """Read what it knew. `done` is called with that, on the loop's thread; with None: it is lost. What it is
        given lies where it is until nobody has it any more."""
        self._mark_restored(number)
        self._requested[number] = time.monotonic()

        def came(held: SessionSnapshotView | None) -> None:
            if self.restoring.get(number) is came:  # it may have been given up, and sleep or be called again
                del self.restoring[number]
                done(number, held)

        self.restoring[number] = came
        self._get(number, lambda held: self._keeper.call(lambda: came(held)))

    def read_blocking(self, number: int) -> SessionSnapshotView | None:
        """Now; the loop waits for it. None: it is lost."""
        read: Future[SessionSnapshotView | None] = Future()
        self._get(number, read.set_result)
        whole = time.monotonic() >= self._unread_s + READ_TIMEOUT_S
        try:
            return read.result(READ_TIMEOUT_S if whole else HASTE_S)
        except TimeoutError:
            if whole:  # else one slow read would have all be lost that come after it
                self._unread_s = time.monotonic()
            return None

    def _get(self, number: int, done: Callable[[SessionSnapshotView | None], None]) -> None:
        assert self._offload_store is not None
        self._offload_store.get(
            _name(number),
            lambda parts: done(SessionSnapshotView(bytes(parts[0]), parts[1:]) if parts is not None else None),
        )

    def restored(self, number: int) -> None:
        """It has a slot, and has taken what it knew."""
        if (called_s := self._requested.get(number)) is not None:
            self._keeper.stats.record_restore(time.monotonic() - called_s)
        self.forget(number)

    def forget(self, number: int) -> None:
        """It is awake, or gone. Idempotent."""
        self._requested.pop(number, None)
        self.mark_active(number)
        self._mark_restored(number)
        self.restoring.pop(number, None)
        if number in self._stored:
            self._drop(number)

    def _drop(self, number: int) -> None:
        assert self._offload_store is not None
        self._stored.remove(number)
        self._offload_store.drop(_name(number))

    def _mark_restored(self, number: int) -> None:
        if number in self.offloaded:
            del self.offloaded[number]
            self._keeper.stats.set_offloaded(len(self.offloaded))

    def check_invariants(self, quiet: set[int], silent: set[int]) -> None:
        """`quiet`: streams with a slot and nothing to hear. `silent`: those with neither."""
        assert self._offload_store is None or self._idle.keys() == quiet, "a quiet stream is not known to be one"
        assert self.offloaded.keys() <= self._stored & silent, "who sleeps has a slot, or waits for one"
        assert self.restoring.keys() <= self._requested.keys() & self._stored, "what is read was not stored"


def _name(number: int) -> bytes:
    return b"stream %d" % number
