"""The ring and its reference: the same answers and the same bytes for any sequence of calls, and what they promise."""

from __future__ import annotations

import gc
import mmap
import random
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve import kernels
from asr_serve.kernels import ring_reference

PAYLOAD = 64
SHARED_BYTES, LINE = 5 * 64, 64
VERSION_AT, SLOTS_AT, PAYLOAD_AT, TAIL_AT, HEAD_AT, PRODUCER_AT, CONSUMER_AT = 8, 16, 24, 64, 128, 192, 256


def built() -> ModuleType:
    ring = kernels.ring()
    if ring is ring_reference:
        pytest.skip("the native ring is not built or not wanted: pip install -e . builds it")
    return ring


@pytest.fixture(params=["native", "reference"])
def ring(request: pytest.FixtureRequest) -> ModuleType:
    return built() if request.param == "native" else ring_reference


def memory_of(ring: ModuleType, slots: int = 4, payload_bytes: int = PAYLOAD) -> mmap.mmap:
    memory = mmap.mmap(-1, ring.layout(slots, payload_bytes))
    ring.format(memory, slots, payload_bytes)
    return memory


def word(memory: mmap.mmap, at: int, value: int | None = None) -> int:
    if value is not None:
        struct.pack_into("=Q", memory, at, value)
    return int(struct.unpack_from("=Q", memory, at)[0])


def bytes_of(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


# --- native against the reference ----------------------------------------------------------------------

OPS = st.one_of(
    st.tuples(st.just("fill"), st.integers(0, PAYLOAD)),
    st.tuples(st.sampled_from(["lend", "peek", "release", "producer_sleeps", "consumer_sleeps", "reattach"])),
    st.tuples(st.just("commit"), st.integers(0, 3), st.integers(0, 2), st.integers(0, PAYLOAD + 1)),
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 6 * PAYLOAD)),
    st.tuples(st.just("read_into"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 6 * PAYLOAD)),
)


class Side:
    """One implementation with its memory; what it answers is told in values that can be compared."""

    def __init__(self, ring: ModuleType, slots: int) -> None:
        self.module, self.memory = ring, memory_of(ring, slots)
        self.ring = ring.Ring(self.memory)
        self.lent: memoryview | None = None

    def call(self, step: int, name: str, *arguments: int) -> Any:
        try:
            return getattr(self, name)(step, *arguments)
        except (RuntimeError, ValueError) as refused:
            return type(refused), str(refused)

    def fill(self, step: int, size: int) -> None:
        if self.lent is not None:
            self.lent[:size] = bytes_of(size, step)

    def lend(self, step: int) -> int | None:
        self.lent = self.ring.lend()
        return None if self.lent is None else len(self.lent)

    def commit(self, step: int, session: int, chunk: int, used: int) -> bool:
        asked = self.ring.commit(session, chunk, used)
        self.lent = None
        return bool(asked)

    def write(self, step: int, session: int, chunk: int, size: int) -> Any:
        return self.ring.write(session, chunk, bytes_of(size, step))

    def peek(self, step: int) -> Any:
        slot = self.ring.peek()
        return slot and (slot[0], slot[1], bytes(slot[2]), slot[2].readonly)

    def read_into(self, step: int, session: int, chunk: int, size: int) -> Any:
        target = bytearray(size)
        return self.ring.read_into(session, chunk, target), bytes(target)

    def release(self, step: int) -> bool:
        return bool(self.ring.release())

    def producer_sleeps(self, step: int) -> bool:
        return bool(self.ring.producer_sleeps())

    def consumer_sleeps(self, step: int) -> bool:
        return bool(self.ring.consumer_sleeps())

    def reattach(self, step: int) -> None:
        self.ring, self.lent = self.module.Ring(self.memory), None


@settings(max_examples=300, deadline=None)
@given(slots=st.sampled_from([2, 4]), ops=st.lists(OPS, max_size=60))
def test_any_calls_give_the_same_answers_and_the_same_bytes(slots: int, ops: list[tuple[Any, ...]]) -> None:
    ours, theirs = Side(built(), slots), Side(ring_reference, slots)
    for step, op in enumerate(ops):
        assert ours.call(step, *op) == theirs.call(step, *op), op
        assert (ours.ring.depth, ours.ring.full_count) == (theirs.ring.depth, theirs.ring.full_count)
        assert ours.memory[:] == theirs.memory[:], op


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAYLOAD), st.integers(0, 9)), max_size=80))
def test_what_comes_out_is_what_went_in(calls: list[tuple[bool, int, int]]) -> None:
    for ring in {kernels.ring(), ring_reference}:
        side, inside = ring.Ring(memory_of(ring)), deque[tuple[int, int, bytes]]()
        for step, (writes, size, session) in enumerate(calls):
            if writes:
                data, at = bytes_of(size, step), 0
                written, _ = side.write(session, 0, data)
                for chunk, at in enumerate(range(0, written, PAYLOAD)):
                    inside.append((session, chunk, data[at : min(at + PAYLOAD, written)]))
                assert written == size or len(inside) == side.slots
            elif (slot := side.peek()) is not None:
                assert (*slot[:2], bytes(slot[2])) == inside.popleft()
                side.release()
            else:
                assert not inside
            assert side.depth == len(inside)


@pytest.mark.parametrize("producer", ["native", "reference"])
@pytest.mark.parametrize("consumer", ["native", "reference"])
def test_a_producer_and_a_consumer_of_either_kind_on_two_threads(producer: str, consumer: str) -> None:
    kinds = {"native": built(), "reference": ring_reference}
    memory, rounds = memory_of(ring_reference, 4), 4_000
    bells = {"producer": threading.Semaphore(0), "consumer": threading.Semaphore(0)}

    def produce() -> None:
        side = kinds[producer].Ring(memory)
        for n in range(rounds):
            while (payload := side.lend()) is None:
                if side.producer_sleeps():
                    bells["producer"].acquire()
            payload[: n % 65] = bytes([n % 251]) * (n % 65)
            if side.commit(n, 2 * n, n % 65):
                bells["consumer"].release()

    thread = threading.Thread(target=produce)
    thread.start()
    side = kinds[consumer].Ring(memory)
    for n in range(rounds):
        while (slot := side.peek()) is None:
            if side.consumer_sleeps():
                assert bells["consumer"].acquire(timeout=120), "a wake-up was lost"
        assert (*slot[:2], bytes(slot[2])) == (n, 2 * n, bytes([n % 251]) * (n % 65))
        if side.release():
            bells["producer"].release()
    thread.join(60)
    assert side.depth == 0


# --- memory ---------------------------------------------------------------------------------------


def test_slots_lie_on_cache_lines_of_their_own_and_slot_i_starts_at_i(ring: ModuleType) -> None:
    memory = memory_of(ring, 8, 128)
    assert len(memory) == ring.layout(8, 128) == SHARED_BYTES + 8 * (LINE + 128)
    assert [word(memory, SHARED_BYTES + i * (LINE + 128)) for i in range(8)] == list(range(8))


def test_every_slot_is_used_lap_after_lap(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring, 4))
    for lap in range(5):
        for i in range(4):
            assert side.write(lap, i, bytes([lap, i])) == (2, False)
        assert side.lend() is None
        assert side.depth == 4
        assert side.full_count == lap + 1
        for i in range(4):
            slot = side.peek()
            assert (*slot[:2], bytes(slot[2])) == (lap, i, bytes([lap, i]))
            side.release()
        assert side.peek() is None


def test_format_empties_whatever_was_there(ring: ModuleType) -> None:
    memory = mmap.mmap(-1, ring.layout(4, PAYLOAD))
    memory[:] = b"\xa5" * len(memory)
    ring.format(memory, 4, PAYLOAD)
    side = ring.Ring(memory)
    assert (side.depth, side.full_count, side.slots, side.payload_bytes) == (0, 0, 4, PAYLOAD)
    assert side.peek() is None
    assert side.write(1, 0, b"x" * 256) == (256, False)


def test_lent_memory_is_that_of_the_ring(ring: ModuleType) -> None:
    memory = memory_of(ring)
    side = ring.Ring(memory)
    payload = side.lend()
    assert payload.nbytes == PAYLOAD
    assert not payload.readonly
    payload[:5] = b"hello"
    assert memory[SHARED_BYTES + LINE :][:5] == b"hello"
    assert side.lend() == payload, "the same slot until it is committed"
    side.commit(2**64 - 1, 7, 5)
    session, chunk, view = side.peek()
    assert (session, chunk, bytes(view)) == (2**64 - 1, 7, b"hello")
    assert view.readonly
    memory[SHARED_BYTES + LINE] = ord("j")
    assert bytes(view) == b"jello"


def test_the_buffer_lives_as_long_as_its_views(ring: ModuleType) -> None:
    memory = memory_of(ring)
    payload = ring.Ring(memory).lend()
    gc.collect()
    with pytest.raises(BufferError):
        memory.close()
    payload[:] = b"x" * PAYLOAD
    del payload
    memory.close()


def test_arrays_of_any_kind_go_through(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring, 4, 1_024))
    pcm = np.arange(600, dtype=np.float32).reshape(2, 300)
    pcm.flags.writeable = False
    assert side.write(1, 0, pcm) == (2_400, False)
    heard = np.empty(600, np.float32)
    assert side.read_into(1, 0, heard) == (2_400, False)
    assert (heard.reshape(2, 300) == pcm).all()
    assert side.write(1, 0, np.empty(0)) == side.read_into(1, 0, np.empty(0)) == (0, False)


def test_a_copy_that_lets_go_of_the_gil(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring, 64, 16_384))
    data, heard = bytes_of(1_000_000, 1), bytearray(1_000_000)
    assert side.write(3, 0, data) == (len(data), False)
    assert side.read_into(3, 0, heard) == (len(data), False)
    assert heard == data


# --- whose turn it is -----------------------------------------------------------------------------


def test_reading_stops_at_another_session_another_chunk_and_where_it_no_longer_fits(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring, 8))
    side.write(1, 0, b"a" * 100)
    side.write(1, 7, b"b" * 10)
    side.write(2, 0, b"c" * 10)
    room = bytearray(200)
    assert side.read_into(2, 0, room) == (0, False)
    assert side.read_into(1, 1, room) == (0, False)
    assert side.read_into(1, 0, bytearray(63)) == (0, False), "a slot is never cut"
    assert side.read_into(1, 0, bytearray(99)) == (64, False)
    assert side.read_into(1, 1, room) == (36, False), "and not what follows as chunk 7"
    assert side.read_into(1, 7, room) == (10, False)
    assert side.read_into(2, 0, room) == (10, False)


def test_a_sleeping_reader_is_woken_once_before_the_rest_is_copied(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring, 4))
    assert side.consumer_sleeps()
    assert side.write(1, 0, b"x" * 256) == (64, True)
    assert side.write(1, 1, b"x" * 192) == (192, False)
    assert not side.consumer_sleeps(), "there is something to read"
    assert side.write(1, 4, b"x") == (0, False)
    assert side.producer_sleeps()
    assert side.read_into(1, 0, bytearray(256)) == (64, True)
    assert side.read_into(1, 1, bytearray(192)) == (192, False)
    assert not side.producer_sleeps(), "there is room"
    assert side.write(1, 0, b"x") == (1, False)


def test_either_side_may_attach_again_and_continues(ring: ModuleType) -> None:
    memory = memory_of(ring)
    ring.Ring(memory).write(1, 0, b"x" * 100)
    ring.Ring(memory).write(2, 0, b"y")
    side = ring.Ring(memory)
    assert side.depth == 3
    assert side.read_into(1, 0, bytearray(100)) == (100, False)
    assert ring.Ring(memory).peek()[:2] == (2, 0)
    assert ring.Ring(memory).lend() is not None


@pytest.mark.parametrize("seen", [False, True])
def test_a_producer_killed_within_commit_left_no_gap(ring: ModuleType, seen: bool) -> None:
    memory = memory_of(ring, 2)
    side = ring.Ring(memory)
    side.write(1, 0, b"x")
    word(memory, TAIL_AT, 0)  # the slot was published, the cursor not yet moved
    if seen:
        assert side.read_into(1, 0, bytearray(1)) == (1, False)
        assert side.depth == 0
    side = ring.Ring(memory)
    assert not side.producer_sleeps()
    assert side.write(1, 1, b"y") == (1, False)
    assert side.depth == (1 if seen else 2)


@pytest.mark.parametrize("filled", [False, True])
def test_a_consumer_killed_within_release_reads_nothing_twice(ring: ModuleType, filled: bool) -> None:
    memory = memory_of(ring, 2)
    side = ring.Ring(memory)
    side.write(1, 0, b"x" * 65)
    side.peek()
    side.release()
    word(memory, HEAD_AT, 0)
    if filled:
        side.write(1, 2, b"z")
    side = ring.Ring(memory)
    assert side.peek()[:2] == (1, 1)
    side.release()
    assert side.depth == filled


def test_a_slot_with_an_invalid_length_is_not_read(ring: ModuleType) -> None:
    memory = memory_of(ring)
    side = ring.Ring(memory)
    side.write(1, 0, b"x")
    word(memory, SHARED_BYTES + 24, PAYLOAD + 1)
    for call in (side.peek, lambda: side.read_into(1, 0, bytearray(500))):
        with pytest.raises(RuntimeError, match="corrupt"):
            call()


# --- what must be refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "payload_bytes"),
    [(0, 64), (1, 64), (3, 64), (2**21, 64), (4, 0), (4, 63), (4, 96), (4, 2**29), (-4, 64), (4, -64)],
)
def test_invalid_shapes_are_refused(ring: ModuleType, slots: int, payload_bytes: int) -> None:
    with pytest.raises((ValueError, TypeError)):
        ring.layout(slots, payload_bytes)
    with pytest.raises((ValueError, TypeError)):
        ring.format(mmap.mmap(-1, 65_536), slots, payload_bytes)


def changed(at: int, value: int) -> Callable[[ModuleType], Any]:
    def make(ring: ModuleType) -> mmap.mmap:
        memory = memory_of(ring)
        word(memory, at, value)
        return memory

    return make


BUFFERS: dict[str, tuple[type[Exception], str, Callable[[ModuleType], Any]]] = {
    "zeros": (ValueError, "no ring", lambda _: mmap.mmap(-1, 4_096)),
    "nothing": (ValueError, "no ring|64", lambda _: bytearray()),
    "too short for a header": (ValueError, "no ring", lambda ring: memoryview(memory_of(ring))[:256]),
    "cut off": (ValueError, "smaller", lambda ring: memoryview(memory_of(ring))[:-1]),
    "another version": (ValueError, "version", changed(VERSION_AT, 99)),
    "slots that cannot be": (ValueError, "slots", changed(SLOTS_AT, 3)),
    "more slots than memory": (ValueError, "smaller", changed(SLOTS_AT, 2**20)),
    "payload that cannot be": (ValueError, "payload_bytes", changed(PAYLOAD_AT, 2**63)),
    "not at a cache line": (ValueError, "64", lambda ring: memoryview(mmap.mmap(-1, 4_096))[8:]),
    "read-only": (BufferError, "writable", lambda ring: bytes(memory_of(ring))),
    "with gaps": ((BufferError, TypeError), "contiguous", lambda ring: memoryview(memory_of(ring))[::2]),
    "no buffer": (TypeError, "bytes-like", lambda ring: 7),
}  # fmt: skip


@pytest.mark.parametrize("case", BUFFERS)
def test_buffers_without_a_ring_are_refused(ring: ModuleType, case: str) -> None:
    error, says, make = BUFFERS[case]
    with pytest.raises(error, match=says):
        ring.Ring(make(ring))


def test_a_buffer_too_small_for_the_ring(ring: ModuleType) -> None:
    with pytest.raises(ValueError, match="smaller"):
        ring.format(mmap.mmap(-1, ring.layout(4, PAYLOAD) - 1), 4, PAYLOAD)


WRONG: dict[str, Callable[[Any], Any]] = {
    "commit without lend": lambda side: side.commit(1, 0, 1),
    "commit twice": lambda side: (side.lend(), side.commit(1, 0, 1), side.commit(1, 0, 1)),
    "more than a payload": lambda side: (side.lend(), side.commit(1, 0, PAYLOAD + 1)),
    "less than nothing": lambda side: (side.lend(), side.commit(1, 0, -1)),
    "release without peek": lambda side: side.release(),
    "release twice": lambda side: (side.write(1, 0, b"xx"), side.peek(), side.release(), side.release()),
    "release of nothing": lambda side: (side.peek(), side.release()),
    "write over what is lent": lambda side: (side.lend(), side.write(1, 0, b"x")),
    "read into bytes": lambda side: (side.write(1, 0, b"x"), side.read_into(1, 0, b"x")),
    "write with gaps": lambda side: side.write(1, 0, np.zeros(8)[::2]),
    "write no buffer": lambda side: side.write(1, 0, 7),
}


@pytest.mark.parametrize("case", WRONG)
def test_calls_out_of_turn_are_refused(ring: ModuleType, case: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError, BufferError)):
        WRONG[case](ring.Ring(memory_of(ring)))


def test_a_refused_commit_can_be_made_good(ring: ModuleType) -> None:
    side = ring.Ring(memory_of(ring))
    side.lend()[:2] = b"ok"
    with pytest.raises(ValueError, match="used_bytes"):
        side.commit(1, 0, PAYLOAD + 1)
    side.commit(1, 0, 2)
    assert bytes(side.peek()[2]) == b"ok"


# --- which one is used ----------------------------------------------------------------------------


def test_without_the_native_ring_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    assert kernels.ring() is ring_reference


def test_neither_ring_needs_torch() -> None:
    script = "import sys; from asr_serve import kernels; kernels.ring(); sys.exit('torch' in sys.modules)"
    for wanted in ("0", "1"):
        environ = {"ASR_SERVE_NATIVE": wanted, "PYTHONPATH": ":".join(sys.path)}
        assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


def test_the_torch_references_are_found_by_name() -> None:
    script = "from asr_serve import kernels; import sys; sys.exit(kernels.reference.PAGE != kernels.PAGE)"
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    with pytest.raises(AttributeError, match="cousins"):
        _ = kernels.cousins


def test_views_are_not_kept_after_they_are_taken(ring: ModuleType) -> None:
    memory = memory_of(ring)
    side, target = ring.Ring(memory), bytearray(100)
    held = sys.getrefcount(memory), sys.getrefcount(target)

    def turn(side: Any, times: int) -> None:
        for _ in range(times):
            side.lend()[:1] = b"x"
            side.commit(1, 0, 1)
            side.peek()
            side.release()
            side.write(1, 0, b"y" * 100)
            side.read_into(1, 0, target)

    def kept(side: Any) -> tuple[int, int]:
        gc.collect()
        before = len(gc.get_objects()), sys.getallocatedblocks()
        turn(side, 2_000)
        gc.collect()
        return len(gc.get_objects()) - before[0], sys.getallocatedblocks() - before[1]

    turn(side, 100)
    # servers of other tests, in threads of this process, make objects at times; what a turn keeps is kept every time
    objects, blocks = zip(*(kept(side) for _ in range(3)), strict=True)
    assert min(objects) < 20
    assert min(blocks) < 200
    assert (sys.getrefcount(memory), sys.getrefcount(target)) == held
    del side
    memory.close()
