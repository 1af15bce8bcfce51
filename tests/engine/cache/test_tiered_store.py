"""Tiered store of memory and a file: entries come back to the byte or not at all; no memory is reused early."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_disk import Extents, MemoryDisk
from prometheus_client.parser import text_string_to_metric_families

from asr_serve.config import MIN_HOST_BYTES, EngineConfig
from asr_serve.engine.cache import TieredStore, disk_worker
from asr_serve.engine.cache.integrity import AesGcmIntegrity, read_key
from asr_serve.engine.cache.store_entry import CHUNK_BYTES, StoreEntry, StorePlacement
from asr_serve.errors import DiskFailed, OptionError, TransportTimeout, UnsupportedOption
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.disk import BLOCK, Disk, aligned_memory, open_disk
from asr_serve.transfer.disk.nameless_file import address

KEY = bytes(range(32))
BLOB = b"\x5e" * (4 * BLOCK)
TIMEOUT_S = 60


class Fetch:
    """The result of `get`, once it is there."""

    def __init__(self, store: TieredStore, name: bytes) -> None:
        self.results: list[list[memoryview] | None] = []
        self._event = threading.Event()
        store.get(name, self._done)

    def _done(self, parts: list[memoryview] | None) -> None:
        self.results.append(parts)
        self._event.set()

    def content(self) -> bytes | None:
        assert self._event.wait(TIMEOUT_S), "nobody was told"
        (parts,) = self.results
        return None if parts is None else b"".join(parts)


def run_disk(store: TieredStore) -> None:
    while store.run_disk_once():
        pass


def move_to_file(store: TieredStore, *names: bytes, host_blocks: int = 8) -> None:
    """Put blobs of these names, and move all that can be moved to the file and out of memory."""
    for name in names:
        store.put(name, [BLOB], pinned=True)
    for _ in range(2):
        store.put(b"large", [bytes(host_blocks * BLOCK)], pinned=False)
        run_disk(store)
    store.drop(b"large")


def read_back(store: TieredStore, *names: bytes) -> list[bytes | None]:
    fetches = [Fetch(store, name) for name in names]
    run_disk(store)
    return [fetch.content() for fetch in fetches]


def full_of_kept_entries(disk: MemoryDisk, entry: int = 4 * BLOCK, **options: bool) -> TieredStore:
    """A store whose memory and file are full of entries a to d, which must be kept."""
    store = TieredStore(2 * entry, lambda: disk, **options)
    for name in (b"a", b"b", b"c", b"d"):
        _put(store, name, [name * entry])
    return store


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk(32 * BLOCK)


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    if request.param is not None:
        pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    return request.param


@pytest.fixture
def store(disk: MemoryDisk, key: bytes | None) -> Iterator[TieredStore]:
    store = TieredStore(8 * BLOCK, lambda: disk, key=key, threads=False)
    yield store
    store.close()


# --- what comes back ----------------------------------------------------------------------------------


def test_an_entry_in_memory_comes_at_once(store: TieredStore, disk: MemoryDisk) -> None:
    parts = [b"one", b"", np.arange(7, dtype=np.float32).data, b"x" * 100]
    assert store.put(b"a", parts, pinned=True)
    assert b"a" in store
    results: list[list[memoryview] | None] = []
    store.get(b"a", results.append)
    assert [[bytes(part) for part in parts] for parts in results if parts] == [[bytes(part) for part in parts]]
    assert disk.reads == 0


def test_an_entry_in_the_file_comes_back(store: TieredStore, disk: MemoryDisk) -> None:
    store.put(b"a", [BLOB, b"tail"], pinned=True)
    move_to_file(store)
    assert store.describe()["host_entries"] == 0
    got = Fetch(store, b"a")
    assert not got.results
    run_disk(store)
    assert got.content() == BLOB + b"tail"
    assert disk.reads == 1


def test_an_absent_name(store: TieredStore) -> None:
    assert Fetch(store, b"a").content() is None
    store.drop(b"a")
    assert b"a" not in store


def test_concurrent_gets_share_one_read(store: TieredStore, disk: MemoryDisk) -> None:
    move_to_file(store, b"a")
    both = [Fetch(store, b"a"), Fetch(store, b"a")]
    disk.between = lambda: both.append(Fetch(store, b"a")) if len(both) < 3 else None
    run_disk(store)
    assert [got.content() for got in both] == [BLOB] * 3
    assert disk.reads == 1


def test_memory_in_use_is_not_reused_after_a_drop(store: TieredStore) -> None:
    store.put(b"a", [BLOB], pinned=False)
    got = Fetch(store, b"a")
    store.drop(b"a")
    assert not store.put(b"b", [bytes(8 * BLOCK)], pinned=True)
    assert got.content() == BLOB
    got.results.clear()
    assert store.put(b"b", [bytes(8 * BLOCK)], pinned=True)


def test_a_store_without_a_file() -> None:
    store = TieredStore(8 * BLOCK, None)
    assert store.put(b"a", [BLOB], pinned=False)
    assert store.put(b"b", [BLOB], pinned=True)
    assert store.put(b"c", [BLOB], pinned=True)
    assert (b"a" in store, b"b" in store, b"c" in store) == (False, True, True)
    assert not store.put(b"d", [b"x"], pinned=True)
    assert Fetch(store, b"b").content() == BLOB
    store.close()
    assert Fetch(store, b"b").content() is None
    assert not store.put(b"b", [b"x"], pinned=True)


# --- what gives way -----------------------------------------------------------------------------------


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    store = TieredStore(8 * BLOCK, None)
    for name in (b"a", b"b", b"c", b"d"):
        store.put(name, [bytes(2 * BLOCK)], pinned=False)
    Fetch(store, b"a")
    store.put(b"e", [bytes(2 * BLOCK)], pinned=False)
    assert [name in store for name in (b"a", b"b", b"c", b"d", b"e")] == [True, False, True, True, True]
    assert store.describe()["lost_room"] == 1
    store.close()


def test_entries_to_keep_find_room_after_the_disk_has_worked(store: TieredStore) -> None:
    assert store.put(b"a", [BLOB], pinned=True)
    assert store.put(b"b", [BLOB], pinned=True)
    assert not store.put(b"c", [BLOB], pinned=True), "there is no room before the disk has worked"
    run_disk(store)
    assert store.put(b"c", [BLOB], pinned=True)
    assert all(name in store for name in (b"a", b"b", b"c"))


def test_a_full_file_evicts_entries_that_need_not_be_kept(store: TieredStore, disk: MemoryDisk) -> None:
    for number in range(12):
        store.put(b"%d" % number, [BLOB], pinned=number < 3)
        run_disk(store)
    present = [number for number in range(12) if b"%d" % number in store]
    assert present[:3] == [0, 1, 2]
    assert present[3:] == list(range(12 - len(present[3:]), 12))
    assert store.describe()["disk_bytes"] <= disk.nbytes


def test_entries_come_back_though_memory_and_file_are_full() -> None:
    store = full_of_kept_entries(MemoryDisk(8 * BLOCK), threads=False)
    assert not store.put(b"e", [b"x"], pinned=True)
    for name in (b"a", b"b", b"c", b"d"):
        assert read_back(store, name) == [name * (4 * BLOCK)]
        assert store.describe()["host_bytes"] <= (8 + 4) * BLOCK
    store.close()


def test_a_put_never_waits_for_the_disk() -> None:
    disk, release = MemoryDisk(64 * BLOCK), threading.Event()
    disk.between = lambda: wait_for(release)
    store = TieredStore(8 * BLOCK, lambda: disk)
    taken = [store.put(b"%d" % number, [BLOB], pinned=True) for number in range(4)]
    assert taken == [True, True, False, False]
    assert store.put(b"0", [b"again"], pinned=True)
    release.set()
    assert Fetch(store, b"0").content() == b"again"
    store.close()


# --- races --------------------------------------------------------------------------------------------


def meanwhile(disk: MemoryDisk, what: Callable[[], object]) -> None:
    """Call `what` once, while the disk is at work."""

    def once() -> None:
        disk.between = lambda: None
        what()

    disk.between = once


def test_an_entry_is_read_from_memory_while_it_is_written(store: TieredStore, disk: MemoryDisk) -> None:
    store.put(b"a", [BLOB], pinned=True)
    results: list[bytes | None] = []
    meanwhile(disk, lambda: results.append(Fetch(store, b"a").content()))
    move_to_file(store)
    assert results == [BLOB]
    assert disk.reads == 0


@pytest.mark.parametrize("when", ["read", "written"])
def test_an_entry_dropped_while_it_is_moved_frees_its_memory_later(
    store: TieredStore, disk: MemoryDisk, when: str
) -> None:
    store.put(b"a", [BLOB], pinned=True)
    if when == "read":
        move_to_file(store)
    got = Fetch(store, b"a") if when == "read" else None

    def drop() -> None:
        store.drop(b"a")  # the disk asserts that nothing comes into its memory
        assert got is None or not got.results
        assert not store.put(b"b", [bytes(8 * BLOCK)], pinned=True)

    meanwhile(disk, drop)
    if got is None:
        move_to_file(store)
    else:
        run_disk(store)
        assert got.content() is None
    assert b"a" not in store
    assert store.put(b"b", [bytes(8 * BLOCK)], pinned=True)
    assert store.describe()["disk_bytes"] == 0


@pytest.mark.parametrize("when", ["read", "written"])
def test_put_again_while_the_one_before_is_moved(store: TieredStore, disk: MemoryDisk, when: str) -> None:
    store.put(b"a", [BLOB], pinned=True)
    got = None
    if when == "read":
        move_to_file(store)
        got = Fetch(store, b"a")
    meanwhile(disk, lambda: store.put(b"a", [b"new"], pinned=True))
    if when == "read":
        run_disk(store)
        assert got is not None
        assert got.content() is None
    else:
        move_to_file(store)
    assert read_back(store, b"a") == [b"new"]


def test_an_entry_dropped_before_it_is_read(store: TieredStore, disk: MemoryDisk) -> None:
    move_to_file(store, b"a")
    got = Fetch(store, b"a")
    store.drop(b"a")
    assert got.content() is None
    run_disk(store)
    assert disk.reads == 0


def test_closing_ends_pending_reads() -> None:
    disk, release, at_it = MemoryDisk(32 * BLOCK), threading.Event(), threading.Event()
    store = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b"):
        store.put(name, [BLOB], pinned=True)
    move_to_file(store)
    gots = [Fetch(store, name) for name in (b"a", b"b", b"a")]

    def hold() -> None:
        at_it.set()
        wait_for(release)

    meanwhile(disk, hold)
    store._thread = threading.Thread(target=store._disk_worker.run)
    store._thread.start()
    wait_for(at_it)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._closed:
        at_it.wait(0.001)
    release.set()
    closing.join(TIMEOUT_S)
    assert [got.content() for got in gots] == [None] * 3
    assert disk.closed


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bit", [None, 0, 8 * 1_234 + 3, 8 * 4 * BLOCK - 1], ids=["torn write", "first bit", "a bit", "last bit"]
)
def test_a_damaged_entry_is_lost(store: TieredStore, disk: MemoryDisk, bit: int | None) -> None:
    disk.torn_writes = int(bit is None)
    move_to_file(store, b"a")
    if bit is not None:
        (at, _), *_ = disk.written
        disk.data[at + bit // 8] ^= 1 << bit % 8
    assert read_back(store, b"a") == [None]
    assert b"a" not in store
    assert store.describe()["lost_corrupted"] == 1
    assert store.describe()["disk_bytes"] == 0


def test_a_failed_read_loses_its_own_entry_only(store: TieredStore, disk: MemoryDisk) -> None:
    for name in (b"a", b"b", b"c"):
        store.put(name, [name * BLOCK], pinned=True)
    move_to_file(store)
    gots = [Fetch(store, name) for name in (b"a", b"b", b"c")]
    disk.failing_reads = 2  # the batch, and the first of its entries again
    run_disk(store)
    results = [got.content() for got in gots]
    assert results.count(None) == 1
    assert all(content in (None, name * BLOCK) for name, content in zip((b"a", b"b", b"c"), results, strict=True))
    assert store.describe()["lost_failed"] == 1


def test_a_failed_write_loses_nothing(store: TieredStore, disk: MemoryDisk) -> None:
    disk.failing_writes = 1_000
    for name in (b"a", b"b"):
        assert store.put(name, [name * (3 * BLOCK)], pinned=True)
    assert not store.put(b"c", [BLOB], pinned=True)
    run_disk(store)
    assert [Fetch(store, name).content() for name in (b"a", b"b")] == [name * (3 * BLOCK) for name in (b"a", b"b")]
    assert store.describe()["failed_writes"] == 2
    assert store.describe()["disk_bytes"] == 0


def test_a_failed_allocation_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    entry = 16 << 20
    store = full_of_kept_entries(MemoryDisk(2 * entry), entry, threads=False)
    got = Fetch(store, b"a")
    with no_more_memory():
        run_disk(store)
        run_disk(store)
    assert not got.results
    assert caplog.text.count("it waits") == 1
    run_disk(store)
    assert got.content() == b"a" * entry
    store.close()


def test_the_disk_thread_retries_an_allocation_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_worker, "RETRY_S", 0.01)
    store = full_of_kept_entries(MemoryDisk(8 * BLOCK))
    room, asked, enough = store._index.allocate_reserve, [], threading.Event()

    def short(entry: StoreEntry) -> StorePlacement | None:
        asked.append(entry)
        if len(asked) < 4:
            raise OSError(12, "Cannot allocate memory")
        enough.set()
        return room(entry)

    monkeypatch.setattr(store._index, "allocate_reserve", short)
    assert Fetch(store, b"a").content() == b"a" * (4 * BLOCK)
    assert enough.is_set()
    store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("who", ["disk", "caller"])
def test_a_failing_disk_thread_is_logged_and_answers_every_get(who: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk(64 * BLOCK)
    store = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b", b"c"):
        store.put(name, [name * BLOCK], pinned=True)
    move_to_file(store)

    def fail(*_: object) -> None:
        raise RuntimeError("an unexpected error")

    if who == "caller":
        store.get(b"a", fail)
    else:
        meanwhile(disk, fail)
    gots = [Fetch(store, name) for name in (b"a", b"a", b"c", b"b")]
    really = store._disk_worker._read

    def read(reading: list[disk_worker.DiskRead]) -> None:
        store.drop(b"b")  # it is being read, and nobody finds it by its name any more
        really(reading)

    store._disk_worker._read = read
    with caplog.at_level(logging.ERROR, "asr_serve.engine.cache"):
        store._thread = threading.Thread(target=store._disk_worker.run)
        store._thread.start()
        results = [got.content() for got in gots]
        store._thread.join(TIMEOUT_S)
    assert results[3] is None
    assert results[:3] == [None] * 3 or who == "caller"
    assert "what was offloaded to the file is lost" in caplog.text
    assert "an unexpected error" in caplog.text
    assert store.put(b"d", [BLOB], pinned=True), "memory is left"
    assert Fetch(store, b"d").content() == BLOB
    assert who == "caller" or Fetch(store, b"c").content() is None
    store.close()


class LateDisk(MemoryDisk):
    """A disk one of whose reads goes on after it was given up; from then on it does nothing."""

    lost = False
    late: tuple[memoryview, ...] = ()

    def read(self, extents: Extents) -> Iterator[int]:
        self._expect_alive()
        self.lost, self.late = True, tuple(memory for _, memory in extents)
        raise DiskFailed("it did not end in time") from TransportTimeout("nothing more came")
        yield

    def write(self, extents: Extents) -> Iterator[int]:
        self._expect_alive()
        yield from super().write(extents)

    def _expect_alive(self) -> None:
        if self.lost:
            raise DiskFailed("it is not used any more")


def test_memory_that_a_lost_read_may_write_to_is_not_reused() -> None:
    disk = LateDisk(64 * BLOCK)
    store = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b"):
        store.put(name, [name * BLOCK], pinned=True)
    move_to_file(store)
    assert read_back(store, b"a", b"b") == [None, None]
    names = [b"%d" % number for number in range(8)]
    present = [name for name in names if store.put(name, [name * BLOCK], pinned=True)]
    assert len(present) == 6
    for memory in disk.late:
        memory[:] = b"!" * len(memory)  # it came after all
    assert {name: Fetch(store, name).content() for name in present} == {name: name * BLOCK for name in present}
    assert Fetch(store, b"a").content() is None
    assert not store.run_disk_once()
    store.close()


# --- memory that a device reaches ---------------------------------------------------------------------


class Pins:
    """Records the memory that a device has pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def __call__(self, memory: memoryview) -> Callable[[], None]:
        at = address(memory)
        self.pinned[at] = memory.nbytes

        def unpin() -> None:
            assert is_mapped(at), "it went before"
            del self.pinned[at]

        return unpin


def is_mapped(at: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= at < int(end, 16) for start, end in ranges)


def test_memory_is_unpinned_after_its_last_use(disk: MemoryDisk) -> None:
    pins = Pins()
    store = TieredStore(8 << 20, lambda: disk, pin=pins)
    store.put(b"a", [BLOB], pinned=True)
    got, later = Fetch(store, b"a"), Fetch(store, b"a")
    store.close()
    later.results.clear()
    assert list(pins.pinned.values()) == [8 << 20], "somebody looks at it"
    assert got.content() == BLOB
    got.results.clear()
    gc.collect()
    assert not pins.pinned


def test_memory_is_unpinned_when_the_disk_cannot_be_opened(tmp_path: Path) -> None:
    pins = Pins()
    with pytest.raises(OptionError):
        TieredStore(8 << 20, lambda: open_disk(str(tmp_path / "none"), BLOCK), pin=pins)
    assert not pins.pinned


def test_the_disk_is_closed_when_memory_cannot_be_pinned(disk: MemoryDisk) -> None:
    def refuse(_: memoryview) -> Callable[[], None]:
        raise OptionError("so much cannot be pinned")

    with pytest.raises(OptionError, match="pinned"):
        TieredStore(8 * BLOCK, lambda: disk, pin=refuse)
    assert disk.closed


# --- at rest ------------------------------------------------------------------------------------------


def test_stale_memory_never_reaches_the_file() -> None:
    disk = MemoryDisk(32 * BLOCK)
    store = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    store.put(b"a", [b"secret" * 5_000], pinned=True)
    store.drop(b"a")
    store.put(b"b", [b"x", b"y" * 3, b"z" * (BLOCK + 1)], pinned=True)
    move_to_file(store)
    assert b"zzz" in disk.data
    assert b"secret" not in disk.data
    store.close()


@pytest.fixture
def sealed(disk: MemoryDisk) -> Iterator[TieredStore]:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    store = TieredStore(8 * BLOCK, lambda: disk, key=KEY, threads=False)
    yield store
    store.close()


def test_an_encrypted_file_holds_no_plain_text(sealed: TieredStore, disk: MemoryDisk) -> None:
    sealed.put(b"a", [b"plain text" * 500], pinned=True)
    move_to_file(sealed)
    assert any(disk.data)
    assert b"plain" not in disk.data
    assert read_back(sealed, b"a") == [b"plain text" * 500]
    assert KEY.hex() not in repr(vars(sealed)) + repr(sealed.describe())


def test_swapped_encrypted_entries_are_lost(sealed: TieredStore, disk: MemoryDisk) -> None:
    sealed.put(b"a", [b"a" * BLOCK], pinned=True)
    sealed.put(b"b", [b"b" * BLOCK], pinned=True)
    move_to_file(sealed)
    (a, _), (b, _), *_ = disk.written
    disk.data[a : a + BLOCK], disk.data[b : b + BLOCK] = disk.data[b : b + BLOCK], disk.data[a : a + BLOCK]
    assert read_back(sealed, b"a", b"b") == [None, None]


def test_nonces_never_repeat() -> None:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    data, into = memoryview(bytes(16)), memoryview(bytearray(16))
    both = [AesGcmIntegrity(KEY), AesGcmIntegrity(KEY)]
    both[0]._count = (1 << 32) - 2  # the counter runs out, and another prefix begins
    marks = [each.seal_chunk(b"a", 0, data, into) for each in both for _ in range(5)]
    assert len({mark[:12] for mark in marks}) == len(marks)


def test_a_key_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UnsupportedOption, match=r"asr-serve\[encryption\]"):
        TieredStore(8 * BLOCK, None, key=KEY)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32, "0" * 63])
def test_key_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text + "\n")
    with pytest.raises(OptionError, match="64 digits") as refused:
        read_key(str(path))
    assert refused.value.param == "disk_key_file"
    assert not text or text not in str(refused.value)
    with pytest.raises(OptionError, match="No such file"):
        read_key(str(tmp_path / "none"))
    path.write_text(KEY.hex().upper() + "\n")
    assert read_key(str(path)) == KEY


# --- real files ---------------------------------------------------------------------------------------


@pytest.fixture(params=["uring", "threads"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Disk]:
    try:
        open_disk(str(tmp_path), BLOCK, request.param).close()
    except OptionError as error:
        pytest.skip(str(error))
    return lambda: open_disk(str(tmp_path), 64 << 20, request.param)


def test_a_real_file(file: Callable[[], Disk], key: bytes | None) -> None:
    sizes = [0, 1, BLOCK, BLOCK + 1, CHUNK_BYTES - 1, CHUNK_BYTES + BLOCK, 7 * CHUNK_BYTES + 12_345]
    numbers = random.Random(1)
    blobs = {b"%d" % size: numbers.randbytes(size) for size in sizes}
    store = TieredStore(12 << 20, file, key=key)
    for name, blob in blobs.items():
        _put(store, name, [blob[:100], blob[100:]])
    _put(store, b"large", [bytes(12 << 20)])
    store.drop(b"large")
    assert store.describe()["host_entries"] == 0
    assert {name: Fetch(store, name).content() for name in blobs} == blobs
    assert store.describe()["disk_to_host"] == len(blobs)
    store.close()


def test_random_puts_gets_and_drops(file: Callable[[], Disk], key: bytes | None) -> None:
    store = TieredStore(1 << 20, file, key=key)
    numbers, present, gots = random.Random(2), {}, []
    for _ in range(600):
        name = b"%d" % numbers.randrange(24)
        choice = numbers.random()
        if choice < 0.4:
            content = numbers.randbytes(numbers.randrange(150_000))
            present.pop(name, None)
            if store.put(name, [content], pinned=True):
                present[name] = content
        elif choice < 0.9 and name in present:
            gots.append((Fetch(store, name), present[name], name))
        elif name in present:
            del present[name]
            store.drop(name)
        if len(gots) > 3:
            got, content, name = gots.pop(0)
            assert got.content() in (content, None)
            assert got.results != [None] or present.get(name) is not content, "lost, and nobody dropped it"
    gots.clear()
    assert {name: Fetch(store, name).content() for name in present} == present
    for name in present:
        store.drop(name)
    got = Fetch(store, b"none")
    assert got.content() is None
    assert store.describe()["host_entries"] == store.describe()["disk_entries"] == 0
    store.close()


def test_a_store_from_settings(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    (tmp_path / "key").write_text(KEY.hex())
    assert MIN_HOST_BYTES >= CHUNK_BYTES
    assert TieredStore.from_config(EngineConfig(host_bytes=0)) is None
    pins = Pins()
    config = EngineConfig(
        host_bytes=1 << 20, disk_bytes=1 << 20, disk_path=str(tmp_path), disk_key_file=str(tmp_path / "key")
    )
    metrics = EngineMetrics("m")
    store = TieredStore.from_config(config, metrics=metrics, pin=pins)
    assert store is not None
    assert list(pins.pinned.values()) == [1 << 20]
    _put(store, b"a", [b"x" * 700_000])
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["asr_serve_tier_entries", "m", "host"] == 1
    assert found["asr_serve_tier_bytes", "m", "host"] == 700_416
    assert found["asr_serve_tier_moves_total", "device", "m", "host"] == 1
    store.close()
    assert not pins.pinned
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    with pytest.raises(OptionError, match="disk_path"):
        TieredStore.from_config(EngineConfig(disk_bytes=1 << 20, disk_path=str(tmp_path / "none")))


@pytest.mark.cuda
def test_a_gpu_reads_pinned_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from asr_serve.devices.cuda import CudaDevice

    device = CudaDevice()
    blob = np.random.default_rng(3).bytes(8 << 20)
    for _ in range(3):  # the system gives the same address again: nothing of the time before may be pinned there
        store = TieredStore(64 << 20, None, pin=device.pin_memory)
        store.put(b"a", [b"before", blob], pinned=True)
        got = Fetch(store, b"a")
        (parts,) = got.results
        assert parts is not None
        present = torch.frombuffer(parts[1], dtype=torch.uint8)
        assert present.is_pinned()
        moved = present.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert moved.cpu().numpy().tobytes() == blob
        store.close()
        assert present.is_pinned(), "somebody still looks at it"
        del store, got, parts, present
        gc.collect()
    memory = aligned_memory(1 << 20)
    unpin = device.pin_memory(memory)
    with pytest.raises(OptionError, match=r"set engine\.host_bytes") as refused:
        device.pin_memory(memory)
    assert refused.value.param == "engine.host_bytes"
    unpin()
    device.pin_memory(memory)()


def _put(store: TieredStore, name: bytes, parts: list[bytes]) -> None:
    """Put an entry as soon as there is room."""
    until = threading.Event()
    for _ in range(20_000):
        if store.put(name, parts, pinned=True):
            return
        if store._thread is None:
            run_disk(store)
        until.wait(0.001)
    raise AssertionError("there never was room")


@contextlib.contextmanager
def no_more_memory() -> Iterator[None]:
    """Let no large allocation succeed."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def wait_for(release: threading.Event) -> None:
    assert release.wait(TIMEOUT_S)
