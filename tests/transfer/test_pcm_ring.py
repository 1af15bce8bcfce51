"""PCM between real processes: every byte and its order, waiting on both sides, and the death of either."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import children
import numpy as np
import pytest

from asr_serve import kernels
from asr_serve.errors import EngineError, OutOfStep, PeerGone
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmReader, PcmWriter

SLOTS, PAYLOAD_BYTES = 8, 256
RING_SAMPLES = SLOTS * PAYLOAD_BYTES // 4
PRODUCER_SLEEPS_AT = 192
TIMEOUT_S = 60


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def pcm_of(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(samples, np.float32)


class Pair(NamedTuple):
    writer: PcmWriter
    reader: PcmReader
    memory: mmap.mmap

    def writer_sleeps(self) -> None:
        """Wait until `put` waits for room."""
        asleep = threading.Event()
        while not struct.unpack_from("=Q", self.memory, PRODUCER_SLEEPS_AT)[0]:
            asleep.wait(0.001)


@pytest.fixture(params=["native", "reference"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack) -> Pair:
    """Both ends in this process."""
    choose(request.param, monkeypatch)
    fd, nbytes = ring.create(SLOTS, PAYLOAD_BYTES)
    ends = socket.socketpair()
    pair = Pair(PcmWriter(fd, ends[0]), PcmReader(fd, ends[1]), mmap.mmap(fd, nbytes))
    os.close(fd)
    undo.callback(pair.writer.close)
    undo.callback(pair.reader.close)
    return pair


def choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "1" if kind == "native" else "0")
    if kind == "native" and kernels.ring().__name__.endswith("reference"):
        pytest.skip("the native ring is not built here")


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 63, 64, 65, RING_SAMPLES])
def test_an_array_is_read_as_written(pair: Pair, samples: int) -> None:
    for lap in range(5):
        pcm = pcm_of(samples, lap)
        pair.writer.write_message(lap, pcm)
        assert pair.reader.depth == pair.writer.depth == -(-samples * 4 // PAYLOAD_BYTES)
        heard = pair.reader.read_message(lap, samples)
        assert heard.dtype == np.float32
        assert heard.flags.writeable
        assert heard.flags.owndata
        assert np.array_equal(heard, pcm)
        assert pair.reader.depth == 0


@pytest.mark.parametrize("dtype", [np.int16, np.float16, np.float64, np.uint8])
def test_any_dtype(pair: Pair, dtype: type) -> None:
    pcm = np.arange(200).astype(dtype)
    pair.writer.write_message(1, pcm)
    assert np.array_equal(pair.reader.read_message(1, 200, dtype), pcm)


def test_a_message_longer_than_the_ring_waits_for_room(pair: Pair) -> None:
    pcm = pcm_of(10 * RING_SAMPLES)
    with ThreadPoolExecutor() as threads:
        put = threads.submit(pair.writer.write_message, 1, pcm)
        pair.writer_sleeps()
        assert pair.writer.depth == pair.writer.slots == SLOTS
        assert pair.writer.full_waits == 1
        assert np.array_equal(pair.reader.read_message(1, len(pcm)), pcm)
        put.result(TIMEOUT_S)


def test_a_writer_on_every_thread(pair: Pair) -> None:
    """Messages stay whole, whoever wins."""
    onlooker = kernels.ring().Ring(pair.memory)
    with ThreadPoolExecutor(4) as threads:
        puts = [threads.submit(pair.writer.write_message, n, pcm_of(700, n)) for n in range(40)]
        left = set(range(40))
        while left:
            if (slot := onlooker.peek()) is not None:
                session = slot[0]
                left.remove(session)
                assert np.array_equal(pair.reader.read_message(session, 700), pcm_of(700, session))
        for put in puts:
            put.result(TIMEOUT_S)


OUT_OF_STEP: dict[str, Callable[[PcmWriter], None]] = {
    "another session": lambda writer: writer.write_message(2, pcm_of(100)),
    "another session behind half of it": lambda writer: (
        writer.write_message(1, pcm_of(64)),
        writer.write_message(2, pcm_of(36)),
    )[0],
    "more than announced": lambda writer: writer.write_message(1, pcm_of(101)),
    "less, and then more of the same": lambda writer: (
        writer.write_message(1, pcm_of(50)),
        writer.write_message(1, pcm_of(50)),
    )[0],
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_other_audio_than_was_announced_is_refused(pair: Pair, case: str) -> None:
    OUT_OF_STEP[case](pair.writer)
    with pytest.raises(OutOfStep, match="session 1 was announced") as caught:
        pair.reader.read_message(1, 100)
    assert isinstance(caught.value, EngineError)
    with pytest.raises(PeerGone):  # nothing that follows can be right
        pair.writer.write_message(3, pcm_of(1))


def test_a_put_that_fails_halfway_closes_the_ring(pair: Pair) -> None:
    with pytest.raises((TypeError, ValueError)):
        pair.writer.write_message(-1, pcm_of(1))
    with pytest.raises(PeerGone):
        pair.reader.read_message(1, 1)


def test_an_array_with_gaps_is_refused(pair: Pair) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        pair.writer.write_message(1, pcm_of(100)[::2])
    pair.writer.write_message(1, pcm_of(100))
    assert np.array_equal(pair.reader.read_message(1, 100), pcm_of(100))


def test_a_full_bell_is_a_rung_bell(pair: Pair) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            pair.writer._bell._end.send(b"!" * 4_096, socket.MSG_DONTWAIT)
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(pair.reader.read_message, 1, 5 * RING_SAMPLES)
        pair.writer.write_message(1, pcm_of(5 * RING_SAMPLES))
        assert np.array_equal(taken.result(TIMEOUT_S), pcm_of(5 * RING_SAMPLES))


def test_close_wakes_both_sides(pair: Pair) -> None:
    with ThreadPoolExecutor() as threads:
        put = threads.submit(pair.writer.write_message, 1, pcm_of(2 * RING_SAMPLES))
        pair.writer_sleeps()
        pair.writer.close()
        with pytest.raises(PeerGone):
            put.result(TIMEOUT_S)
        with pytest.raises(PeerGone, match=f"{4 * RING_SAMPLES} of {8 * RING_SAMPLES} bytes"):
            pair.reader.read_message(1, 2 * RING_SAMPLES)
    pair.writer.close()
    pair.reader.close()
    for call in (lambda: pair.writer.write_message(1, pcm_of(1)), lambda: pair.reader.read_message(1, 1)):
        with pytest.raises(PeerGone):
            call()
    assert pair.writer.depth == 0


def test_what_was_put_before_the_writer_closed_is_still_taken(pair: Pair) -> None:
    pair.writer.write_message(1, pcm_of(300))
    pair.writer.close()
    assert np.array_equal(pair.reader.read_message(1, 300), pcm_of(300))
    with pytest.raises(PeerGone):
        pair.reader.read_message(2, 1)


def test_memory_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    fd, nbytes = ring.create(SLOTS, PAYLOAD_BYTES)
    try:
        assert os.fstat(fd).st_size == nbytes
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
        assert kernels.ring().Ring(mmap.mmap(fd, 0)).slots == SLOTS
    finally:
        os.close(fd)


def test_memory_without_a_ring_is_refused(tmp_path: Path) -> None:
    ends = socket.socketpair()
    with ends[0], ends[1], (tmp_path / "zeros").open("w+b") as file:
        file.truncate(65_536)
        with pytest.raises(ValueError, match="no ring"):
            PcmWriter(file.fileno(), ends[0])


def test_invalid_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        ring.create(3, 64)


FLAT = f"""
import gc, mmap, os, socket
import numpy as np
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmReader, PcmWriter

def turn(times):
    for _ in range(times):
        fd, _ = ring.create({SLOTS}, {PAYLOAD_BYTES})
        ends = socket.socketpair()
        writer, reader = PcmWriter(fd, ends[0]), PcmReader(fd, ends[1])
        os.close(fd)
        for session in range(50):
            writer.write_message(session, pcm)
            reader.read_message(session, len(pcm))
        writer.close()
        reader.close()

def held():
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * mmap.PAGESIZE

pcm = np.ones({RING_SAMPLES}, np.float32)
turn(50)
before = held()
turn(500)
print(*before, *held())
"""
"""A process of its own: in that of the tests, what others have left behind is closed meanwhile."""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors and pages in /proc")
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_bytes_and_descriptors_stay_flat(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    choose(kind, monkeypatch)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with children.Child([sys.executable, "-c", FLAT], stdout=subprocess.PIPE, env=environ, text=True) as process:
        told, _ = process.communicate(timeout=120)
    descriptors, nbytes, descriptors_after, nbytes_after = map(int, told.split())
    assert descriptors_after == descriptors
    assert nbytes_after - nbytes < 2 << 20


# --- two processes --------------------------------------------------------------------------------

# Each of these is a process: its arguments are the descriptors of the ring and of its end of the bell.
CHILD = """
import hashlib, random, socket, sys
import numpy as np
from asr_serve.transfer.ring import PcmReader, PcmWriter

fd, bell = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
sizes = random.Random(5)
"""
HEARS = """
reader, heard = PcmReader(fd, bell), hashlib.sha256()
for session in range(300):
    heard.update(reader.read_message(session, sizes.randrange(2_000), np.int16))
print(heard.hexdigest(), flush=True)
"""
SPEAKS = """
writer, said = PcmWriter(fd, bell), hashlib.sha256()
data = np.random.default_rng(5).integers(-32_768, 32_768, 2_000, np.int16)
for session in range(300):
    pcm = np.roll(data, session)[: sizes.randrange(2_000)]
    said.update(pcm)
    writer.write_message(session, pcm)
print(said.hexdigest(), flush=True)
"""
READER_WAITS = """
reader = PcmReader(fd, bell)
print("here", flush=True)
reader.read_message(1, 100)
sys.stdin.read()
"""
WRITER_WAITS = """
writer = PcmWriter(fd, bell)
print("here", flush=True)
writer.write_message(1, np.zeros(100_000, np.float32))
"""
WRITER_IDLES = """
writer = PcmWriter(fd, bell)
print("here", flush=True)
sys.stdin.read()
"""


class Child(NamedTuple):
    process: subprocess.Popen[str]
    fd: int
    bell: socket.socket

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


def child(script: str, undo: contextlib.ExitStack, kind: str = "native") -> Child:
    """A process at the other end of a new ring."""
    fd, _ = ring.create(SLOTS, PAYLOAD_BYTES)
    undo.callback(os.close, fd)
    ours, theirs = socket.socketpair()
    undo.enter_context(ours)
    environ = {
        **os.environ,
        "ASR_SERVE_NATIVE": "1" if kind == "native" else "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with theirs:
        process = undo.enter_context(
            children.Child(
                [sys.executable, "-c", CHILD + script, str(fd), str(theirs.fileno())],
                pass_fds=(fd, theirs.fileno()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                text=True,
            )
        )
    undo.callback(process.kill)
    return Child(process, fd, ours)


@pytest.mark.parametrize("here", ["native", "reference"])
@pytest.mark.parametrize("there", ["native", "reference"])
def test_every_byte_arrives_there(
    here: str, there: str, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack
) -> None:
    choose(here, monkeypatch)
    other = child(HEARS, undo, there)
    writer, said, sizes = PcmWriter(other.fd, other.bell), hashlib.sha256(), random.Random(5)
    data = np.random.default_rng(5).integers(-32_768, 32_768, 2_000, np.int16)
    for session in range(300):
        pcm = np.roll(data, session)[: sizes.randrange(2_000)]
        said.update(pcm)
        writer.write_message(session, pcm)
    assert other.line() == said.hexdigest()


@pytest.mark.parametrize("here", ["native", "reference"])
@pytest.mark.parametrize("there", ["native", "reference"])
def test_every_byte_arrives_here(
    here: str, there: str, monkeypatch: pytest.MonkeyPatch, undo: contextlib.ExitStack
) -> None:
    choose(here, monkeypatch)
    other = child(SPEAKS, undo, there)
    reader, heard, sizes = PcmReader(other.fd, other.bell), hashlib.sha256(), random.Random(5)
    for session in range(300):
        heard.update(reader.read_message(session, sizes.randrange(2_000), np.int16))
    assert other.line() == heard.hexdigest()


def in_a_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *arguments).result(TIMEOUT_S)


def test_a_reader_that_is_killed_ends_a_put_that_waits(undo: contextlib.ExitStack) -> None:
    other = child(READER_WAITS, undo)
    writer = PcmWriter(other.fd, other.bell)
    assert other.line() == "here"
    writer.write_message(1, pcm_of(100))
    asleep = threading.Event()
    while writer.depth:  # until it is read, it takes one of the slots that the next one is to fill
        asleep.wait(0.001)
    with ThreadPoolExecutor() as threads:
        put = threads.submit(writer.write_message, 2, pcm_of(10 * RING_SAMPLES))
        memory = mmap.mmap(other.fd, 0)
        while not (writer.depth == SLOTS and struct.unpack_from("=Q", memory, PRODUCER_SLEEPS_AT)[0]):
            asleep.wait(0.001)
        other.kill()
        with pytest.raises(PeerGone, match=f"{4 * RING_SAMPLES} of"):
            put.result(TIMEOUT_S)
    with pytest.raises(PeerGone, match="0 of 4 bytes"):
        writer.write_message(3, pcm_of(1))


def test_a_writer_that_is_killed_in_the_middle_of_a_message(undo: contextlib.ExitStack) -> None:
    other = child(WRITER_WAITS, undo)
    reader, asleep = PcmReader(other.fd, other.bell), threading.Event()
    assert other.line() == "here"
    while reader.depth < SLOTS:
        asleep.wait(0.001)
    other.kill()
    other.process.wait(60)
    with pytest.raises(PeerGone, match=f"{4 * RING_SAMPLES} of 400000 bytes"):
        in_a_thread(reader.read_message, 1, 100_000)


def test_a_writer_that_is_killed_ends_a_take_that_waits(undo: contextlib.ExitStack) -> None:
    other = child(WRITER_IDLES, undo)
    reader = PcmReader(other.fd, other.bell)
    assert other.line() == "here"
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(reader.read_message, 1, 1)
        other.kill()
        with pytest.raises(PeerGone, match="0 of 4 bytes"):
            taken.result(TIMEOUT_S)


def test_a_reader_that_is_killed_is_noticed_though_there_is_room(undo: contextlib.ExitStack) -> None:
    other = child(READER_WAITS, undo)
    writer = PcmWriter(other.fd, other.bell)
    assert other.line() == "here"
    other.kill()
    other.process.wait(60)
    with pytest.raises(PeerGone):
        writer.write_message(1, pcm_of(1))


def test_a_killed_reader_s_ring_serves_the_next_one(undo: contextlib.ExitStack) -> None:
    """Memory and cursors outlive a process: what it had not released comes again."""
    other = child(READER_WAITS, undo)
    writer = PcmWriter(other.fd, other.bell)
    assert other.line() == "here"
    writer.write_message(1, pcm_of(100))
    asleep = threading.Event()
    while writer.depth:
        asleep.wait(0.001)
    writer.write_message(2, pcm_of(100))
    other.kill()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert np.array_equal(PcmReader(other.fd, theirs).read_message(2, 100), pcm_of(100))
        PcmWriter(other.fd, ours).write_message(3, pcm_of(5))
        assert np.array_equal(PcmReader(other.fd, theirs).read_message(3, 5), pcm_of(5))


def test_the_side_of_the_server_needs_no_torch() -> None:
    script = "import sys, asr_serve.transfer.ring; sys.exit('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0
