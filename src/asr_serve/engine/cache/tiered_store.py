"""Below the device: memory of the host, then a file. What is asleep lies here, and what the cache gave up.

put: copied into memory ---- long unused ----> written to the file     by the disk's thread
get: where it lies in memory, at once  <------ read, checked           by the disk's thread
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asr_serve.config import EngineConfig
from asr_serve.engine.cache.disk_worker import DiskWorker
from asr_serve.engine.cache.entry import EMPTY_VIEW, ReadCallback, StoreEntry, StorePlacement
from asr_serve.engine.cache.index import StoreIndex
from asr_serve.engine.cache.integrity import chunk_integrity, read_key
from asr_serve.engine.cache.store_stats import TieredStoreStats
from asr_serve.transfer.disk import BLOCK, Disk, aligned_memory, open_disk

if TYPE_CHECKING:
    from asr_serve.metrics import EngineMetrics

Parts = Sequence[memoryview | bytes]
Unpin = Callable[[], None]
Pin = Callable[[memoryview], Unpin]


class TieredStore:
    """Belongs to the loop's thread. What `get` gives lies in memory that is lent: it stays as it is until the last
    view of it is gone, whatever else happens, and nobody may write into it."""

    def __init__(
        self,
        host_bytes: int,
        open: Callable[[], Disk] | None,
        *,
        key: bytes | None = None,
        metrics: EngineMetrics | None = None,
        pin: Pin | None = None,
        threads: bool = True,
    ) -> None:
        """host_bytes: of memory, of which whole blocks are used. key: 32 bytes, with which the file is encrypted.
        pin: has a device reach the memory by itself, until what it returns is called: when the tiers are closed
        and nobody looks at the memory any more. threads: False has the caller do the disk's work, by `work`.

        Raises OptionError, DiskFailed: there can be no such file, or the memory cannot be pinned.
        """
        self._lock = threading.Lock()
        self._disk_worker: DiskWorker | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        closing = chunk_integrity(key)
        memory = aligned_memory(host_bytes // BLOCK * BLOCK) if host_bytes >= BLOCK else EMPTY_VIEW
        with contextlib.ExitStack() as unless_made:
            self._disk = open() if open is not None else None
            if self._disk is not None:
                unless_made.callback(self._disk.close)
            if pin is not None and memory:
                memory, unpin = _pinned(memory, pin)
                unless_made.callback(unpin)
            self._index = StoreIndex(memory, self._disk.nbytes if self._disk else 0, TieredStoreStats(metrics))
            if self._disk is not None:
                self._disk_worker = DiskWorker(self._index, self._lock, self._disk, closing)
            if self._disk_worker is not None and threads:
                self._thread = threading.Thread(target=self._disk_worker.run, name="asr-serve tiers", daemon=True)
                self._thread.start()
            unless_made.pop_all()
        self._index.stats.observe_index(self._index)

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, metrics: EngineMetrics | None = None, pin: Pin | None = None
    ) -> TieredStore | None:
        """None where `host_bytes` is 0. Raises OptionError, DiskFailed."""
        if not config.host_bytes:
            return None
        key = read_key(config.disk_key_file) if config.disk_key_file is not None else None
        opener = partial(open_disk, config.disk_path, config.disk_bytes, config.disk_road)
        return cls(config.host_bytes, opener if config.disk_bytes else None, key=key, metrics=metrics, pin=pin)

    def put(self, name: bytes, parts: Parts, *, keep: bool) -> bool:
        """A copy is taken. Whatever had that name is dropped before, also where there is no room for this. keep:
        it must not be given up for others, until it is dropped; without, the least recently used go first.

        False: there is no room now, and nothing was taken. It does not wait for the disk, which makes some.
        """
        flat = [_byte_view(part) for part in parts]
        entry = StoreEntry(name, [len(part) for part in flat], keep)
        self.drop(name)
        memory = self._allocate(entry.nbytes)
        if memory is None:
            return False
        _copy_parts(flat, entry, memory)
        with self._lock:
            self._index.add(entry, memory)
            self._index.stats.record_move("device", "host")
            if self._disk_worker is not None:
                self._disk_worker.pressed = False
            self._wake_disk_thread()
        return True

    def get(self, name: bytes, done: ReadCallback) -> None:
        """done(parts): at once where it lies in memory, else on the disk's thread. None: it is not there, or lost,
        or dropped meanwhile, or the tiers were closed."""
        parts: list[memoryview] | None = None
        with self._lock:
            entry, mover = self._index.entries.get(name), self._run_disk_thread
            if entry is not None:
                self._index.touch(entry)
                if entry.memory is not None:
                    parts = self._index.lend_views(entry, mover.wakeup if mover is not None else None)
                elif mover is not None:
                    entry.read_callbacks.append(done)
                    mover.request_read(entry)
                    return
        done(parts)

    def drop(self, name: bytes) -> None:
        """It is gone, if it was there. Its places are used again when nobody uses them any more."""
        with self._lock:
            entry = self._index.entries.get(name)
            told = self._index.remove(entry) if entry is not None else []
            self._wake_disk_thread()
        for done in told:
            done(None)

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._index.entries

    def close(self) -> None:
        """Waits for what the disk has under way. Whoever waits for an entry is told that it is lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._disk_worker is not None:
                self._disk_worker.closing = True
                self._disk_worker.wakeup.put(None)
        if self._disk_worker is not None:
            if self._thread is not None:
                self._thread.join()
            self._disk_worker.fail_readers()
        if self._disk is not None:
            self._disk.close()
        with self._lock:
            self._index.close()

    def run_disk_once(self) -> bool:
        """A piece of the disk's work, where no thread does it. False: there is none."""
        assert self._thread is None
        return self._disk_worker is not None and self._disk_worker.run_once()

    def describe(self) -> dict[str, int]:
        with self._lock:
            shelves = self._index
            nbytes, count = shelves.nbytes(), shelves.count()
            return {
                **{f"{tier}_bytes": nbytes[tier] for tier in nbytes},
                **{f"{tier}_entries": count[tier] for tier in count},
                **shelves.stats.counts,
            }

    def _allocate(self, nbytes: int) -> StorePlacement | None:
        with self._lock:
            self._index.reclaim_returned()
            if self._closed:
                return None
            memory = self._index.allocate_memory(nbytes, drop=True)
            mover = self._run_disk_thread
            if memory is None and mover is not None and nbytes <= self._index.arena.nbytes:
                mover.pressed = True
                mover.wakeup.put(None)
            return memory

    @property
    def _run_disk_thread(self) -> DiskWorker | None:
        """As long as it hears the bell."""
        return None if self._disk_worker is None or self._disk_worker.closing else self._disk_worker

    def _wake_disk_thread(self) -> None:
        if self._disk_worker is not None and self._disk_worker.has_work:
            self._disk_worker.wakeup.put(None)


def _pinned(memory: memoryview, pin: Pin) -> tuple[memoryview, Unpin]:
    """The same memory, and what unpins it, which is called by itself as the last view of it goes, while it is
    still there: after that the system may give the same address to somebody else."""
    held = np.frombuffer(memory, np.uint8)  # tells that it goes before what it stands on does
    unpin = weakref.finalize(held, pin(memory))
    unpin.atexit = False  # the device may be gone before, and what is pinned goes with the process
    return held.data, unpin


def _byte_view(part: memoryview | bytes) -> np.ndarray:
    """Its bytes, whatever numbers they are."""
    view = memoryview(part)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _copy_parts(parts: Sequence[np.ndarray], entry: StoreEntry, memory: StorePlacement) -> None:
    """With zeros between and after them: of whoever lay there before, nothing goes into the file."""
    into, end = np.frombuffer(memory.data, np.uint8), 0
    for part, extent in zip(parts, entry.parts, strict=True):
        into[end : extent.at] = 0
        np.copyto(into[extent.at : extent.end], part)
        end = extent.end
    into[end:] = 0
