"""Where everything that is asleep lies, what may be given up for what, and in which order.

Knows neither threads nor disks: whoever calls holds the tiers' lock.

    dirty    in memory only                  written when long unused; dropped, where it need not be kept
    clean    in memory, and the same in the file    its memory is there for whoever wants it, at once
    neither  in the file only                                     dropped, where it need not be kept
"""

from __future__ import annotations

import queue
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from asr_serve.engine.tiers.entries import NOTHING, Done, Entry, Place
from asr_serve.engine.tiers.extents import Extent, Extents
from asr_serve.engine.tiers.sealing import Mark
from asr_serve.engine.tiers.tally import Lost, Tally
from asr_serve.transfer.disk import BLOCK, aligned


class Shelves:
    """Each of the orders begins with what was used least recently."""

    def __init__(self, memory: memoryview, file_bytes: int, tally: Tally) -> None:
        """`memory`: aligned, of whole blocks."""
        self.memory, self.tally = memory, tally
        self.arena, self.file = Extents(len(memory)), Extents(file_bytes // BLOCK * BLOCK)
        self.entries: dict[bytes, Entry] = {}
        self.dirty: OrderedDict[Entry, None] = OrderedDict()
        self.clean: OrderedDict[Entry, None] = OrderedDict()
        self.filed: OrderedDict[Entry, None] = OrderedDict()
        """Those with a place in the file that need not be kept."""
        self.dirty_bytes = self.kept_in_file = 0
        self.beside: tuple[Entry, Place] | None = None
        """The one whose memory is not of the arena, as long as anybody uses that."""
        self.returned: queue.SimpleQueue[Place] = queue.SimpleQueue()
        """What is not looked at any more. Whoever lets go may be anywhere, within this lock too."""
        self._uses = 0

    # --- what comes and goes ------------------------------------------------------------------------

    def add(self, entry: Entry, memory: Place) -> None:
        """New, and filled."""
        entry.memory = memory
        self.entries[entry.name] = entry
        self.dirty[entry] = None
        self.dirty_bytes += entry.nbytes
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        self._uses += 1
        entry.used = self._uses
        for order in (self.dirty, self.clean, self.filed):
            if entry in order:
                order.move_to_end(entry)

    def written(self, entry: Entry, file: Place, marks: list[Mark]) -> None:
        entry.file, entry.marks = file, marks
        del self.dirty[entry]
        self.dirty_bytes -= entry.nbytes
        self.clean[entry] = None
        if entry.keep:
            self.kept_in_file += 1
        else:
            self.filed[entry] = None
        self.tally.moved("host", "disk")

    def landed(self, entry: Entry, memory: Place) -> None:
        """Read, and right."""
        entry.memory = memory
        self.clean[entry] = None
        self.tally.moved("disk", "host")

    def remove(self, entry: Entry) -> list[Done]:
        """It is gone. Who is to be told that there is nothing for them: those who wait for it, unless it is being
        read, when the reader tells them."""
        del self.entries[entry.name]
        entry.gone = True
        if entry in self.dirty:
            self.dirty_bytes -= entry.nbytes
        if entry.file is not None and entry.keep:
            self.kept_in_file -= 1
        for order in (self.dirty, self.clean, self.filed):
            order.pop(entry, None)
        for place in (entry.memory, entry.file):
            if place is not None:
                place.leave()
        entry.memory = entry.file = None
        told = [] if entry.coming else entry.waiting
        if not entry.coming:
            entry.waiting = []
        return told

    def lost(self, entry: Entry, reason: Lost) -> None:
        """Of one that nobody waits for, or whose reader tells them."""
        self.tally.lost(reason)
        told = self.remove(entry)
        assert not told, "somebody waits for it"

    def close(self) -> None:
        """Nothing is kept any more. The memory goes with the last view of it: what is let go from here on is told
        to nobody who would hold it."""
        for entry in list(self.entries.values()):
            self.remove(entry)
        self.settle()
        self.memory, self.returned = NOTHING, queue.SimpleQueue()

    # --- who looks at what --------------------------------------------------------------------------

    def lend(self, entry: Entry, bell: queue.SimpleQueue[None] | None) -> list[memoryview]:
        """Its parts. Their memory is nobody else's until the last view of them is gone, also if it is dropped."""
        assert entry.memory is not None
        self.tally.moved("host", "device")
        lent = np.frombuffer(entry.memory.data, np.uint8)  # of its own, to see it go
        weakref.finalize(lent, _let_go, self.returned, bell, entry.memory.use()).atexit = False
        whole = lent.data
        return [whole[part.at : part.end] for part in entry.parts]

    def settle(self) -> None:
        """Take back what is not looked at any more."""
        while not self.returned.empty():
            self.returned.get().leave()
        if self.beside is not None:
            entry, place = self.beside
            if entry.memory is place and place.users == 1:
                self._forget(entry)
            if not place.users:
                self.beside = None

    # --- room in memory -----------------------------------------------------------------------------

    def room(self, nbytes: int, *, drop: bool) -> Place | None:
        """Memory: free, or what clean entries hold; with `drop` also what dirty ones hold that are not kept."""
        extent = self.arena.take(nbytes) or self._cleared(nbytes, drop)
        return None if extent is None else Place(self.arena, (extent,), self.memory[extent.at : extent.end])

    def room_beside(self, entry: Entry) -> Place | None:
        """Memory of its own, for one entry at a time, which nothing can make room for: memory and file may both be
        full of what must be kept, and then none of it would ever be read again."""
        if self.beside is not None:
            return None
        place = Place(Extents(entry.nbytes, ()), (Extent(0, entry.nbytes),), aligned(entry.nbytes))
        self.beside = entry, place
        return place

    def _cleared(self, nbytes: int, drop: bool) -> Extent | None:
        """Only what lies in the way is given up, and nothing where that would not do."""
        trial, tried = self.arena.copy(), []
        for entry, extent in self._givable(drop):
            tried.append((entry, extent))
            hole = trial.give(extent)
            if hole.nbytes >= nbytes:
                break
        else:
            return None
        for entry, extent in tried:
            if extent.at < hole.at + nbytes and hole.at < extent.end:
                self._forget(entry)
        return self.arena.take_at(hole.at, nbytes)

    def _givable(self, drop: bool) -> Iterator[tuple[Entry, Extent]]:
        beside = self.beside[1] if self.beside is not None else None
        for order in (self.clean, self.dirty) if drop else (self.clean,):
            for entry in order:
                place = entry.memory
                assert place is not None
                if place is not beside and place.users == 1 and (order is self.clean or not entry.keep):
                    yield entry, place.extents[0]

    def _forget(self, entry: Entry) -> None:
        """In memory."""
        assert entry.memory is not None
        if entry.file is None:
            self.lost(entry, "room")
            return
        del self.clean[entry]
        entry.memory.leave()
        entry.memory = None

    # --- room in the file ---------------------------------------------------------------------------

    def leaving(self, most_dirty_bytes: int, batch_bytes: int) -> list[tuple[Entry, Place]]:
        """What is to be written next, and where to: until no more than so much is dirty, or for one batch."""
        leaving, planned = [], 0
        for entry in self.dirty:
            if planned >= batch_bytes or self.dirty_bytes - planned <= most_dirty_bytes:
                break
            assert entry.memory is not None
            if entry.stuck or entry.memory.users > 1:
                continue
            file = self._file_room(entry)
            if file is not None:
                leaving.append((entry, file))
                planned += entry.nbytes
        return leaving

    def _file_room(self, entry: Entry) -> Place | None:
        victims, free = [], self.file.free
        for other in self.filed if free < entry.nbytes else ():
            assert other.file is not None
            if free >= entry.nbytes or (other.used > entry.used and not entry.keep):
                break
            if not other.waiting and not other.coming and other.file.users == 1:
                victims.append(other)
                free += other.nbytes
        if free < entry.nbytes:
            return None
        for other in victims:
            self.lost(other, "room")
        extents = self.file.take_pieces(entry.nbytes)
        assert extents is not None
        return Place(self.file, extents)

    # --- figures ------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        beside = self.beside
        return {"host": self.arena.used + (beside[0].nbytes if beside else 0), "disk": self.file.used}

    def count(self) -> dict[str, int]:
        return {"host": len(self.dirty) + len(self.clean), "disk": self.kept_in_file + len(self.filed)}

    def check(self) -> None:
        """That the books are right."""
        self.arena.check()
        self.file.check()
        orders: Sequence[OrderedDict[Entry, None]] = (self.dirty, self.clean, self.filed)
        assert all(self.entries.get(entry.name) is entry for order in orders for entry in order)
        for entry in self.entries.values():
            assert not entry.gone
            assert (entry in self.dirty) == (entry.memory is not None and entry.file is None)
            assert (entry in self.clean) == (entry.memory is not None and entry.file is not None)
            assert (entry in self.filed) == (entry.file is not None and not entry.keep)
            assert entry.memory is not None or entry.file is not None
        assert self.dirty_bytes == sum(entry.nbytes for entry in self.dirty)
        assert self.kept_in_file == sum(entry.keep and entry.file is not None for entry in self.entries.values())


def _let_go(returned: queue.SimpleQueue[Place], bell: queue.SimpleQueue[None] | None, place: Place) -> None:
    """Of a view that was lent. It may be called within any other call, so it takes no lock."""
    returned.put(place)
    if bell is not None:
        bell.put(None)
