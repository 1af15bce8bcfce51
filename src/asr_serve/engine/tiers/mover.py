"""The disk's thread: writes what was long unused, and reads what somebody asked for.

Reads go first, also between two slices of a large write. All of the work is in `work`, a piece at a time, so that
a test can choose what happens between two pieces.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.tiers.entries import Chunk, Done, Entry, Place, chunks
from asr_serve.engine.tiers.sealing import Mark, Sealing
from asr_serve.engine.tiers.shelves import Shelves
from asr_serve.errors import DiskFailed
from asr_serve.transfer.disk import Disk, aligned, still_under_way

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Of small entries, so much is read or written at once, to keep the disk busy."""
SLICE_BYTES = 8 << 20
"""Of what is written, so much is closed while the slice before is under way; then whoever wants to read may."""
MOST_DIRTY = 0.5
"""Share of the memory above which what was long unused is written to the file."""
AGAIN_S = 1.0
"""After so long the machine is asked again for memory that it had not."""


class Reading:
    """One entry on its way from the file. It holds both places by itself: the entry may be dropped meanwhile."""

    def __init__(self, entry: Entry, memory: Place, file: Place) -> None:
        self.entry, self.memory, self.file, self.marks = entry, memory, file, entry.marks
        self.begun_s = time.perf_counter()
        self.left = -1
        self.good = True
        self.astray = False
        """The disk gave it up while it was under way, and may write into the memory at any time: nobody else gets
        that."""


class Writing(NamedTuple):
    entry: Entry
    memory: Place
    file: Place
    marks: list[Mark]


class Mover:
    """`lock` is held for the shelves, never while the disk works or somebody is told."""

    def __init__(self, shelves: Shelves, lock: threading.Lock, disk: Disk, sealing: Sealing) -> None:
        self._shelves, self._lock, self._disk, self._sealing = shelves, lock, disk, sealing
        self._tally = shelves.tally
        self._wanted: deque[Entry] = deque()
        self._staging = [aligned(SLICE_BYTES), aligned(SLICE_BYTES)] if sealing.staged else []
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.pressed = False
        """Somebody found no room: everything that can be is written, until somebody finds it."""
        self.closing = False
        self._short = False
        """There was no memory for one more beside the rest."""

    # --- any thread, under the lock -----------------------------------------------------------------

    def want(self, entry: Entry) -> None:
        """Somebody waits for it."""
        if len(entry.waiting) == 1:
            self._wanted.append(entry)
            self.bell.put(None)

    @property
    def has_to_do(self) -> bool:
        return not self.closing and (bool(self._wanted) or self._shelves.dirty_bytes > self._most_dirty_bytes)

    @property
    def _most_dirty_bytes(self) -> int:
        return 0 if self.pressed or self._wanted else int(self._shelves.arena.nbytes * MOST_DIRTY)

    # --- the disk's thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Until `closing`, which the bell tells."""
        try:
            while not self.closing:
                if not self.work():
                    with contextlib.suppress(queue.Empty):
                        self.bell.get(timeout=AGAIN_S if self._short else None)
        finally:
            if not self.closing:  # what is no failure of the disk: memory alone is left, and somebody has to know
                log.error("the disk's thread has failed: what sleeps in the file is lost", exc_info=True)
            self.end()

    def work(self) -> bool:
        """One batch of reads, or of writes. False: there is nothing to do, or no room for it now."""
        if self.closing:
            return False
        reading = self._coming()
        if reading:
            self._read(reading)
            return True
        writing = self._leaving()
        if writing:
            self._write(writing)
            return True
        reading = self._forced()
        if reading:
            self._read(reading)
        return bool(reading)

    def end(self) -> None:
        """Nothing is read any more: everybody who waits is told so."""
        with contextlib.ExitStack() as telling, self._lock:
            self.closing = True
            for entry in self._shelves.entries.values():
                _tell(telling, entry.waiting, [None] * len(entry.waiting))
                entry.waiting = []

    # --- reading ------------------------------------------------------------------------------------

    def _coming(self) -> list[Reading]:
        """In the order in which they were asked for: nobody passes one that there is no room for yet."""
        reading: list[Reading] = []
        nbytes = 0
        with self._lock:
            self._shelves.settle()
            while self._next() and nbytes < BATCH_BYTES:
                memory = self._shelves.room(self._wanted[0].nbytes, drop=False)
                if memory is None:
                    break
                reading.append(self._begun(memory))
                nbytes += reading[-1].entry.nbytes
        return reading

    def _forced(self) -> list[Reading]:
        """Nothing could be written to make room: something is dropped, or the next one lies beside the rest."""
        with self._lock:
            was_short, self._short = self._short, False
            if not self._next():
                return []
            entry = self._wanted[0]
            try:
                memory = self._shelves.room(entry.nbytes, drop=True) or self._shelves.room_beside(entry)
            except OSError as error:  # it is not lost: it waits until the machine has memory for it
                self._short = True
                if not was_short:
                    log.warning("no %d bytes of memory for what is to wake, it waits: %s", entry.nbytes, error)
                return []
            return [] if memory is None else [self._begun(memory)]

    def _next(self) -> bool:
        while self._wanted and self._wanted[0].gone:
            self._wanted.popleft()
        return bool(self._wanted)

    def _begun(self, memory: Place) -> Reading:
        entry = self._wanted.popleft()
        assert entry.file is not None
        entry.coming = True
        return Reading(entry, memory, entry.file.use())

    def _read(self, reading: list[Reading]) -> None:
        try:
            if not self._fetched(reading) and len(reading) > 1:
                for one in [one for one in reading if one.left and not one.astray]:
                    self._fetched([one])  # the disk does not say which it could not read
        finally:
            with contextlib.ExitStack() as landing:
                for one in reversed(reading):
                    if one.left:
                        landing.callback(self._landed, one)
        if any(one.astray for one in reading):
            self.end()

    def _fetched(self, reading: list[Reading]) -> bool:
        """False: the disk failed. Whoever has all of its chunks is told at once."""
        pieces = []
        for one in reading:
            own = [(one, chunk) for chunk in chunks(one.file.extents)]
            one.left, one.good = len(own), True
            pieces += own
        arriving = self._disk.read([(chunk.file_at, _part(one.memory, chunk)) for one, chunk in pieces])
        try:
            for index in arriving:
                one, chunk = pieces[index]
                if one.good and not one.entry.gone:
                    mark = one.marks[chunk.number]
                    one.good = self._sealing.open(one.entry.name, chunk.number, _part(one.memory, chunk), mark)
                one.left -= 1
                if not one.left:
                    self._landed(one)
                if self.closing:
                    break
        except DiskFailed as failure:
            if still_under_way(failure):
                for one in reading:
                    one.astray = bool(one.left)
            return False
        return True

    def _landed(self, one: Reading) -> None:
        entry = one.entry
        with contextlib.ExitStack() as telling, self._lock:
            one.file.leave()
            told, entry.waiting, entry.coming = entry.waiting, [], False
            lent: list[list[memoryview] | None] = [None] * len(told)
            _tell(telling, told, lent)
            lands = not (entry.gone or self.closing or one.left) and one.good
            if not lands and not one.astray:
                one.memory.leave()
            if entry.gone or self.closing:
                return
            if not lands:
                self._shelves.lost(entry, "failed" if one.left else "torn")
            else:
                self._shelves.landed(entry, one.memory)
                lent[:] = [self._shelves.lend(entry, self.bell) for _ in told]
                self._tally.spent("read", time.perf_counter() - one.begun_s)

    # --- writing ------------------------------------------------------------------------------------

    def _leaving(self) -> list[Writing]:
        with self._lock:
            self._shelves.settle()
            leaving = self._shelves.leaving(self._most_dirty_bytes, BATCH_BYTES)
            return [Writing(entry, entry.memory.use(), file, []) for entry, file in leaving if entry.memory]

    def _write(self, writing: list[Writing]) -> None:
        begun_s = time.perf_counter()
        failed = astray = False
        try:
            self._put_down(writing)
        except DiskFailed as failure:
            failed, astray = True, still_under_way(failure)
        again: list[Writing] = []
        with self._lock:
            for one in writing:
                one.memory.leave()
                if not failed and not one.entry.gone and not self.closing:
                    self._shelves.written(one.entry, one.file, one.marks)
                    self._tally.spent("write", time.perf_counter() - begun_s)
                    continue
                if failed and not one.entry.gone and len(writing) > 1:
                    assert one.entry.memory is not None
                    again.append(Writing(one.entry, one.entry.memory.use(), one.file, []))
                    continue
                one.file.leave()
                if failed and not one.entry.gone:
                    one.entry.stuck = True
                    self._tally.not_written()
        for one in again:  # the disk does not say which it could not write
            self._write([one])
        if astray:  # it only reads the memory, and the file is read no more: both may be another's
            self.end()

    def _put_down(self, writing: list[Writing]) -> None:
        under_way: Iterator[int] = iter(())
        for number, piece in enumerate(_slices(writing)):
            down = self._closed(piece, number)
            for _ in under_way:
                pass
            if self.closing:
                return
            self._between()
            under_way = self._disk.write(down)
            next(under_way, None)  # so that it begins
        for _ in under_way:
            pass

    def _closed(self, piece: list[tuple[Writing, Chunk]], number: int) -> list[tuple[int, memoryview]]:
        """Marks are made, and what is staged is staged, in the half that is not under way."""
        down, at = [], 0
        for one, chunk in piece:
            data = into = _part(one.memory, chunk)
            if self._sealing.staged:
                into = self._staging[number % 2][at : at + chunk.nbytes]
            one.marks.append(self._sealing.close(one.entry.name, chunk.number, data, into))
            down.append((chunk.file_at, into))
            at += chunk.nbytes
        return down

    def _between(self) -> None:
        """Nothing is under way for a moment."""
        while reading := self._coming():
            self._read(reading)


def _tell(telling: contextlib.ExitStack, told: Sequence[Done], lent: Sequence[list[memoryview] | None]) -> None:
    """In their order as `telling` is left, whatever happens before and whatever one of them does. `lent` may be
    filled until then."""

    def tell(number: int) -> None:
        told[number](lent[number])

    for number in reversed(range(len(told))):
        telling.callback(tell, number)


def _part(memory: Place, chunk: Chunk) -> memoryview:
    return memory.data[chunk.start : chunk.start + chunk.nbytes]


def _slices(writing: list[Writing]) -> Iterator[list[tuple[Writing, Chunk]]]:
    """Of at most SLICE_BYTES each. What was dropped meanwhile is not written any further."""
    piece: list[tuple[Writing, Chunk]] = []
    nbytes = 0
    for one in writing:
        for chunk in chunks(one.file.extents):
            if one.entry.gone:
                break
            if nbytes + chunk.nbytes > SLICE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append((one, chunk))
            nbytes += chunk.nbytes
    if piece:
        yield piece
