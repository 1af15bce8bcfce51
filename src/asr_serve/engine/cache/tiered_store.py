"""Tiered store: offload of sessions and evicted audio to host memory, then to a file.

put: copied into memory ---- long unused ----> written to the file     by the disk's thread
get: views of memory, at once  <------ read, verified                  by the disk's thread
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
from asr_serve.engine.cache.integrity import chunk_integrity, read_key
from asr_serve.engine.cache.store_entry import EMPTY_VIEW, ReadCallback, StoreEntry, StorePlacement
from asr_serve.engine.cache.store_index import StoreIndex
from asr_serve.engine.cache.store_stats import TieredStoreStats
from asr_serve.transfer.disk import BLOCK, Disk, aligned_memory, open_disk

if TYPE_CHECKING:
    from asr_serve.metrics import EngineMetrics

Parts = Sequence[memoryview | bytes]
Unpin = Callable[[], None]
Pin = Callable[[memoryview], Unpin]


class TieredStore:
    """Store of byte strings by name, in host memory and a file; belongs to the loop's thread. `get` returns lent
    memory: it stays unchanged until the last view of it is gone, and nobody may write into it."""

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
        """host_bytes: memory, of which whole blocks are used. key: 32 bytes that encrypt the file. pin: makes a
        device access the memory directly; the function that it returns is called once the store is closed and no
        view of the memory is left. threads: False leaves the disk's work to the caller, by `run_disk_once`.

        Raises OptionError, DiskFailed: there can be no such file, or the memory cannot be pinned.
        """
        self._lock = threading.Lock()
        self._disk_worker: DiskWorker | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        integrity = chunk_integrity(key)
        memory = aligned_memory(host_bytes // BLOCK * BLOCK) if host_bytes >= BLOCK else EMPTY_VIEW
        with contextlib.ExitStack() as undo:
            self._disk = open() if open is not None else None
            if self._disk is not None:
                undo.callback(self._disk.close)
            if pin is not None and memory:
                memory, unpin = _pinned(memory, pin)
                undo.callback(unpin)
            self._index = StoreIndex(memory, self._disk.nbytes if self._disk else 0, TieredStoreStats(metrics))
            if self._disk is not None:
                self._disk_worker = DiskWorker(self._index, self._lock, self._disk, integrity)
            if self._disk_worker is not None and threads:
                self._thread = threading.Thread(target=self._disk_worker.run, name="asr-serve tiers", daemon=True)
                self._thread.start()
            undo.pop_all()
        self._index.stats.observe_index(self._index)

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, metrics: EngineMetrics | None = None, pin: Pin | None = None
    ) -> TieredStore | None:
        """None where `host_bytes` is 0. Raises OptionError, DiskFailed."""
        if not config.host_bytes:
            return None
        key = read_key(config.disk_key_file) if config.disk_key_file is not None else None
        opener = partial(open_disk, config.disk_path, config.disk_bytes, config.disk_backend)
        return cls(config.host_bytes, opener if config.disk_bytes else None, key=key, metrics=metrics, pin=pin)

    def put(self, name: bytes, parts: Parts, *, pinned: bool) -> bool:
        """Stores a copy of `parts`. An entry of that name is dropped first, even if there is no room for the new
        one. `pinned`: pins the entry until it is dropped; others are evicted, the least recently used first.

        Returns False if there is no room now, and nothing is stored. Does not wait for the disk, which makes room.
        """
        flat = [_byte_view(part) for part in parts]
        entry = StoreEntry(name, [len(part) for part in flat], pinned)
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
        """Calls done(parts): at once if the entry is in memory, else on the disk's thread. parts is None if the
        entry is absent, lost or dropped meanwhile, or the store was closed."""
        parts: list[memoryview] | None = None
        with self._lock:
            entry, worker = self._index.entries.get(name), self._run_disk_thread
            if entry is not None:
                self._index.touch(entry)
                if entry.memory is not None:
                    parts = self._index.lend_views(entry, worker.wakeup if worker is not None else None)
                elif worker is not None:
                    entry.read_callbacks.append(done)
                    worker.request_read(entry)
                    return
        done(parts)

    def drop(self, name: bytes) -> None:
        """Drops the entry, if there is one. Its memory and file space are reused once nobody uses them."""
        with self._lock:
            entry = self._index.entries.get(name)
            callbacks = self._index.remove(entry) if entry is not None else []
            self._wake_disk_thread()
        for done in callbacks:
            done(None)

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._index.entries

    def close(self) -> None:
        """Waits for the disk's current work. Callbacks that wait for an entry get None."""
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
        """Does a piece of the disk's work, if no thread does it. Returns False if there is none."""
        assert self._thread is None
        return self._disk_worker is not None and self._disk_worker.run_once()

    def describe(self) -> dict[str, int]:
        with self._lock:
            index = self._index
            nbytes, count = index.nbytes(), index.count()
            return {
                **{f"{tier}_bytes": nbytes[tier] for tier in nbytes},
                **{f"{tier}_entries": count[tier] for tier in count},
                **index.stats.counts,
            }

    def _allocate(self, nbytes: int) -> StorePlacement | None:
        with self._lock:
            self._index.reclaim_returned()
            if self._closed:
                return None
            memory = self._index.allocate_memory(nbytes, drop=True)
            worker = self._run_disk_thread
            if memory is None and worker is not None and nbytes <= self._index.arena.nbytes:
                worker.pressed = True
                worker.wakeup.put(None)
            return memory

    @property
    def _run_disk_thread(self) -> DiskWorker | None:
        """Disk worker, until it is closing."""
        return None if self._disk_worker is None or self._disk_worker.closing else self._disk_worker

    def _wake_disk_thread(self) -> None:
        if self._disk_worker is not None and self._disk_worker.has_work:
            self._disk_worker.wakeup.put(None)


def _pinned(memory: memoryview, pin: Pin) -> tuple[memoryview, Unpin]:
    """Returns the memory, pinned, and the function that unpins it, which runs by itself with the last view, while
    the memory still exists: afterwards the system may reuse the address."""
    array = np.frombuffer(memory, np.uint8)  # its finalizer runs before the memory is freed
    unpin = weakref.finalize(array, pin(memory))
    unpin.atexit = False  # the device may be gone before, and what is pinned goes with the process
    return array.data, unpin


def _byte_view(part: memoryview | bytes) -> np.ndarray:
    """Bytes of a part, whatever type of numbers it holds."""
    view = memoryview(part)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _copy_parts(parts: Sequence[np.ndarray], entry: StoreEntry, memory: StorePlacement) -> None:
    """Copies parts into the entry's memory, with zeros between and after them, so that nothing of a former entry
    reaches the file."""
    into, end = np.frombuffer(memory.data, np.uint8), 0
    for part, extent in zip(parts, entry.parts, strict=True):
        into[end : extent.at] = 0
        np.copyto(into[extent.at : extent.end], part)
        end = extent.end
    into[end:] = 0
