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

from asr_serve.engine.cache.entry import FileChunk, ReadCallback, StoreEntry, StorePlacement, file_chunks
from asr_serve.engine.cache.index import StoreIndex
from asr_serve.engine.cache.integrity import ChunkIntegrity, ChunkTag
from asr_serve.errors import DiskFailed
from asr_serve.transfer.disk import Disk, aligned_memory, still_under_way

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Of small entries, so much is read or written at once, to keep the disk busy."""
SLICE_BYTES = 8 << 20
"""Of what is written, so much is closed while the slice before is under way; then whoever wants to read may."""
MAX_DIRTY_SHARE = 0.5
"""Share of the memory above which what was long unused is written to the file."""
RETRY_S = 1.0
"""After so long the machine is asked again for memory that it had not."""


class DiskRead:
    """One entry on its way from the file. It holds both places by itself: the entry may be dropped meanwhile."""

    def __init__(self, entry: StoreEntry, memory: StorePlacement, file: StorePlacement) -> None:
        self.entry, self.memory, self.file, self.marks = entry, memory, file, entry.chunk_tags
        self.begun_s = time.perf_counter()
        self.remaining_chunks = -1
        self.verified = True
        self.abandoned = False
        """The disk gave it up while it was under way, and may write into the memory at any time: nobody else gets
        that."""


class DiskWrite(NamedTuple):
    entry: StoreEntry
    memory: StorePlacement
    file: StorePlacement
    chunk_tags: list[ChunkTag]


class DiskWorker:
    """`lock` is held for the shelves, never while the disk works or somebody is told."""

    def __init__(self, shelves: StoreIndex, lock: threading.Lock, disk: Disk, sealing: ChunkIntegrity) -> None:
        self._index, self._lock, self._disk, self._integrity = shelves, lock, disk, sealing
        self._stats = shelves.stats
        self._read_queue: deque[StoreEntry] = deque()
        self._staging = [aligned_memory(SLICE_BYTES), aligned_memory(SLICE_BYTES)] if sealing.needs_staging else []
        self.wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.pressed = False
        """Somebody found no room: everything that can be is written, until somebody finds it."""
        self.closing = False
        self._short = False
        """There was no memory for one more beside the rest."""

    # --- any thread, under the lock -----------------------------------------------------------------

    def request_read(self, entry: StoreEntry) -> None:
        """Somebody waits for it."""
        if len(entry.read_callbacks) == 1:
            self._read_queue.append(entry)
            self.wakeup.put(None)

    @property
    def has_work(self) -> bool:
        return not self.closing and (bool(self._read_queue) or self._index.dirty_bytes > self._most_dirty_bytes)

    @property
    def _most_dirty_bytes(self) -> int:
        return 0 if self.pressed or self._read_queue else int(self._index.arena.nbytes * MAX_DIRTY_SHARE)

    # --- the disk's thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Until `closing`, which the bell tells."""
        try:
            while not self.closing:
                if not self.run_once():
                    with contextlib.suppress(queue.Empty):
                        self.wakeup.get(timeout=RETRY_S if self._short else None)
        finally:
            if not self.closing:  # what is no failure of the disk: memory alone is left, and somebody has to know
                log.error("the disk's thread has failed: what sleeps in the file is lost", exc_info=True)
            self.fail_readers()

    def run_once(self) -> bool:
        """One batch of reads, or of writes. False: there is nothing to do, or no room for it now."""
        if self.closing:
            return False
        reading = self._admit_reads()
        if reading:
            self._read(reading)
            return True
        writing = self._pick_writes()
        if writing:
            self._write(writing)
            return True
        reading = self._force_room()
        if reading:
            self._read(reading)
        return bool(reading)

    def fail_readers(self) -> None:
        """Nothing is read any more: everybody who waits is told so."""
        with contextlib.ExitStack() as telling, self._lock:
            self.closing = True
            for entry in self._index.entries.values():
                _notify_readers(telling, entry.read_callbacks, [None] * len(entry.read_callbacks))
                entry.read_callbacks = []

    # --- reading ------------------------------------------------------------------------------------

    def _admit_reads(self) -> list[DiskRead]:
        """In the order in which they were asked for: nobody passes one that there is no room for yet."""
        reading: list[DiskRead] = []
        nbytes = 0
        with self._lock:
            self._index.reclaim_returned()
            while self._next_read() and nbytes < BATCH_BYTES:
                memory = self._index.allocate_memory(self._read_queue[0].nbytes, drop=False)
                if memory is None:
                    break
                reading.append(self._start_read(memory))
                nbytes += reading[-1].entry.nbytes
        return reading

    def _force_room(self) -> list[DiskRead]:
        """Nothing could be written to make room: something is dropped, or the next one lies beside the rest."""
        with self._lock:
            was_short, self._short = self._short, False
            if not self._next_read():
                return []
            entry = self._read_queue[0]
            try:
                memory = self._index.allocate_memory(entry.nbytes, drop=True) or self._index.allocate_reserve(
                    entry
                )
            except OSError as error:  # it is not lost: it waits until the machine has memory for it
                self._short = True
                if not was_short:
                    log.warning("no %d bytes of memory for what is to wake, it waits: %s", entry.nbytes, error)
                return []
            return [] if memory is None else [self._start_read(memory)]

    def _next_read(self) -> bool:
        while self._read_queue and self._read_queue[0].removed:
            self._read_queue.popleft()
        return bool(self._read_queue)

    def _start_read(self, memory: StorePlacement) -> DiskRead:
        entry = self._read_queue.popleft()
        assert entry.file is not None
        entry.loading = True
        return DiskRead(entry, memory, entry.file.acquire())

    def _read(self, reading: list[DiskRead]) -> None:
        try:
            if not self._read_chunks(reading) and len(reading) > 1:
                for one in [one for one in reading if one.remaining_chunks and not one.abandoned]:
                    self._read_chunks([one])  # the disk does not say which it could not read
        finally:
            with contextlib.ExitStack() as landing:
                for one in reversed(reading):
                    if one.remaining_chunks:
                        landing.callback(self._finish_read, one)
        if any(one.abandoned for one in reading):
            self.fail_readers()

    def _read_chunks(self, reading: list[DiskRead]) -> bool:
        """False: the disk failed. Whoever has all of its chunks is told at once."""
        pieces = []
        for one in reading:
            own = [(one, chunk) for chunk in file_chunks(one.file.extents)]
            one.remaining_chunks, one.verified = len(own), True
            pieces += own
        arriving = self._disk.read([(chunk.file_at, _chunk_view(one.memory, chunk)) for one, chunk in pieces])
        try:
            for index in arriving:
                one, chunk = pieces[index]
                if one.verified and not one.entry.removed:
                    mark = one.marks[chunk.number]
                    one.verified = self._integrity.open_chunk(
                        one.entry.name, chunk.number, _chunk_view(one.memory, chunk), mark
                    )
                one.remaining_chunks -= 1
                if not one.remaining_chunks:
                    self._finish_read(one)
                if self.closing:
                    break
        except DiskFailed as failure:
            if still_under_way(failure):
                for one in reading:
                    one.abandoned = bool(one.remaining_chunks)
            return False
        return True

    def _finish_read(self, one: DiskRead) -> None:
        entry = one.entry
        with contextlib.ExitStack() as telling, self._lock:
            one.file.release()
            told, entry.read_callbacks, entry.loading = entry.read_callbacks, [], False
            lent: list[list[memoryview] | None] = [None] * len(told)
            _notify_readers(telling, told, lent)
            lands = not (entry.removed or self.closing or one.remaining_chunks) and one.verified
            if not lands and not one.abandoned:
                one.memory.release()
            if entry.removed or self.closing:
                return
            if not lands:
                self._index.record_loss(entry, "failed" if one.remaining_chunks else "torn")
            else:
                self._index.mark_loaded(entry, one.memory)
                lent[:] = [self._index.lend_views(entry, self.wakeup) for _ in told]
                self._stats.record_time("read", time.perf_counter() - one.begun_s)

    # --- writing ------------------------------------------------------------------------------------

    def _pick_writes(self) -> list[DiskWrite]:
        with self._lock:
            self._index.reclaim_returned()
            leaving = self._index.select_writes(self._most_dirty_bytes, BATCH_BYTES)
            return [DiskWrite(entry, entry.memory.acquire(), file, []) for entry, file in leaving if entry.memory]

    def _write(self, writing: list[DiskWrite]) -> None:
        begun_s = time.perf_counter()
        failed = astray = False
        try:
            self._finish_write(writing)
        except DiskFailed as failure:
            failed, astray = True, still_under_way(failure)
        again: list[DiskWrite] = []
        with self._lock:
            for one in writing:
                one.memory.release()
                if not failed and not one.entry.removed and not self.closing:
                    self._index.mark_written(one.entry, one.file, one.chunk_tags)
                    self._stats.record_time("write", time.perf_counter() - begun_s)
                    continue
                if failed and not one.entry.removed and len(writing) > 1:
                    assert one.entry.memory is not None
                    again.append(DiskWrite(one.entry, one.entry.memory.acquire(), one.file, []))
                    continue
                one.file.release()
                if failed and not one.entry.removed:
                    one.entry.write_failed = True
                    self._stats.record_unwritten()
        for one in again:  # the disk does not say which it could not write
            self._write([one])
        if astray:  # it only reads the memory, and the file is read no more: both may be another's
            self.fail_readers()

    def _finish_write(self, writing: list[DiskWrite]) -> None:
        under_way: Iterator[int] = iter(())
        for number, piece in enumerate(_write_slices(writing)):
            down = self._seal_chunks(piece, number)
            for _ in under_way:
                pass
            if self.closing:
                return
            self._yield_lock()
            under_way = self._disk.write(down)
            next(under_way, None)  # so that it begins
        for _ in under_way:
            pass

    def _seal_chunks(self, piece: list[tuple[DiskWrite, FileChunk]], number: int) -> list[tuple[int, memoryview]]:
        """Marks are made, and what is staged is staged, in the half that is not under way."""
        down, at = [], 0
        for one, chunk in piece:
            data = into = _chunk_view(one.memory, chunk)
            if self._integrity.needs_staging:
                into = self._staging[number % 2][at : at + chunk.nbytes]
            one.chunk_tags.append(self._integrity.seal_chunk(one.entry.name, chunk.number, data, into))
            down.append((chunk.file_at, into))
            at += chunk.nbytes
        return down

    def _yield_lock(self) -> None:
        """Nothing is under way for a moment."""
        while reading := self._admit_reads():
            self._read(reading)


def _notify_readers(
    telling: contextlib.ExitStack, told: Sequence[ReadCallback], lent: Sequence[list[memoryview] | None]
) -> None:
    """In their order as `telling` is left, whatever happens before and whatever one of them does. `lent` may be
    filled until then."""

    def tell(number: int) -> None:
        told[number](lent[number])

    for number in reversed(range(len(told))):
        telling.callback(tell, number)


def _chunk_view(memory: StorePlacement, chunk: FileChunk) -> memoryview:
    return memory.data[chunk.start : chunk.start + chunk.nbytes]


def _write_slices(writing: list[DiskWrite]) -> Iterator[list[tuple[DiskWrite, FileChunk]]]:
    """Of at most SLICE_BYTES each. What was dropped meanwhile is not written any further."""
    piece: list[tuple[DiskWrite, FileChunk]] = []
    nbytes = 0
    for one in writing:
        for chunk in file_chunks(one.file.extents):
            if one.entry.removed:
                break
            if nbytes + chunk.nbytes > SLICE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append((one, chunk))
            nbytes += chunk.nbytes
    if piece:
        yield piece
