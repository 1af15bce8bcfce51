"""Disk worker of the tiered store: writes what was long unused, and reads what is requested.

Reads go first, also between two slices of a large write. `run_once` does all of the work, a piece at a time, so
that a test can choose what happens between two pieces.
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

from asr_serve.engine.cache.integrity import ChunkIntegrity, ChunkTag
from asr_serve.engine.cache.store_entry import FileChunk, ReadCallback, StoreEntry, StorePlacement, file_chunks
from asr_serve.engine.cache.store_index import StoreIndex
from asr_serve.errors import DiskFailed
from asr_serve.transfer.disk import Disk, aligned_memory, still_under_way

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Bytes of small entries that are read or written at once, to keep the disk busy."""
SLICE_BYTES = 8 << 20
"""Bytes of a write that are sealed while the slice before is under way; reads may go between two slices."""
MAX_DIRTY_SHARE = 0.5
"""Share of the memory that may be dirty before what was long unused is written to the file."""
RETRY_S = 1.0
"""Seconds until memory that the machine lacked is requested again."""


class DiskRead:
    """Read of one entry that is under way. It uses both placements itself: the entry may be dropped meanwhile."""

    def __init__(self, entry: StoreEntry, memory: StorePlacement, file: StorePlacement) -> None:
        self.entry, self.memory, self.file, self.marks = entry, memory, file, entry.chunk_tags
        self.begun_s = time.perf_counter()
        self.remaining_chunks = -1
        self.verified = True
        self.abandoned = False
        """Whether the disk gave up while the read was under way, and may still write into the memory, which then
        is never reused."""


class DiskWrite(NamedTuple):
    entry: StoreEntry
    memory: StorePlacement
    file: StorePlacement
    chunk_tags: list[ChunkTag]


class DiskWorker:
    """Reads and writes of the file. The lock guards the index; no disk work or callback runs under it."""

    def __init__(self, shelves: StoreIndex, lock: threading.Lock, disk: Disk, sealing: ChunkIntegrity) -> None:
        self._index, self._lock, self._disk, self._integrity = shelves, lock, disk, sealing
        self._stats = shelves.stats
        self._read_queue: deque[StoreEntry] = deque()
        self._staging = [aligned_memory(SLICE_BYTES), aligned_memory(SLICE_BYTES)] if sealing.needs_staging else []
        self.wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.pressed = False
        """Whether a `put` found no room: everything that can be is written, until one succeeds."""
        self.closing = False
        self._short = False
        """Whether the machine lacked the memory for a read outside the arena."""

    # --- any thread, under the lock -----------------------------------------------------------------

    def request_read(self, entry: StoreEntry) -> None:
        """Queues a read of the entry with its first callback."""
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
        """Works until `closing` is set and `wakeup` has an item."""
        try:
            while not self.closing:
                if not self.run_once():
                    with contextlib.suppress(queue.Empty):
                        self.wakeup.get(timeout=RETRY_S if self._short else None)
        finally:
            if not self.closing:  # not a failure of the disk: only memory is left, and the operator has to know
                log.error("the disk's thread has failed: what was offloaded to the file is lost", exc_info=True)
            self.fail_readers()

    def run_once(self) -> bool:
        """Does one batch of reads, or of writes. Returns False if there is nothing to do, or no room for it
        now."""
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
        """Stops reading, and calls all callbacks that wait with None."""
        with contextlib.ExitStack() as callbacks, self._lock:
            self.closing = True
            for entry in self._index.entries.values():
                _notify_readers(callbacks, entry.read_callbacks, [None] * len(entry.read_callbacks))
                entry.read_callbacks = []

    # --- reading ------------------------------------------------------------------------------------

    def _admit_reads(self) -> list[DiskRead]:
        """Starts reads in the order of their requests: none passes one that there is no room for yet."""
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
        """Makes room for the next read where nothing could be written: drops an entry, or uses memory outside the
        arena."""
        with self._lock:
            was_short, self._short = self._short, False
            if not self._next_read():
                return []
            entry = self._read_queue[0]
            try:
                memory = self._index.allocate_memory(entry.nbytes, drop=True) or self._index.allocate_reserve(entry)
            except OSError as error:  # not lost: the read waits until the machine has memory
                self._short = True
                if not was_short:
                    log.warning("no %d bytes of memory for what is to be restored, it waits: %s", entry.nbytes, error)
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
                for read in [read for read in reading if read.remaining_chunks and not read.abandoned]:
                    self._read_chunks([read])  # the disk does not say which it could not read
        finally:
            with contextlib.ExitStack() as finishing:
                for read in reversed(reading):
                    if read.remaining_chunks:
                        finishing.callback(self._finish_read, read)
        if any(read.abandoned for read in reading):
            self.fail_readers()

    def _read_chunks(self, reading: list[DiskRead]) -> bool:
        """Reads all chunks; entries that have all of theirs finish at once. Returns False if the disk failed."""
        pieces = []
        for read in reading:
            chunks = [(read, chunk) for chunk in file_chunks(read.file.extents)]
            read.remaining_chunks, read.verified = len(chunks), True
            pieces += chunks
        completed = self._disk.read([(chunk.file_at, _chunk_view(read.memory, chunk)) for read, chunk in pieces])
        try:
            for index in completed:
                read, chunk = pieces[index]
                if read.verified and not read.entry.removed:
                    tag = read.marks[chunk.number]
                    read.verified = self._integrity.open_chunk(
                        read.entry.name, chunk.number, _chunk_view(read.memory, chunk), tag
                    )
                read.remaining_chunks -= 1
                if not read.remaining_chunks:
                    self._finish_read(read)
                if self.closing:
                    break
        except DiskFailed as failure:
            if still_under_way(failure):
                for read in reading:
                    read.abandoned = bool(read.remaining_chunks)
            return False
        return True

    def _finish_read(self, one: DiskRead) -> None:
        entry = one.entry
        with contextlib.ExitStack() as notifying, self._lock:
            one.file.release()
            callbacks, entry.read_callbacks, entry.loading = entry.read_callbacks, [], False
            views: list[list[memoryview] | None] = [None] * len(callbacks)
            _notify_readers(notifying, callbacks, views)
            loaded = not (entry.removed or self.closing or one.remaining_chunks) and one.verified
            if not loaded and not one.abandoned:
                one.memory.release()
            if entry.removed or self.closing:
                return
            if not loaded:
                self._index.record_loss(entry, "failed" if one.remaining_chunks else "corrupted")
            else:
                self._index.mark_loaded(entry, one.memory)
                views[:] = [self._index.lend_views(entry, self.wakeup) for _ in callbacks]
                self._stats.record_time("read", time.perf_counter() - one.begun_s)

    # --- writing ------------------------------------------------------------------------------------

    def _pick_writes(self) -> list[DiskWrite]:
        with self._lock:
            self._index.reclaim_returned()
            selected = self._index.select_writes(self._most_dirty_bytes, BATCH_BYTES)
            return [DiskWrite(entry, entry.memory.acquire(), file, []) for entry, file in selected if entry.memory]

    def _write(self, writing: list[DiskWrite]) -> None:
        begun_s = time.perf_counter()
        failed = unfinished = False
        try:
            self._finish_write(writing)
        except DiskFailed as failure:
            failed, unfinished = True, still_under_way(failure)
        retries: list[DiskWrite] = []
        with self._lock:
            for write in writing:
                write.memory.release()
                if not failed and not write.entry.removed and not self.closing:
                    self._index.mark_written(write.entry, write.file, write.chunk_tags)
                    self._stats.record_time("write", time.perf_counter() - begun_s)
                    continue
                if failed and not write.entry.removed and len(writing) > 1:
                    assert write.entry.memory is not None
                    retries.append(DiskWrite(write.entry, write.entry.memory.acquire(), write.file, []))
                    continue
                write.file.release()
                if failed and not write.entry.removed:
                    write.entry.write_failed = True
                    self._stats.record_unwritten()
        for write in retries:  # the disk does not say which it could not write
            self._write([write])
        if unfinished:  # it only reads the memory, and the file is read no more: both may be reused
            self.fail_readers()

    def _finish_write(self, writing: list[DiskWrite]) -> None:
        under_way: Iterator[int] = iter(())
        for number, piece in enumerate(_write_slices(writing)):
            buffers = self._seal_chunks(piece, number)
            for _ in under_way:
                pass
            if self.closing:
                return
            self._yield_lock()
            under_way = self._disk.write(buffers)
            next(under_way, None)  # so that it begins
        for _ in under_way:
            pass

    def _seal_chunks(self, piece: list[tuple[DiskWrite, FileChunk]], number: int) -> list[tuple[int, memoryview]]:
        """Computes tags, and stages chunks, where needed, in the buffer that is not under way."""
        buffers, at = [], 0
        for write, chunk in piece:
            data = target = _chunk_view(write.memory, chunk)
            if self._integrity.needs_staging:
                target = self._staging[number % 2][at : at + chunk.nbytes]
            write.chunk_tags.append(self._integrity.seal_chunk(write.entry.name, chunk.number, data, target))
            buffers.append((chunk.file_at, target))
            at += chunk.nbytes
        return buffers

    def _yield_lock(self) -> None:
        """Serves reads while no write is under way."""
        while reading := self._admit_reads():
            self._read(reading)


def _notify_readers(
    telling: contextlib.ExitStack, callbacks: Sequence[ReadCallback], lent: Sequence[list[memoryview] | None]
) -> None:
    """Registers callbacks that run in order when `telling` exits, whatever happens before and whatever one of them
    raises. `lent` may be filled until then."""

    def notify(number: int) -> None:
        callbacks[number](lent[number])

    for number in reversed(range(len(callbacks))):
        telling.callback(notify, number)


def _chunk_view(memory: StorePlacement, chunk: FileChunk) -> memoryview:
    return memory.data[chunk.start : chunk.start + chunk.nbytes]


def _write_slices(writing: list[DiskWrite]) -> Iterator[list[tuple[DiskWrite, FileChunk]]]:
    """Yields slices of at most SLICE_BYTES. An entry that is dropped meanwhile is not written any further."""
    piece: list[tuple[DiskWrite, FileChunk]] = []
    nbytes = 0
    for write in writing:
        for chunk in file_chunks(write.file.extents):
            if write.entry.removed:
                break
            if nbytes + chunk.nbytes > SLICE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append((write, chunk))
            nbytes += chunk.nbytes
    if piece:
        yield piece
