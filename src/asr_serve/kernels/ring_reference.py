"""Shared-memory ring in plain Python: the oracle of the native ring's tests, and its fallback.

It has the same functions, and the same layout in memory, drawn in `ring.hpp`, so one side may be native and the other
this.

Memory ordering, which C++ requests explicitly, is that of the processor here. A slot is handed over by one aligned
store of eight bytes, which a memoryview of "Q" does in one piece. x86 keeps stores in order and loads in order (TSO),
so a reader of the sequence also sees the payload. But TSO lets a load overtake an earlier store, which would lose a
wake-up; taking a lock in between is a locked instruction, which nothing passes. Between threads of one process the GIL
orders everything. On a CPU with a weaker order (ARM), this ring may read a slot of another process before its payload
has arrived: there the native ring must be built.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

MAGIC, VERSION = 0x474E_4952_4D43_5041, 1
LINE = 64
MAX_SLOTS, MAX_PAYLOAD_BYTES = 1 << 20, 1 << 28

# Words of eight bytes from the beginning of the ring; each group is on a cache line of its own.
_MAGIC, _VERSION, _SLOTS, _PAYLOAD_BYTES = 0, 1, 2, 3
_TAIL, _FULL_COUNT = 8, 9
_HEAD = 16
_PRODUCER_SLEEPS, _CONSUMER_SLEEPS = 24, 32
_SHARED_BYTES = 5 * LINE
# Words from the beginning of a slot; of the last one, the first half is used_bytes and the second is flags.
_SEQUENCE, _SESSION, _CHUNK, _USED_BYTES = 0, 1, 2, 3


def layout(slots: int, payload_bytes: int) -> int:
    """Returns the bytes of memory that a ring needs. Raises ValueError for invalid sizes."""
    if not 2 <= slots <= MAX_SLOTS or slots & (slots - 1):
        raise ValueError("slots must be a power of two, 2 to 1048576")
    if not LINE <= payload_bytes <= MAX_PAYLOAD_BYTES or payload_bytes % LINE:
        raise ValueError("payload_bytes must be a multiple of 64, 64 to 268435456")
    return _SHARED_BYTES + slots * (LINE + payload_bytes)


def format(buffer: WriteableBuffer, slots: int, payload_bytes: int) -> None:
    """Writes an empty ring to a buffer that no process is attached to."""
    memory, total = _writable(buffer), layout(slots, payload_bytes)
    if total > len(memory):
        raise ValueError("the buffer is smaller than the ring")
    words = memory[:total].cast("Q")
    stride = (LINE + payload_bytes) // 8
    for word in range(_SHARED_BYTES // 8):
        words[word] = 0
    for i in range(slots):
        at = _SHARED_BYTES // 8 + i * stride
        for word in range(LINE // 8):
            words[at + word] = 0
        words[at + _SEQUENCE] = i
    words[_VERSION], words[_SLOTS], words[_PAYLOAD_BYTES] = VERSION, slots, payload_bytes
    words[_MAGIC] = MAGIC


class Ring:
    """One side of a ring, or an observer. For one thread at a time.

    Raises ValueError for a buffer that holds no ring, and for too many `used_bytes`; RuntimeError for a call out
    of turn.
    """

    def __init__(self, buffer: WriteableBuffer) -> None:
        memory = _writable(buffer)
        if len(memory) < _SHARED_BYTES or memory[:LINE].cast("Q")[_MAGIC] != MAGIC:
            raise ValueError("no ring in this buffer: format it first")
        header = memory[:LINE].cast("Q")
        if header[_VERSION] != VERSION:
            raise ValueError("a ring of another version: both processes must run the same release")
        self.slots, self.payload_bytes = header[_SLOTS], header[_PAYLOAD_BYTES]
        total = layout(self.slots, self.payload_bytes)
        if total > len(memory):
            raise ValueError("the buffer is smaller than its ring")
        self._memory = memory
        self._readonly = memory.toreadonly()
        self._words = memory[:total].cast("Q")
        self._halves = memory[:total].cast("I")
        self._fence = threading.Lock()
        self._lent = self._peeked = False

    @property
    def depth(self) -> int:
        """Slots filled and not released yet; valid in any process."""
        tail = self._words[_TAIL]
        return min(max(tail - self._words[_HEAD], 0), self.slots)  # the two were not read at once

    @property
    def full_count(self) -> int:
        """Number of times the producer found no room."""
        return self._words[_FULL_COUNT]

    # --- the producer ---------------------------------------------------------------------------------

    def lend(self) -> memoryview | None:
        """Returns the payload of the next slot, to fill in place; None when the ring is full. The same one until
        `commit`."""
        slot = self._next_free()
        if slot is None:
            self._words[_FULL_COUNT] += 1
            return None
        self._lent = True
        return self._memory[self._payload(slot) : self._payload(slot) + self.payload_bytes]

    def commit(self, session: int, chunk: int, used_bytes: int) -> bool:
        """Publishes the lent slot. Returns whether the consumer sleeps and must be woken: True once for every sleep."""
        if not self._lent:
            raise RuntimeError("commit without lend")
        if not 0 <= used_bytes <= self.payload_bytes:
            raise ValueError("used_bytes is more than payload_bytes")
        words, at = self._words, self._words[_TAIL]
        slot = self._slot(at)
        words[slot + _SESSION], words[slot + _CHUNK] = session, chunk
        self._halves[2 * (slot + _USED_BYTES)], self._halves[2 * (slot + _USED_BYTES) + 1] = used_bytes, 0
        words[slot + _SEQUENCE] = at + 1
        words[_TAIL] = at + 1
        self._lent = False
        return self._wakes(_CONSUMER_SLEEPS)

    def write(self, session: int, first_chunk: int, source: ReadableBuffer) -> tuple[int, bool]:
        """Copies into slot after slot until all is written, the ring is full, or the consumer must be woken.

        Returns the bytes written, and whether to wake the consumer before the rest is written.
        """
        if self._lent:
            raise RuntimeError("write while a slot is lent")
        data, written, wake = _bytes(source), 0, False
        while written < len(data) and not wake:
            payload = self.lend()
            if payload is None:
                break
            used = min(len(data) - written, self.payload_bytes)
            payload[:used] = data[written : written + used]
            wake = self.commit(session, first_chunk, used)
            first_chunk += 1
            written += used
        return written, wake

    def producer_sleeps(self) -> bool:
        """Announces that the producer will wait for room. Returns False where there is some."""
        self._words[_PRODUCER_SLEEPS] = 1
        with self._fence:
            pass
        if self._next_free() is None:
            return True
        self._words[_PRODUCER_SLEEPS] = 0
        return False

    # --- the consumer ---------------------------------------------------------------------------------

    def peek(self) -> tuple[int, int, memoryview] | None:
        """Returns (session, chunk, payload) of the oldest slot, to read in place until `release`; None when empty."""
        slot = self._next_ready()
        if slot is None:
            return None
        used = self._halves[2 * (slot + _USED_BYTES)]
        if used > self.payload_bytes:
            raise RuntimeError("the ring is corrupt: a slot holds too much")
        self._peeked = True
        start = self._payload(slot)
        return self._words[slot + _SESSION], self._words[slot + _CHUNK], self._readonly[start : start + used]

    def release(self) -> bool:
        """Releases the slot. Returns whether the producer sleeps and must be woken: True once for every sleep."""
        if not self._peeked:
            raise RuntimeError("release without peek")
        at = self._words[_HEAD]
        self._words[self._slot(at) + _SEQUENCE] = at + self.slots
        self._words[_HEAD] = at + 1
        self._peeked = False
        return self._wakes(_PRODUCER_SLEEPS)

    def read_into(self, session: int, first_chunk: int, target: WriteableBuffer) -> tuple[int, bool]:
        """Copies out whole slots of this session, chunk after chunk, as long as they are available and fit.

        Stops early when the producer must be woken. A slot peeked at before is no longer valid. Returns the bytes
        read, and whether to wake the producer.
        """
        data, read, wake = _bytes(target), 0, False
        if data.readonly:
            raise BufferError("the target is not writable")
        while read < len(data) and not wake:
            slot = self.peek()
            if slot is None or slot[:2] != (session, first_chunk) or len(slot[2]) > len(data) - read:
                break
            used = len(slot[2])
            data[read : read + used] = slot[2]
            read += used
            first_chunk += 1
            wake = self.release()
        return read, wake

    def consumer_sleeps(self) -> bool:
        """Announces that the consumer will wait for a slot. Returns False where there is one."""
        self._words[_CONSUMER_SLEEPS] = 1
        with self._fence:
            pass
        if self._next_ready() is None:
            return True
        self._words[_CONSUMER_SLEEPS] = 0
        return False

    # --- both -----------------------------------------------------------------------------------------

    def _slot(self, position: int) -> int:
        """First word of the slot at a position."""
        return (_SHARED_BYTES + (position & (self.slots - 1)) * (LINE + self.payload_bytes)) // 8

    @staticmethod
    def _payload(slot: int) -> int:
        return slot * 8 + LINE

    def _next_free(self) -> int | None:
        while True:
            at = self._words[_TAIL]
            slot = self._slot(at)
            sequence = self._words[slot + _SEQUENCE]
            if sequence == at:
                return slot
            if sequence not in (at + 1, at + self.slots):
                return None
            self._words[_TAIL] = at + 1  # a producer killed in `commit` left it one behind

    def _next_ready(self) -> int | None:
        while True:
            at = self._words[_HEAD]
            slot = self._slot(at)
            sequence = self._words[slot + _SEQUENCE]
            if sequence == at + 1:
                return slot
            if sequence not in (at + self.slots, at + self.slots + 1):
                return None
            self._words[_HEAD] = at + 1  # a consumer killed in `release` left it one behind

    def _wakes(self, flag: int) -> bool:
        with self._fence:
            pass
        asleep = self._words[flag] != 0
        if asleep:
            self._words[flag] = 0
        return asleep


def _bytes(buffer: ReadableBuffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _writable(buffer: WriteableBuffer) -> memoryview:
    memory = _bytes(buffer)
    if memory.readonly:
        raise BufferError("the buffer is not writable")
    if len(memory) and ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LINE:
        raise ValueError("the buffer must begin at a multiple of 64 bytes, as an mmap does")
    return memory
