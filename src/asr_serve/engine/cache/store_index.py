"""Index of the tiered store: where entries lie, what is evicted for what, and in which order.

Free of threads and disks: callers hold the store's lock.

    dirty    in memory only              written when long unused; dropped for others unless pinned
    clean    in memory and in the file   its memory can be reused at once
    neither  in the file only            dropped for others unless pinned
"""

from __future__ import annotations

import queue
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from asr_serve.engine.cache.block_allocator import BlockAllocator, BlockExtent
from asr_serve.engine.cache.integrity import ChunkTag
from asr_serve.engine.cache.store_entry import EMPTY_VIEW, ReadCallback, StoreEntry, StorePlacement
from asr_serve.engine.cache.store_stats import Lost, TieredStoreStats
from asr_serve.transfer.disk import BLOCK, aligned_memory


class StoreIndex:
    """Entries by name, and by state in LRU order: each begins with the entry used least recently."""

    def __init__(self, memory: memoryview, file_bytes: int, tally: TieredStoreStats) -> None:
        """`memory`: aligned, a whole number of blocks."""
        self.memory, self.stats = memory, tally
        self.arena, self.file = BlockAllocator(len(memory)), BlockAllocator(file_bytes // BLOCK * BLOCK)
        self.entries: dict[bytes, StoreEntry] = {}
        self.dirty: OrderedDict[StoreEntry, None] = OrderedDict()
        self.clean: OrderedDict[StoreEntry, None] = OrderedDict()
        self.on_disk: OrderedDict[StoreEntry, None] = OrderedDict()
        """Entries in the file that are not pinned."""
        self.dirty_bytes = self.pinned_in_file = 0
        self.reserve: tuple[StoreEntry, StorePlacement] | None = None
        """Entry whose memory is outside the arena, and that memory, until nobody uses it."""
        self.returned: queue.SimpleQueue[StorePlacement] = queue.SimpleQueue()
        """Placements whose last view is gone. Views are released anywhere, even while this thread holds the
        lock."""
        self._uses = 0

    # --- adding and removing ------------------------------------------------------------------------

    def add(self, entry: StoreEntry, memory: StorePlacement) -> None:
        """Adds a new entry, whose memory is filled."""
        entry.memory = memory
        self.entries[entry.name] = entry
        self.dirty[entry] = None
        self.dirty_bytes += entry.nbytes
        self.touch(entry)

    def touch(self, entry: StoreEntry) -> None:
        self._uses += 1
        entry.last_used = self._uses
        for order in (self.dirty, self.clean, self.on_disk):
            if entry in order:
                order.move_to_end(entry)

    def mark_written(self, entry: StoreEntry, file: StorePlacement, marks: list[ChunkTag]) -> None:
        entry.file, entry.chunk_tags = file, marks
        del self.dirty[entry]
        self.dirty_bytes -= entry.nbytes
        self.clean[entry] = None
        if entry.pinned:
            self.pinned_in_file += 1
        else:
            self.on_disk[entry] = None
        self.stats.record_move("host", "disk")

    def mark_loaded(self, entry: StoreEntry, memory: StorePlacement) -> None:
        """Records that the entry was read into `memory` and verified."""
        entry.memory = memory
        self.clean[entry] = None
        self.stats.record_move("disk", "host")

    def remove(self, entry: StoreEntry) -> list[ReadCallback]:
        """Removes the entry. Returns the callbacks that wait for it, which the caller calls with None; none while
        it is being read, when the reader calls them."""
        del self.entries[entry.name]
        entry.removed = True
        if entry in self.dirty:
            self.dirty_bytes -= entry.nbytes
        if entry.file is not None and entry.pinned:
            self.pinned_in_file -= 1
        for order in (self.dirty, self.clean, self.on_disk):
            order.pop(entry, None)
        for place in (entry.memory, entry.file):
            if place is not None:
                place.release()
        entry.memory = entry.file = None
        callbacks = [] if entry.loading else entry.read_callbacks
        if not entry.loading:
            entry.read_callbacks = []
        return callbacks

    def record_loss(self, entry: StoreEntry, reason: Lost) -> None:
        """Removes an entry that nobody waits for, or whose reader notifies the others, and counts the loss."""
        self.stats.record_loss(reason)
        callbacks = self.remove(entry)
        assert not callbacks, "somebody waits for it"

    def close(self) -> None:
        """Removes all entries. The memory is freed with the last view of it: placements released from here on
        enter a queue that nothing here references."""
        for entry in list(self.entries.values()):
            self.remove(entry)
        self.reclaim_returned()
        self.memory, self.returned = EMPTY_VIEW, queue.SimpleQueue()

    # --- views --------------------------------------------------------------------------------------

    def lend_views(self, entry: StoreEntry, bell: queue.SimpleQueue[None] | None) -> list[memoryview]:
        """Returns views of the entry's parts. Their memory is not reused until the last of them is gone, even if
        the entry is dropped. `bell` gets an item then."""
        assert entry.memory is not None
        self.stats.record_move("host", "device")
        array = np.frombuffer(entry.memory.data, np.uint8)  # a new object, whose end can be observed
        weakref.finalize(array, _on_view_released, self.returned, bell, entry.memory.acquire()).atexit = False
        whole = array.data
        return [whole[part.at : part.end] for part in entry.parts]

    def reclaim_returned(self) -> None:
        """Releases placements whose views are gone."""
        while not self.returned.empty():
            self.returned.get().release()
        if self.reserve is not None:
            entry, place = self.reserve
            if entry.memory is place and place.users == 1:
                self._release_memory(entry)
            if not place.users:
                self.reserve = None

    # --- room in memory -----------------------------------------------------------------------------

    def allocate_memory(self, nbytes: int, *, drop: bool) -> StorePlacement | None:
        """Allocates memory, evicting clean entries for it; with `drop` also dirty entries that are not pinned."""
        extent = self.arena.allocate(nbytes) or self._evict_memory(nbytes, drop)
        return None if extent is None else StorePlacement(self.arena, (extent,), self.memory[extent.at : extent.end])

    def allocate_reserve(self, entry: StoreEntry) -> StorePlacement | None:
        """Allocates memory outside the arena, for one entry at a time. Memory and file may both be full of pinned
        entries; without this none in the file could ever be read again."""
        if self.reserve is not None:
            return None
        place = StorePlacement(
            BlockAllocator(entry.nbytes, ()), (BlockExtent(0, entry.nbytes),), aligned_memory(entry.nbytes)
        )
        self.reserve = entry, place
        return place

    def _evict_memory(self, nbytes: int, drop: bool) -> BlockExtent | None:
        """Evicts only entries that overlap the extent, and none if no extent can be made."""
        trial, candidates = self.arena.copy(), []
        for entry, extent in self._evictable(drop):
            candidates.append((entry, extent))
            hole = trial.free_extent(extent)
            if hole.nbytes >= nbytes:
                break
        else:
            return None
        for entry, extent in candidates:
            if extent.at < hole.at + nbytes and hole.at < extent.end:
                self._release_memory(entry)
        return self.arena.allocate_at(hole.at, nbytes)

    def _evictable(self, drop: bool) -> Iterator[tuple[StoreEntry, BlockExtent]]:
        reserve = self.reserve[1] if self.reserve is not None else None
        for order in (self.clean, self.dirty) if drop else (self.clean,):
            for entry in order:
                place = entry.memory
                assert place is not None
                if place is not reserve and place.users == 1 and (order is self.clean or not entry.pinned):
                    yield entry, place.extents[0]

    def _release_memory(self, entry: StoreEntry) -> None:
        """Drops the entry's memory; an entry that is not in the file is lost."""
        assert entry.memory is not None
        if entry.file is None:
            self.record_loss(entry, "room")
            return
        del self.clean[entry]
        entry.memory.release()
        entry.memory = None

    # --- room in the file ---------------------------------------------------------------------------

    def select_writes(self, most_dirty_bytes: int, batch_bytes: int) -> list[tuple[StoreEntry, StorePlacement]]:
        """Selects entries to write, with their places in the file: until no more than `most_dirty_bytes` stay
        dirty, or one batch is full."""
        selected, selected_bytes = [], 0
        for entry in self.dirty:
            if selected_bytes >= batch_bytes or self.dirty_bytes - selected_bytes <= most_dirty_bytes:
                break
            assert entry.memory is not None
            if entry.write_failed or entry.memory.users > 1:
                continue
            file = self._allocate_file(entry)
            if file is not None:
                selected.append((entry, file))
                selected_bytes += entry.nbytes
        return selected

    def _allocate_file(self, entry: StoreEntry) -> StorePlacement | None:
        victims, free = [], self.file.free
        for other in self.on_disk if free < entry.nbytes else ():
            assert other.file is not None
            if free >= entry.nbytes or (other.last_used > entry.last_used and not entry.pinned):
                break
            if not other.read_callbacks and not other.loading and other.file.users == 1:
                victims.append(other)
                free += other.nbytes
        if free < entry.nbytes:
            return None
        for other in victims:
            self.record_loss(other, "room")
        extents = self.file.allocate_fragments(entry.nbytes)
        assert extents is not None
        return StorePlacement(self.file, extents)

    # --- figures ------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        reserve = self.reserve
        return {"host": self.arena.used + (reserve[0].nbytes if reserve else 0), "disk": self.file.used}

    def count(self) -> dict[str, int]:
        return {"host": len(self.dirty) + len(self.clean), "disk": self.pinned_in_file + len(self.on_disk)}

    def check_invariants(self) -> None:
        """Asserts that orders and counters agree with the entries."""
        self.arena.check_invariants()
        self.file.check_invariants()
        orders: Sequence[OrderedDict[StoreEntry, None]] = (self.dirty, self.clean, self.on_disk)
        assert all(self.entries.get(entry.name) is entry for order in orders for entry in order)
        for entry in self.entries.values():
            assert not entry.removed
            assert (entry in self.dirty) == (entry.memory is not None and entry.file is None)
            assert (entry in self.clean) == (entry.memory is not None and entry.file is not None)
            assert (entry in self.on_disk) == (entry.file is not None and not entry.pinned)
            assert entry.memory is not None or entry.file is not None
        assert self.dirty_bytes == sum(entry.nbytes for entry in self.dirty)
        assert self.pinned_in_file == sum(entry.pinned and entry.file is not None for entry in self.entries.values())


def _on_view_released(
    returned: queue.SimpleQueue[StorePlacement], bell: queue.SimpleQueue[None] | None, place: StorePlacement
) -> None:
    """Finalizer of a lent view. It may run inside any other call, so it takes no lock."""
    returned.put(place)
    if bell is not None:
        bell.put(None)
