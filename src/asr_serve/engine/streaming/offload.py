"""Offload of idle streams: their state moves to the tiers (host memory, then disk), and is read when audio comes."""

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

IDLE_UNDER_PRESSURE_S = 1.0
"""Idle time after which a stream gives up its slot while another waits for one."""
STORE_FULL_RETRY_S = 0.25
"""Pause after the tiers were full, before the next attempt: the disk may make room."""
MAX_RESTORED = 16
"""Maximum restored states that are held outside the tiers until their streams have a slot."""
READ_TIMEOUT_S = 2.0
"""Maximum time to read an offloaded stream, which is lost then: a disk may stall, and no caller waits forever."""
SHORT_READ_TIMEOUT_S = 0.05
"""Timeout of blocking reads for READ_TIMEOUT_S after one timed out: the loop stands still during each."""
MAX_OFFLOADS_PER_STEP = 4
"""Maximum streams offloaded between two steps: each is a copy of its state."""


class OffloadStore(Protocol):
    """Storage in host memory, then in a file. See engine/cache/tiered_store."""

    def put(self, name: bytes, parts: Sequence[BytesLike], *, pinned: bool) -> bool: ...
    def get(self, name: bytes, done: Callable[[list[memoryview] | None], None]) -> None: ...
    def drop(self, name: bytes) -> None: ...


class StreamOffloader:
    """Tracks idle, offloaded and restoring streams. Belongs to the loop's thread. Without tiers no stream is idle
    or offloaded."""

    def __init__(self, tiers: OffloadStore | None, after_s: float) -> None:
        """`after_s`: idle time after which a stream is offloaded."""
        self._offload_store, self._after_s = tiers, after_s
        self._idle: dict[int, float] = {}
        """Streams with a slot and no chunks, with the time since when, longest first."""
        self._not_before_s = self._read_timed_out_s = -math.inf
        """Time before which no stream is offloaded; time at which a blocking read last took all of READ_TIMEOUT_S."""
        self._stored: set[int] = set()
        """Streams whose state is in the tiers."""
        self.offloaded: dict[int, None] = {}
        """Stored streams for which no audio has come, longest offloaded first."""
        self.restoring: dict[int, Callable[[SessionSnapshotView | None], None]] = {}
        """Streams whose state is being read, longest first, with the callback of each."""
        self._requested: dict[int, float] = {}
        """Streams for which audio came, and when."""

    def attach(self, context: LoopContext) -> None:
        self._context = context

    @property
    def enabled(self) -> bool:
        """Returns whether streams are offloaded at all."""
        return self._offload_store is not None

    def mark_idle(self, number: int) -> None:
        if self._offload_store is not None:
            self._idle[number] = time.monotonic()

    def mark_active(self, number: int) -> None:
        self._idle.pop(number, None)

    def due_s(self, under_pressure: bool) -> float | None:
        """Time on the monotonic clock of the next offload or read timeout. `under_pressure`: a stream waits for
        a slot."""
        return min(
            (due for due in (self._next_offload_s(under_pressure), self._next_read_timeout_s) if due is not None),
            default=None,
        )

    def _next_offload_s(self, under_pressure: bool) -> float | None:
        if not self._idle:
            return None
        after_s = min(IDLE_UNDER_PRESSURE_S, self._after_s) if under_pressure else self._after_s
        return max(next(iter(self._idle.values())) + after_s, self._not_before_s)

    def next_to_offload(self, under_pressure: bool) -> int | None:
        """Returns the stream to offload now, or None."""
        due_s = self._next_offload_s(under_pressure)
        return next(iter(self._idle)) if due_s is not None and due_s <= time.monotonic() else None

    @property
    def _next_read_timeout_s(self) -> float | None:
        """Time at which the oldest read times out."""
        return next((self._requested[number] + READ_TIMEOUT_S for number in self.restoring), None)

    def expire_reads(self) -> None:
        """Fails reads that timed out: their streams are lost. A late result is ignored."""
        while (timeout_s := self._next_read_timeout_s) is not None and timeout_s <= time.monotonic():
            next(iter(self.restoring.values()))(None)

    def offload(
        self, number: int, snapshot: SessionSnapshotView, waiting: Iterable[tuple[int, StreamRequest]] = ()
    ) -> bool:
        """Offloads a stream; returns False when there is no room, and an idle stream then counts as idle from now.

        `waiting`: streams that wait for a slot. When the tiers are full, the restored state of one of them is
        copied out to make room: otherwise that stream would wait for a slot, and the stream in the slot for room.
        """
        assert number not in self._stored
        if not self._store(number, snapshot) and not (
            self._copy_out_restored(waiting) and self._store(number, snapshot)
        ):
            if number in self._idle:
                self.mark_active(number)
                self.mark_idle(number)
            self._not_before_s = time.monotonic() + STORE_FULL_RETRY_S
            return False
        self._not_before_s = -math.inf
        self.mark_active(number)
        self._stored.add(number)
        self.offloaded[number] = None
        self._context.stats.record_offload()
        self._context.stats.set_offloaded(len(self.offloaded))
        return True

    def _store(self, number: int, snapshot: SessionSnapshotView) -> bool:
        assert self._offload_store is not None
        return self._offload_store.put(_name(number), [snapshot.header, *snapshot.parts], pinned=True)

    def _copy_out_restored(self, waiting: Iterable[tuple[int, StreamRequest]]) -> bool:
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
        """Reads a stream's state. `done` is called on the loop's thread with the state, which stays in place while
        it is referenced, or with None: the state is lost."""
        self._mark_restored(number)
        self._requested[number] = time.monotonic()

        def on_read(snapshot: SessionSnapshotView | None) -> None:
            if (
                self.restoring.get(number) is on_read
            ):  # the read may have timed out, and the stream been offloaded or requested again
                del self.restoring[number]
                done(number, snapshot)

        self.restoring[number] = on_read
        self._get(number, lambda snapshot: self._context.call(lambda: on_read(snapshot)))

    def read_blocking(self, number: int) -> SessionSnapshotView | None:
        """Reads a stream's state while the loop waits. None: the state is lost."""
        read: Future[SessionSnapshotView | None] = Future()
        self._get(number, read.set_result)
        full_timeout = time.monotonic() >= self._read_timed_out_s + READ_TIMEOUT_S
        try:
            return read.result(READ_TIMEOUT_S if full_timeout else SHORT_READ_TIMEOUT_S)
        except TimeoutError:
            if full_timeout:  # otherwise one slow read would fail all later ones
                self._read_timed_out_s = time.monotonic()
            return None

    def _get(self, number: int, done: Callable[[SessionSnapshotView | None], None]) -> None:
        assert self._offload_store is not None
        self._offload_store.get(
            _name(number),
            lambda parts: done(SessionSnapshotView(bytes(parts[0]), parts[1:]) if parts is not None else None),
        )

    def restored(self, number: int) -> None:
        """Records that the stream has a slot and its state again."""
        if (requested_s := self._requested.get(number)) is not None:
            self._context.stats.record_restore(time.monotonic() - requested_s)
        self.forget(number)

    def forget(self, number: int) -> None:
        """Drops all records and stored state of the stream. Idempotent."""
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
            self._context.stats.set_offloaded(len(self.offloaded))

    def check_invariants(self, with_slot: set[int], without_slot: set[int]) -> None:
        """Asserts consistency. `with_slot`, `without_slot`: streams without chunks, by whether they have a slot; the
        latter do not wait for one."""
        assert self._offload_store is None or self._idle.keys() == with_slot, "an idle stream is not marked idle"
        assert self.offloaded.keys() <= self._stored & without_slot, "an offloaded stream has a slot, or waits for one"
        assert self.restoring.keys() <= self._requested.keys() & self._stored, "a stream is read that was not stored"


def _name(number: int) -> bytes:
    return b"stream %d" % number
