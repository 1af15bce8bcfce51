"""Memory, then a file: what was put comes back to the byte or not at all, and no place is taken too early."""

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
from asr_serve.engine.cache.entry import CHUNK_BYTES, StoreEntry, StorePlacement
from asr_serve.engine.cache.integrity import AesGcmIntegrity, read_key
from asr_serve.errors import DiskFailed, OptionError, RoadTimeout, UnsupportedOption
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.disk import BLOCK, Disk, aligned_memory, open_disk
from asr_serve.transfer.disk.nameless_file import address

KEY = bytes(range(32))
BLOB = b"\x5e" * (4 * BLOCK)
TIMEOUT_S = 60


class Got:
    """What `get` told."""

    def __init__(self, tiers: TieredStore, name: bytes) -> None:
        self.told: list[list[memoryview] | None] = []
        self._event = threading.Event()
        tiers.get(name, self._done)

    def _done(self, parts: list[memoryview] | None) -> None:
        self.told.append(parts)
        self._event.set()

    def content(self) -> bytes | None:
        assert self._event.wait(TIMEOUT_S), "nobody was told"
        (parts,) = self.told
        return None if parts is None else b"".join(parts)


def work(tiers: TieredStore) -> None:
    while tiers.run_disk_once():
        pass


def sink(tiers: TieredStore, host_blocks: int = 8) -> None:
    """All that can goes to the file, and out of memory."""
    for _ in range(2):
        tiers.put(b"large", [bytes(host_blocks * BLOCK)], keep=False)
        work(tiers)
    tiers.drop(b"large")


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk(32 * BLOCK)


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    if request.param is not None:
        pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    return request.param


@pytest.fixture
def tiers(disk: MemoryDisk, key: bytes | None) -> Iterator[TieredStore]:
    tiers = TieredStore(8 * BLOCK, lambda: disk, key=key, threads=False)
    yield tiers
    tiers.close()


# --- what comes back ----------------------------------------------------------------------------------


def test_what_lies_in_memory_is_told_at_once(tiers: TieredStore, disk: MemoryDisk) -> None:
    parts = [b"one", b"", np.arange(7, dtype=np.float32).data, b"x" * 100]
    assert tiers.put(b"a", parts, keep=True)
    assert b"a" in tiers
    told: list[list[memoryview] | None] = []
    tiers.get(b"a", told.append)
    assert [[bytes(part) for part in parts] for parts in told if parts] == [[bytes(part) for part in parts]]
    assert disk.reads == 0


def test_what_sank_comes_back(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB, b"tail"], keep=True)
    sink(tiers)
    assert tiers.describe()["host_entries"] == 0
    got = Got(tiers, b"a")
    assert not got.told
    work(tiers)
    assert got.content() == BLOB + b"tail"
    assert disk.reads == 1


def test_a_name_that_is_not_there(tiers: TieredStore) -> None:
    assert Got(tiers, b"a").content() is None
    tiers.drop(b"a")
    assert b"a" not in tiers


def test_two_who_ask_at_once_cost_one_read(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    sink(tiers)
    both = [Got(tiers, b"a"), Got(tiers, b"a")]
    disk.between = lambda: both.append(Got(tiers, b"a")) if len(both) < 3 else None
    work(tiers)
    assert [got.content() for got in both] == [BLOB] * 3
    assert disk.reads == 1


def test_what_is_looked_at_stays_though_it_is_dropped(tiers: TieredStore) -> None:
    tiers.put(b"a", [BLOB], keep=False)
    got = Got(tiers, b"a")
    tiers.drop(b"a")
    assert not tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)
    assert got.content() == BLOB
    got.told.clear()
    assert tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)


def test_without_a_file_memory_is_all() -> None:
    tiers = TieredStore(8 * BLOCK, None)
    assert tiers.put(b"a", [BLOB], keep=False)
    assert tiers.put(b"b", [BLOB], keep=True)
    assert tiers.put(b"c", [BLOB], keep=True)
    assert (b"a" in tiers, b"b" in tiers, b"c" in tiers) == (False, True, True)
    assert not tiers.put(b"d", [b"x"], keep=True)
    assert Got(tiers, b"b").content() == BLOB
    tiers.close()
    assert Got(tiers, b"b").content() is None
    assert not tiers.put(b"b", [b"x"], keep=True)


# --- what gives way -----------------------------------------------------------------------------------


def test_the_least_recently_used_give_way_first() -> None:
    tiers = TieredStore(8 * BLOCK, None)
    for name in (b"a", b"b", b"c", b"d"):
        tiers.put(name, [bytes(2 * BLOCK)], keep=False)
    Got(tiers, b"a")
    tiers.put(b"e", [bytes(2 * BLOCK)], keep=False)
    assert [name in tiers for name in (b"a", b"b", b"c", b"d", b"e")] == [True, False, True, True, True]
    assert tiers.describe()["lost_room"] == 1
    tiers.close()


def test_what_is_to_be_kept_makes_room_by_and_by(tiers: TieredStore) -> None:
    assert tiers.put(b"a", [BLOB], keep=True)
    assert tiers.put(b"b", [BLOB], keep=True)
    assert not tiers.put(b"c", [BLOB], keep=True), "there is no room before the disk has worked"
    work(tiers)
    assert tiers.put(b"c", [BLOB], keep=True)
    assert all(name in tiers for name in (b"a", b"b", b"c"))


def test_a_full_file_gives_up_what_need_not_be_kept(tiers: TieredStore, disk: MemoryDisk) -> None:
    for number in range(12):
        tiers.put(b"%d" % number, [BLOB], keep=number < 3)
        work(tiers)
    there = [number for number in range(12) if b"%d" % number in tiers]
    assert there[:3] == [0, 1, 2]
    assert there[3:] == list(range(12 - len(there[3:]), 12))
    assert tiers.describe()["disk_bytes"] <= disk.nbytes


def test_full_of_what_must_be_kept_it_still_wakes() -> None:
    disk = MemoryDisk(8 * BLOCK)
    tiers = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    names = [b"a", b"b", b"c", b"d"]
    for name in names:
        for _ in range(2):
            if tiers.put(name, [name * (4 * BLOCK)], keep=True):
                break
            work(tiers)
    assert not tiers.put(b"e", [b"x"], keep=True)
    for name in names:
        got = Got(tiers, name)
        work(tiers)
        assert got.content() == name * (4 * BLOCK)
        assert tiers.describe()["host_bytes"] <= (8 + 4) * BLOCK
        del got
    tiers.close()


def test_a_put_never_waits_for_the_disk() -> None:
    disk, gate = MemoryDisk(64 * BLOCK), threading.Event()
    disk.between = lambda: _pass(gate)
    tiers = TieredStore(8 * BLOCK, lambda: disk)
    taken = [tiers.put(b"%d" % number, [BLOB], keep=True) for number in range(4)]
    assert taken == [True, True, False, False]
    assert tiers.put(b"0", [b"again"], keep=True)
    gate.set()
    assert Got(tiers, b"0").content() == b"again"
    tiers.close()


# --- races --------------------------------------------------------------------------------------------


def meanwhile(disk: MemoryDisk, what: Callable[[], object]) -> None:
    """Once, while the disk is at work."""

    def once() -> None:
        disk.between = lambda: None
        what()

    disk.between = once


def test_asked_for_while_it_is_written(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    told: list[bytes | None] = []
    meanwhile(disk, lambda: told.append(Got(tiers, b"a").content()))
    sink(tiers)
    assert told == [BLOB]
    assert disk.reads == 0


def test_dropped_while_it_is_written(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)

    def drop() -> None:
        tiers.drop(b"a")  # the disk asserts that nothing comes into its memory
        assert not tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)

    meanwhile(disk, drop)
    sink(tiers)
    assert b"a" not in tiers
    assert tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)
    assert tiers.describe()["disk_bytes"] == 0


def test_dropped_while_it_is_read(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    sink(tiers)
    got = Got(tiers, b"a")

    def drop() -> None:
        tiers.drop(b"a")
        assert not got.told
        assert not tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)

    meanwhile(disk, drop)
    work(tiers)
    assert got.content() is None
    assert tiers.put(b"b", [bytes(8 * BLOCK)], keep=True)
    assert tiers.describe()["disk_bytes"] == 0


def test_put_again_while_the_one_before_is_read(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    sink(tiers)
    got = Got(tiers, b"a")
    meanwhile(disk, lambda: tiers.put(b"a", [b"new"], keep=True))
    work(tiers)
    assert got.content() is None
    assert Got(tiers, b"a").content() == b"new"


def test_put_again_while_the_one_before_is_written(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    meanwhile(disk, lambda: tiers.put(b"a", [b"new"], keep=True))
    sink(tiers)
    got = Got(tiers, b"a")
    work(tiers)
    assert got.content() == b"new"


def test_dropped_before_it_is_read(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    sink(tiers)
    got = Got(tiers, b"a")
    tiers.drop(b"a")
    assert got.content() is None
    work(tiers)
    assert disk.reads == 0


def test_closed_with_reads_under_way() -> None:
    disk, gate, at_it = MemoryDisk(32 * BLOCK), threading.Event(), threading.Event()
    tiers = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b"):
        tiers.put(name, [BLOB], keep=True)
    sink(tiers)
    gots = [Got(tiers, name) for name in (b"a", b"b", b"a")]

    def hold() -> None:
        at_it.set()
        _pass(gate)

    meanwhile(disk, hold)
    tiers._thread = threading.Thread(target=tiers._disk_worker.run)
    tiers._thread.start()
    _pass(at_it)
    closing = threading.Thread(target=tiers.close)
    closing.start()
    while not tiers._closed:
        at_it.wait(0.001)
    gate.set()
    closing.join(TIMEOUT_S)
    assert [got.content() for got in gots] == [None] * 3
    assert disk.closed


# --- what goes wrong ----------------------------------------------------------------------------------


def test_a_torn_write_is_found_out(tiers: TieredStore, disk: MemoryDisk) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    disk.torn_writes = 1
    sink(tiers)
    got = Got(tiers, b"a")
    work(tiers)
    assert got.content() is None
    assert b"a" not in tiers
    assert tiers.describe()["lost_torn"] == 1
    assert tiers.describe()["disk_bytes"] == 0


@pytest.mark.parametrize("bit", [0, 8 * 1_234 + 3, 8 * 4 * BLOCK - 1])
def test_a_flipped_bit_is_found_out(tiers: TieredStore, disk: MemoryDisk, bit: int) -> None:
    tiers.put(b"a", [BLOB], keep=True)
    sink(tiers)
    (at, _), *_ = disk.written
    disk.data[at + bit // 8] ^= 1 << bit % 8
    got = Got(tiers, b"a")
    work(tiers)
    assert got.content() is None
    assert tiers.describe()["lost_torn"] == 1


def test_a_disk_that_cannot_read_loses_only_what_it_cannot_read(tiers: TieredStore, disk: MemoryDisk) -> None:
    for name in (b"a", b"b", b"c"):
        tiers.put(name, [name * BLOCK], keep=True)
    sink(tiers)
    gots = [Got(tiers, name) for name in (b"a", b"b", b"c")]
    disk.failing_reads = 2  # the batch, and the first of its entries again
    work(tiers)
    told = [got.content() for got in gots]
    assert told.count(None) == 1
    assert all(content in (None, name * BLOCK) for name, content in zip((b"a", b"b", b"c"), told, strict=True))
    assert tiers.describe()["lost_failed"] == 1


def test_a_disk_that_cannot_write_loses_nothing(tiers: TieredStore, disk: MemoryDisk) -> None:
    disk.failing_writes = 1_000
    for name in (b"a", b"b"):
        assert tiers.put(name, [name * (3 * BLOCK)], keep=True)
    assert not tiers.put(b"c", [BLOB], keep=True)
    work(tiers)
    assert [Got(tiers, name).content() for name in (b"a", b"b")] == [name * (3 * BLOCK) for name in (b"a", b"b")]
    assert tiers.describe()["failed_writes"] == 2
    assert tiers.describe()["disk_bytes"] == 0


def test_memory_that_the_machine_has_not_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    entry = 16 << 20
    disk = MemoryDisk(2 * entry)
    tiers = TieredStore(2 * entry, lambda: disk, threads=False)
    for name in (b"a", b"b", b"c", b"d"):  # memory and file are full of what must be kept
        if not tiers.put(name, [name * entry], keep=True):
            work(tiers)
            assert tiers.put(name, [name * entry], keep=True)
    got = Got(tiers, b"a")
    with no_more_memory():
        work(tiers)
        work(tiers)
    assert not got.told
    assert caplog.text.count("it waits") == 1
    work(tiers)
    content = got.content()
    assert content is not None
    assert content == b"a" * entry
    tiers.close()


def test_a_disks_thread_asks_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_worker, "RETRY_S", 0.01)
    disk = MemoryDisk(8 * BLOCK)
    tiers = TieredStore(8 * BLOCK, lambda: disk)
    for name in (b"a", b"b", b"c", b"d"):
        _put(tiers, name, [name * (4 * BLOCK)])
    room, asked, enough = tiers._index.allocate_reserve, [], threading.Event()

    def short(entry: StoreEntry) -> StorePlacement | None:
        asked.append(entry)
        if len(asked) < 4:
            raise OSError(12, "Cannot allocate memory")
        enough.set()
        return room(entry)

    monkeypatch.setattr(tiers._index, "allocate_reserve", short)
    assert Got(tiers, b"a").content() == b"a" * (4 * BLOCK)
    assert enough.is_set()
    tiers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("who", ["disk", "caller"])
def test_a_disks_thread_that_fails_says_so_and_tells_everybody(who: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk(64 * BLOCK)
    tiers = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b", b"c"):
        tiers.put(name, [name * BLOCK], keep=True)
    sink(tiers)

    def fails(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    if who == "caller":
        tiers.get(b"a", fails)
    else:
        meanwhile(disk, fails)
    gots = [Got(tiers, name) for name in (b"a", b"a", b"c", b"b")]
    really = tiers._disk_worker._read

    def read(reading: list[disk_worker.DiskRead]) -> None:
        tiers.drop(b"b")  # it is being read, and nobody finds it by its name any more
        really(reading)

    tiers._disk_worker._read = read
    with caplog.at_level(logging.ERROR, "asr_serve.engine.cache"):
        tiers._thread = threading.Thread(target=tiers._disk_worker.run)
        tiers._thread.start()
        told = [got.content() for got in gots]
        tiers._thread.join(TIMEOUT_S)
    assert told[3] is None
    assert told[:3] == [None] * 3 or who == "caller"
    assert "what sleeps in the file is lost" in caplog.text
    assert "nobody thought of this" in caplog.text
    assert tiers.put(b"d", [BLOB], keep=True), "memory is left"
    assert Got(tiers, b"d").content() == BLOB
    assert who == "caller" or Got(tiers, b"c").content() is None
    tiers.close()


class Astray(MemoryDisk):
    """One read goes on after it was given up; from then on nothing is carried."""

    lost = False
    late: tuple[memoryview, ...] = ()

    def read(self, extents: Extents) -> Iterator[int]:
        self._expect_alive()
        self.lost, self.late = True, tuple(memory for _, memory in extents)
        raise DiskFailed("it did not end in time") from RoadTimeout("nothing more came")
        yield

    def write(self, extents: Extents) -> Iterator[int]:
        self._expect_alive()
        yield from super().write(extents)

    def _expect_alive(self) -> None:
        if self.lost:
            raise DiskFailed("it is not used any more")


def test_what_the_disk_may_still_write_to_is_nobody_elses() -> None:
    disk = Astray(64 * BLOCK)
    tiers = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    for name in (b"a", b"b"):
        tiers.put(name, [name * BLOCK], keep=True)
    sink(tiers)
    gots = [Got(tiers, b"a"), Got(tiers, b"b")]
    work(tiers)
    assert [got.content() for got in gots] == [None, None]
    there = [
        name for name in (b"%d" % number for number in range(8)) if tiers.put(name, [name * BLOCK], keep=True)
    ]
    assert len(there) == 6
    for memory in disk.late:
        memory[:] = b"!" * len(memory)  # it came after all
    assert {name: Got(tiers, name).content() for name in there} == {name: name * BLOCK for name in there}
    assert Got(tiers, b"a").content() is None
    assert not tiers.run_disk_once()
    tiers.close()


# --- memory that a device reaches ---------------------------------------------------------------------


class Pins:
    """A device that reaches memory by itself."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def __call__(self, memory: memoryview) -> Callable[[], None]:
        at = address(memory)
        self.pinned[at] = memory.nbytes

        def unpin() -> None:
            assert mapped(at), "it went before"
            del self.pinned[at]

        return unpin


def mapped(at: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= at < int(end, 16) for start, end in ranges)


def test_memory_is_unpinned_when_nobody_looks_at_it_any_more(disk: MemoryDisk) -> None:
    pins = Pins()
    tiers = TieredStore(8 << 20, lambda: disk, pin=pins)
    tiers.put(b"a", [BLOB], keep=True)
    got, later = Got(tiers, b"a"), Got(tiers, b"a")
    tiers.close()
    later.told.clear()
    assert list(pins.pinned.values()) == [8 << 20], "somebody looks at it"
    assert got.content() == BLOB
    got.told.clear()
    gc.collect()
    assert not pins.pinned


def test_nothing_stays_pinned_where_the_disk_cannot_be_opened(tmp_path: Path) -> None:
    pins = Pins()
    with pytest.raises(OptionError):
        TieredStore(8 << 20, lambda: open_disk(str(tmp_path / "none"), BLOCK), pin=pins)
    assert not pins.pinned


def test_a_disk_is_closed_where_the_memory_cannot_be_pinned(disk: MemoryDisk) -> None:
    def refuse(_: memoryview) -> Callable[[], None]:
        raise OptionError("so much cannot be pinned")

    with pytest.raises(OptionError, match="pinned"):
        TieredStore(8 * BLOCK, lambda: disk, pin=refuse)
    assert disk.closed


# --- at rest ------------------------------------------------------------------------------------------


def test_of_who_lay_there_before_nothing_goes_into_the_file() -> None:
    disk = MemoryDisk(32 * BLOCK)
    tiers = TieredStore(8 * BLOCK, lambda: disk, threads=False)
    tiers.put(b"a", [b"secret" * 5_000], keep=True)
    tiers.drop(b"a")
    tiers.put(b"b", [b"x", b"y" * 3, b"z" * (BLOCK + 1)], keep=True)
    sink(tiers)
    assert b"zzz" in disk.data
    assert b"secret" not in disk.data
    tiers.close()


@pytest.fixture
def sealed(disk: MemoryDisk) -> Iterator[TieredStore]:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    tiers = TieredStore(8 * BLOCK, lambda: disk, key=KEY, threads=False)
    yield tiers
    tiers.close()


def test_the_file_holds_nothing_that_can_be_read(sealed: TieredStore, disk: MemoryDisk) -> None:
    sealed.put(b"a", [b"what was said" * 500], keep=True)
    sink(sealed)
    assert any(disk.data)
    assert b"what" not in disk.data
    got = Got(sealed, b"a")
    work(sealed)
    assert got.content() == b"what was said" * 500
    assert KEY.hex() not in repr(vars(sealed)) + repr(sealed.describe())


def test_what_is_another_entrys_is_found_out(sealed: TieredStore, disk: MemoryDisk) -> None:
    sealed.put(b"a", [b"a" * BLOCK], keep=True)
    sealed.put(b"b", [b"b" * BLOCK], keep=True)
    sink(sealed)
    (a, _), (b, _), *_ = disk.written
    disk.data[a : a + BLOCK], disk.data[b : b + BLOCK] = disk.data[b : b + BLOCK], disk.data[a : a + BLOCK]
    gots = [Got(sealed, b"a"), Got(sealed, b"b")]
    work(sealed)
    assert [got.content() for got in gots] == [None, None]


def test_a_nonce_never_comes_twice() -> None:
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
def test_a_file_that_holds_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text + "\n")
    with pytest.raises(OptionError, match="64 digits") as caught:
        read_key(str(path))
    assert caught.value.param == "disk_key_file"
    assert not text or text not in str(caught.value)
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
    tiers = TieredStore(12 << 20, file, key=key)
    for name, blob in blobs.items():
        _put(tiers, name, [blob[:100], blob[100:]])
    _put(tiers, b"large", [bytes(12 << 20)])
    tiers.drop(b"large")
    assert tiers.describe()["host_entries"] == 0
    assert {name: Got(tiers, name).content() for name in blobs} == blobs
    assert tiers.describe()["disk_to_host"] == len(blobs)
    tiers.close()


def test_many_come_and_go_while_the_disk_works(file: Callable[[], Disk], key: bytes | None) -> None:
    tiers = TieredStore(1 << 20, file, key=key)
    numbers, there, gots = random.Random(2), {}, []
    for _ in range(600):
        name = b"%d" % numbers.randrange(24)
        choice = numbers.random()
        if choice < 0.4:
            content = numbers.randbytes(numbers.randrange(150_000))
            there.pop(name, None)
            if tiers.put(name, [content], keep=True):
                there[name] = content
        elif choice < 0.9 and name in there:
            gots.append((Got(tiers, name), there[name], name))
        elif name in there:
            del there[name]
            tiers.drop(name)
        if len(gots) > 3:
            got, content, name = gots.pop(0)
            assert got.content() in (content, None)
            assert got.told != [None] or there.get(name) is not content, "lost, and nobody dropped it"
    gots.clear()
    assert {name: Got(tiers, name).content() for name in there} == there
    for name in there:
        tiers.drop(name)
    got = Got(tiers, b"none")
    assert got.content() is None
    assert tiers.describe()["host_entries"] == tiers.describe()["disk_entries"] == 0
    tiers.close()


def test_as_the_settings_say(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra encryption is not installed")
    (tmp_path / "key").write_text(KEY.hex())
    assert MIN_HOST_BYTES >= CHUNK_BYTES
    assert TieredStore.from_config(EngineConfig(host_bytes=0)) is None
    pins = Pins()
    config = EngineConfig(
        host_bytes=1 << 20, disk_bytes=1 << 20, disk_path=str(tmp_path), disk_key_file=str(tmp_path / "key")
    )
    metrics = EngineMetrics("m")
    tiers = TieredStore.from_config(config, metrics=metrics, pin=pins)
    assert tiers is not None
    assert list(pins.pinned.values()) == [1 << 20]
    _put(tiers, b"a", [b"x" * 700_000])
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["asr_serve_tier_entries", "m", "host"] == 1
    assert found["asr_serve_tier_bytes", "m", "host"] == 700_416
    assert found["asr_serve_tier_moves_total", "device", "m", "host"] == 1
    tiers.close()
    assert not pins.pinned
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    with pytest.raises(OptionError, match="disk_path"):
        TieredStore.from_config(EngineConfig(disk_bytes=1 << 20, disk_path=str(tmp_path / "none")))


@pytest.mark.cuda
def test_a_gpu_reads_the_memory_by_itself() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from asr_serve.devices.cuda import CudaDevice

    device = CudaDevice()
    blob = np.random.default_rng(3).bytes(8 << 20)
    for _ in range(3):  # the system gives the same address again: nothing of the time before may be pinned there
        tiers = TieredStore(64 << 20, None, pin=device.pin_memory)
        tiers.put(b"a", [b"before", blob], keep=True)
        got = Got(tiers, b"a")
        (parts,) = got.told
        assert parts is not None
        there = torch.frombuffer(parts[1], dtype=torch.uint8)
        assert there.is_pinned()
        moved = there.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert moved.cpu().numpy().tobytes() == blob
        tiers.close()
        assert there.is_pinned(), "somebody still looks at it"
        del tiers, got, parts, there
        gc.collect()
    memory = aligned_memory(1 << 20)
    unpin = device.pin_memory(memory)
    with pytest.raises(OptionError, match=r"set engine\.host_bytes") as said:
        device.pin_memory(memory)
    assert said.value.param == "engine.host_bytes"
    unpin()
    device.pin_memory(memory)()


def _put(tiers: TieredStore, name: bytes, parts: list[bytes]) -> None:
    """As soon as there is room."""
    until = threading.Event()
    for _ in range(20_000):
        if tiers.put(name, parts, keep=True):
            return
        until.wait(0.001)
    raise AssertionError("there never was room")


@contextlib.contextmanager
def no_more_memory() -> Iterator[None]:
    """For anything large."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(TIMEOUT_S)
