"""The disk: every backend that is here gives back what was put, and says so when it cannot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from children import Child
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.errors import DiskFailed, DiskFull, OptionError, TransportFailed, TransportTimeout
from asr_serve.transfer import nixl_agent
from asr_serve.transfer.checksum import checksum
from asr_serve.transfer.disk import BLOCK, aligned_memory, nameless_file, nixl, open_disk, thread_pool, uring
from asr_serve.transfer.disk.base import DiskBackend, still_under_way

BACKENDS = ("uring", "threads", "nixl")
MIB = 1 << 20
WAIT_S = 60.0
"""Until something counts as hanging."""


@contextlib.contextmanager
def opened(folder: Path, nbytes: int, backend: str) -> Iterator[DiskBackend]:
    try:
        disk = open_disk(str(folder), nbytes, backend)  # type: ignore[arg-type]
    except OptionError as missing:
        pytest.skip(str(missing))
    try:
        assert isinstance(disk, DiskBackend)
        yield disk
    finally:
        disk.close()


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """So that small extents are cut, wait for a place and are done in another order."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (uring, thread_pool, nixl):
            patch.setattr(module, "PIECE_BYTES", 2 * BLOCK)
        patch.setattr(uring, "DEPTH", 4)
        patch.setattr(thread_pool, "UNDER_WAY", 4)
        patch.setattr(nixl, "UNDER_WAY", 4)
        yield


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def filled(nbytes: int, seed: int) -> memoryview:
    memory = aligned_memory(nbytes)
    np.frombuffer(memory, np.uint8)[:] = noise(memory.nbytes, seed)
    return memory


def descriptors(folder: Path) -> list[int]:
    """This process's open files in that folder, named or not."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found.append(int(name))
    return found


def truncate(folder: Path, nbytes: int) -> None:
    """Behind the disk's back."""
    (fd,) = descriptors(folder)
    with open(f"/proc/self/fd/{fd}", "r+b") as again:
        again.truncate(nbytes)


def in_a_child(script: str, *arguments: object, **more: str) -> str:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more
    ran = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_written_is_read_back(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, 24 * MIB, backend) as disk:
        assert (disk.name, disk.nbytes) == (backend, 24 * MIB)
        memory = filled(24 * MIB, 1)
        parts = [(at, memory[at : at + 6 * MIB]) for at in range(0, 24 * MIB, 6 * MIB)]
        assert sorted(disk.write(parts)) == [0, 1, 2, 3]
        back = aligned_memory(24 * MIB)
        # In another cut than it was written in.
        parts = [(at, back[at : at + 4 * MIB]) for at in range(0, 24 * MIB, 4 * MIB)]
        for index in disk.read(parts):
            at, part = parts[index]
            assert part == memory[at : at + 4 * MIB]
        assert back == memory
        assert list(disk.read([])) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_unwritten_data_is_zeros(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, MIB, backend) as disk:
        memory = filled(MIB, 2)
        assert list(disk.read([(0, memory)])) == [0]
        assert not np.frombuffer(memory, np.uint8).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_memory_in_many_extents(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, 16 * BLOCK, backend) as disk:
        memory = filled(2 * BLOCK, 3)
        assert sorted(disk.write([(at * BLOCK, memory) for at in range(0, 16, 2)])) == list(range(8))
        back = aligned_memory(16 * BLOCK)
        assert list(disk.read([(0, back)])) == [0]
        assert bytes(back) == bytes(memory) * 8


FILE_BLOCKS = 48
SPANS = st.lists(st.integers(0, FILE_BLOCKS), min_size=2, max_size=10, unique=True).map(sorted)
STEP = st.tuples(SPANS, SPANS, st.integers(0, 5), st.randoms(use_true_random=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_extents_in_any_order_equal_the_reference(backend: str, tmp_path: Path) -> None:
    with small_pieces(), opened(tmp_path, FILE_BLOCKS * BLOCK, backend) as disk:
        model = bytearray(FILE_BLOCKS * BLOCK)

        @settings(max_examples=60, deadline=None)
        @given(st.lists(STEP, max_size=4))
        def check(steps: list[tuple[list[int], list[int], int, object]]) -> None:
            for number, (written, read, first, order) in enumerate(steps):
                # Extents that touch but do not overlap, some of them read while the others are being written.
                extents = [(a * BLOCK, (b - a) * BLOCK) for a, b in pairwise(written)]
                order.shuffle(extents)  # type: ignore[attr-defined]
                theirs = [(at, filled(nbytes, number + at)) for at, nbytes in extents]
                # What is read while it is written may be either: only blocks that no write touches are looked at.
                still = [
                    (a * BLOCK, aligned_memory((b - a) * BLOCK))
                    for a, b in pairwise(read)
                    if all(b * BLOCK <= at or a * BLOCK >= at + nbytes for at, nbytes in extents)
                ]
                writing = disk.write(theirs)
                told = [next(writing) for _ in range(min(first, len(theirs)))]
                for index in disk.read(still):
                    at, memory = still[index]
                    assert memory == model[at : at + memory.nbytes]
                told += writing
                assert sorted(told) == list(range(len(theirs)))
                for at, memory in theirs:
                    model[at : at + memory.nbytes] = memory
            whole = aligned_memory(len(model))
            assert list(disk.read([(0, whole)])) == [0]
            assert whole == model

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_at_a_time(backend: str, tmp_path: Path) -> None:
    with small_pieces(), opened(tmp_path, 8 * MIB, backend) as disk:
        wrong: list[object] = []

        def go(half: int) -> None:
            memory, back = filled(4 * MIB, half), aligned_memory(4 * MIB)
            parts = [(half + at, memory[at : at + MIB]) for at in range(0, 4 * MIB, MIB)]
            for _ in range(5):
                told = sorted(disk.write(parts)), list(disk.read([(half, back)]))
                if told != ([0, 1, 2, 3], [0]) or back != memory:
                    wrong.append(told)

        both = [threading.Thread(target=go, args=(half,), daemon=True) for half in (0, 4 * MIB)]
        for each in both:
            each.start()
        for each in both:
            each.join(WAIT_S)
        assert not any(each.is_alive() for each in both)
        assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [0, MIB, MIB + 100, 3 * MIB + BLOCK + 1])
def test_a_truncated_file_is_an_error_and_whole_extents_are_read(backend: str, left: int, tmp_path: Path) -> None:
    with opened(tmp_path, 4 * MIB, backend) as disk:
        memory = filled(4 * MIB, 5)
        list(disk.write([(0, memory)]))
        truncate(tmp_path, left)
        back = aligned_memory(4 * MIB)
        parts = [(at, back[at : at + MIB]) for at in range(0, 4 * MIB, MIB)]
        told = []
        with pytest.raises(DiskFailed):
            told.extend(disk.read(parts))
        for index in told:
            at, part = parts[index]
            assert at + MIB <= left
            assert part == memory[at : at + MIB]
        # It may be written again.
        assert list(disk.write([(0, memory)])) == [0]
        assert list(disk.read([(0, back)])) == [0]
        assert back == memory


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_transfer_leaves_none_in_progress(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, 32 * MIB, backend) as disk:
        memory = aligned_memory(32 * MIB)
        reading = disk.read([(at, memory[at : at + MIB]) for at in range(0, 32 * MIB, MIB)])
        next(reading)
        reading.close()  # type: ignore[attr-defined]
        seen = np.frombuffer(memory, np.uint8)
        seen[:] = 0xEE
        list(disk.read([(0, aligned_memory(32 * MIB))]))
        assert (seen == 0xEE).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_during_a_read(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, 8 * MIB, backend) as disk:
        began, ended = threading.Event(), []

        def read() -> None:
            memory = aligned_memory(8 * MIB)
            try:
                while True:
                    for _ in disk.read([(at, memory[at : at + MIB]) for at in range(0, 8 * MIB, MIB)]):
                        began.set()
            except DiskFailed as error:
                ended.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert began.wait(WAIT_S)
        disk.close()
        reader.join(WAIT_S)
        assert not reader.is_alive()
        assert len(ended) == 1
        assert not descriptors(tmp_path)
        disk.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_between_two_polls(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, 8 * MIB, backend) as disk:
        reading = disk.read([(at, aligned_memory(MIB)) for at in range(0, 8 * MIB, MIB)])
        next(reading)
        disk.close()
        with pytest.raises(DiskFailed):
            list(reading)
        assert not descriptors(tmp_path)
        with pytest.raises(DiskFailed):
            list(disk.write([(0, aligned_memory(BLOCK))]))


def test_partial_blocks_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * BLOCK, "threads") as disk:
        memory = aligned_memory(4 * BLOCK)
        wrong = [
            (100, memory),
            (0, memory[: BLOCK + 1]),
            (0, memory[100 : 100 + BLOCK]),
            (-BLOCK, memory),
            (13 * BLOCK, memory),
        ]
        for extent in wrong:
            with pytest.raises(ValueError):
                disk.write([extent])
            with pytest.raises(ValueError):
                disk.read([(0, memory), extent])
        with pytest.raises(ValueError):
            disk.read([(0, memory.toreadonly())])
        assert list(disk.write([(12 * BLOCK, memory.toreadonly())])) == [0]


def test_aligned_memory() -> None:
    for nbytes, room in ((0, BLOCK), (1, BLOCK), (BLOCK, BLOCK), (3 * MIB + 1, 3 * MIB + BLOCK)):
        memory = aligned_memory(nbytes)
        assert memory.nbytes == room
        assert not memory.readonly
        assert nameless_file.address(memory) % BLOCK == 0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(OptionError) as said:
            open_disk(str(folder), BLOCK)
        assert said.value.param == "disk_path"
    with pytest.raises(OptionError):
        open_disk(str(tmp_path), 0)


LIMITED = """
import resource, sys
from asr_serve.errors import DiskFull
from asr_serve.transfer.disk import open_disk
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_disk(sys.argv[1], 8 << 20)
except DiskFull as error:
    print(error)
open_disk(sys.argv[1], 1 << 20).close()
"""


def test_more_than_one_file_may_have(tmp_path: Path) -> None:
    assert f"{8 * MIB} bytes do not fit in" in in_a_child(LIMITED, tmp_path)


TMPFS = """
import sys
from asr_serve.errors import DiskFull
from asr_serve.transfer.disk import aligned_memory, open_disk
try:
    open_disk(sys.argv[1], 8 << 20)
except DiskFull as error:
    print(error)
disk = open_disk(sys.argv[1], 1 << 20, "threads")
memory, back = aligned_memory(1 << 20), aligned_memory(1 << 20)
memory[:3] = b"abc"
list(disk.write([(0, memory)])), list(disk.read([(0, back)]))
assert back == memory
try:
    open_disk(sys.argv[1], 3 << 20)
except DiskFull:
    print("full while the other has its room")
disk.close()
open_disk(sys.argv[1], 3 << 20).close()
"""


def test_a_full_disk_is_an_error_at_open(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    tried = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=3m none "$0" && exec "$@"', str(room)]
    if subprocess.run([*tried, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a file system of our own wants privileges")
    ran = subprocess.run(
        [*tried, sys.executable, "-c", TMPFS, str(room)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said, still = ran.stdout.strip().splitlines()
    assert f"{8 * MIB} bytes do not fit in" in said
    assert f"{3 * MIB} bytes are free there" in said
    assert still == "full while the other has its room"


FULL = """
import os, resource, sys
from asr_serve.errors import DiskFailed
from asr_serve.transfer.disk import aligned_memory, open_disk
disk = open_disk(sys.argv[1], 4 << 20, sys.argv[2])
(fd,) = [n for n in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{n}").startswith(sys.argv[1])]
os.truncate(f"/proc/self/fd/{fd}", 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    list(disk.write([(0, aligned_memory(4 << 20))]))
except DiskFailed as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_room_in_the_middle_of_a_write(backend: str, tmp_path: Path) -> None:
    with opened(tmp_path, BLOCK, backend):
        pass
    # NIXL does not tell why it failed.
    assert in_a_child(FULL, tmp_path, backend) == ("DiskFailed" if backend == "nixl" else "DiskFull")


def test_a_file_system_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with opened(tmp_path, MIB, "threads") as disk:
        memory = filled(MIB, 6)
        list(disk.write([(0, memory)]))
        (back := aligned_memory(MIB))[:1] = b"x"
        list(disk.read([(0, back)]))
        assert back == memory
    with pytest.raises(DiskFull) as said:
        open_disk(str(tmp_path), 1 << 60)
    assert "bytes are free there" in str(said.value)


def test_a_disk_larger_than_the_disk(tmp_path: Path) -> None:
    with pytest.raises(DiskFull):
        open_disk(str(tmp_path), 1 << 60)
    assert not descriptors(tmp_path)


HELD = """
import os, sys
from asr_serve.transfer.disk import aligned_memory, open_disk
if sys.argv[3] == "named":
    del os.O_TMPFILE
disk = open_disk(sys.argv[1], 8 << 20, sys.argv[2])
writing = disk.write([(at << 20, aligned_memory(1 << 20)) for at in range(8)])
next(writing)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["nameless", "named"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_after_a_kill(backend: str, name: str, tmp_path: Path) -> None:
    with opened(tmp_path, BLOCK, backend):
        pass
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = Child(
        [sys.executable, "-c", HELD, str(tmp_path), backend, name],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert not list(tmp_path.iterdir())
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_direct_io(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, *more: int) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "not here")
        return real(fd, command, *more)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING, "asr_serve.disk"), opened(tmp_path, 4 * MIB, backend) as disk:
        assert not disk.direct
        assert "without O_DIRECT" in caplog.text
        memory, back = filled(4 * MIB, 7), aligned_memory(4 * MIB)
        assert list(disk.write([(0, memory)])) == [0]
        assert list(disk.read([(0, back)])) == [0]
        assert back == memory


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, MIB, "threads") as disk:
        read, write = os.preadv, os.pwritev

        def less(move: object, fd: int, memory: list[memoryview], at: int) -> int:
            whole = memory[0]
            some = max(BLOCK, whole.nbytes // 3 // 512 * 512)  # not always whole blocks
            return move(fd, [whole[:some]], at)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(os, "preadv", lambda *given: less(read, *given))
        monkeypatch.setattr(os, "pwritev", lambda *given: less(write, *given))
        memory, back = filled(MIB, 8), aligned_memory(MIB)
        assert list(disk.write([(0, memory)])) == [0]
        assert list(disk.read([(0, back)])) == [0]
        assert back == memory


FORBIDDEN = """
import ctypes, struct, sys
from asr_serve.errors import OptionError
from asr_serve.transfer.disk import open_disk
libc = ctypes.CDLL(None, use_errno=True)
# Every call but io_uring_setup (425 on every architecture) is allowed; that one fails with EPERM.
rules = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 425, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7fff0000)
held = ctypes.create_string_buffer(rules)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(held)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    print("no seccomp")
    sys.exit()
with_any = open_disk(sys.argv[1], 4096)
print(with_any.name)
try:
    open_disk(sys.argv[1], 4096, "uring")
except OptionError as error:
    print(error)
"""


def test_where_io_uring_is_forbidden(tmp_path: Path) -> None:
    with opened(tmp_path, BLOCK, "uring"):
        pass
    said = in_a_child(FORBIDDEN, tmp_path)
    if said == "no seccomp":
        pytest.skip(said)
    name, error = said.splitlines()
    assert name == "threads"
    assert "allows no io_uring (Operation not permitted)" in error


def test_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, BLOCK, "uring"):
        pass
    with contextlib.closing(open_disk(str(tmp_path), BLOCK)) as disk:
        assert disk.name == "uring"
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    with contextlib.closing(open_disk(str(tmp_path), BLOCK)) as disk:
        assert disk.name == "threads"
    with pytest.raises(OptionError, match="was not built"):
        open_disk(str(tmp_path), BLOCK, "uring")
    assert not descriptors(tmp_path)


def test_gds_works_or_the_error_names_what_is_missing(tmp_path: Path) -> None:
    if nixl_agent.installed() and nixl_agent.missing("GDS") is None:
        with opened(tmp_path, MIB, "gds") as disk:
            memory, back = filled(MIB, 10), aligned_memory(MIB)
            assert list(disk.write([(0, memory)])) == [0]
            assert list(disk.read([(0, back)])) == [0]
            assert back == memory
        return
    with pytest.raises(OptionError) as said:
        open_disk(str(tmp_path), BLOCK, "gds")
    assert said.value.param == "disk_backend"
    assert ("libcufile" if nixl_agent.installed() else "NIXL is not installed") in str(said.value)
    assert not descriptors(tmp_path)


def test_nixl_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(OptionError, match="NIXL is not installed"):
        open_disk(str(tmp_path), BLOCK, "nixl")


class StuckAgent:
    """NIXL's, with a back end that stops in the middle. What it still knows of, its disk may touch."""

    all: ClassVar[list[StuckAgent]] = []

    def __init__(self, backend: str, params: object = None) -> None:
        self.registered: list[tuple[int, int, str]] = []
        self.started = self.released = 0
        self.good = 1 << 30
        self.closed = False
        self.all.append(self)

    def register(self, at: int, nbytes: int, *, kind: str = "DRAM", device: int = 0) -> object:
        self.registered.append((at, nbytes, kind))
        return self.registered[-1]

    def deregister(self, entry: tuple[int, int, str]) -> None:
        self.registered.remove(entry)

    def start_transfer(self, operation: str, local: object, remote: object, remote_kind: str = "") -> StuckTransfer:
        self.started += 1
        return StuckTransfer(self, self.started)

    def close(self) -> None:
        self.closed = True


class StuckTransfer:
    def __init__(self, agent: StuckAgent, number: int) -> None:
        self.agent, self.number = agent, number

    def poll(self) -> bool:
        if self.number == self.agent.good + 1:
            raise TransportFailed("this one failed")
        return self.number <= self.agent.good

    def wait(self, timeout_s: float) -> None:
        if not self.poll():
            raise TransportTimeout(f"nothing more came from NIXL in {timeout_s:g} s")

    def release(self) -> None:
        self.agent.released += 1


def test_a_stuck_transfer_keeps_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl, "NixlAgent", StuckAgent)
    monkeypatch.setattr(nixl, "LEAKED_BUFFERS", astray := [])
    disk = open_disk(str(tmp_path), 8 * nixl.PIECE_BYTES, "nixl")
    agent = StuckAgent.all[-1]
    agent.good = agent.started + 1
    owner = np.frombuffer(aligned_memory(4 * nixl.PIECE_BYTES), np.uint8)
    gone = weakref.ref(owner)
    reading = disk.read([(0, owner.data)])
    del owner
    with caplog.at_level(logging.ERROR, "asr_serve.disk"), pytest.raises(DiskFailed) as said:
        list(reading)
    assert still_under_way(said.value)
    assert "not used any more" in str(said.value)
    assert f"{4 * nixl.PIECE_BYTES} bytes of memory are never used again" in caplog.text
    assert len(agent.registered) == 2, "memory and file"
    assert agent.started - agent.released == 2, "those after the one that failed"
    started = len(StuckAgent.all), agent.started
    for work in (disk.read, disk.write):
        with pytest.raises(DiskFailed, match="not used any more") as again:
            list(work([(0, aligned_memory(BLOCK))]))
        assert not still_under_way(again.value), "it was not begun"
    assert started == (len(StuckAgent.all), agent.started)
    disk.close()
    del reading, said, again, disk
    gc.collect()
    assert gone() is not None, "the memory is the disk's for ever"
    assert len(descriptors(tmp_path)) == 1, "and so is the file"
    assert not agent.closed
    os.close(descriptors(tmp_path)[0])
    assert astray


def test_the_checksum() -> None:
    # XXH3 of nothing, from the reference implementation (xxhsum -H3).
    assert checksum(b"") == 0x2D06800538D394C2
    data = noise(100_000, 9)
    assert checksum(data) == checksum(data.tobytes()) == checksum(memoryview(data.tobytes()))
    before = checksum(data)
    data[99_999] ^= 1
    assert checksum(data) != before
