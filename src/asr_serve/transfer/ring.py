"""PCM ring from one process to another in shared memory, with a socket pair that wakes a sleeping side.

    fd, _ = create()                             the parent process; the child gets fd by pass_fds or send_fds
    ends = socket.socketpair()                   one end for each process, and for no other
    PcmWriter(fd, ends[0]).write_message(7, pcm)   waits while the ring is full
    PcmReader(fd, ends[1]).read_message(7, 512)    waits until the message is there

Each message is read by one call, in the order of writing: a control message on another connection announces it.
Audio is copied once on each side and never by the kernel; the socket is used only to wake a side that sleeps. When
a process dies, its end of the socket pair is closed, and the other side gets PeerGone: so a process must not keep
a copy of the other's end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import tempfile
import threading

import numpy as np
import numpy.typing as npt

from asr_serve import kernels
from asr_serve.errors import OutOfStep, PeerGone

SLOTS, PAYLOAD_BYTES = 1_024, 16_384
"""Slots of a ring, and bytes of each; 16 MiB: more than four minutes of float32 at 16 kHz."""


def create(slots: int = SLOTS, payload_bytes: int = PAYLOAD_BYTES) -> tuple[int, int]:
    """Creates an empty ring in new memory, as (file descriptor, bytes). The caller closes the descriptor. `slots` a
    power of two; `payload_bytes` of each a multiple of 64. Raises ValueError, OSError."""
    ring = kernels.ring()
    nbytes: int = ring.layout(slots, payload_bytes)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("asr-serve-pcm")
    else:
        with tempfile.TemporaryFile(buffering=0) as unlinked:
            fd = os.dup(unlinked.fileno())
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            ring.format(memory, slots, payload_bytes)
        undo.pop_all()
    return fd, nbytes


class _Bell:
    """One end of the socket pair. `gone` once the other end is closed, or this one hung up."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self.gone = False

    def ring(self) -> None:
        try:
            self._end.send(b"!", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # a full socket has wake-ups pending
        except OSError:
            self.gone = True

    def wait(self) -> None:
        """Waits until the other side rings, or is gone."""
        try:
            if not self._end.recv(4_096):
                self.gone = True
        except OSError:
            self.gone = True

    def look(self) -> None:
        """Updates `gone` without waiting."""
        if not self.gone and self._poll.poll(0):
            self.wait()

    def hang_up(self) -> None:
        """Signals that no more will come, and wakes all that wait on either end."""
        self.gone = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class _Message:
    """Lock for one message at a time. An incomplete message makes the stream unusable: an exception hangs up."""

    def __init__(self, bell: _Bell) -> None:
        self._bell, self._lock = bell, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._bell.hang_up()
        self._lock.release()


class _Side:
    """Common base of writer and reader. The caller keeps `fd`, and may close it; `bell` is owned by this object."""

    def __init__(self, fd: int, bell: socket.socket) -> None:
        """Maps the ring. Raises ValueError when there is no ring behind `fd`."""
        # All pages now: page faults in the first lap cost more than the copy.
        memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._ring = kernels.ring().Ring(memory)
        self._bell = _Bell(bell)
        self._message = _Message(self._bell)

    @property
    def slots(self) -> int:
        return int(self._ring.slots)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the ring holds when it is full."""
        return int(self._ring.slots * self._ring.payload_bytes)

    @property
    def depth(self) -> int:
        """Slots filled and not yet read, of `slots`."""
        return int(self._ring.depth)

    def close(self) -> None:
        """Hangs up. Waiting calls on either side raise PeerGone. Idempotent."""
        self._bell.hang_up()
        with self._message:
            self._bell.close()

    @staticmethod
    def _peer_gone(done: int, of: int) -> PeerGone:
        return PeerGone(
            f"the other end of the ring is gone after {done} of {of} bytes", todo="start that process again"
        )


class PcmWriter(_Side):
    """Producing side. Any thread may call `write_message`."""

    def __init__(self, fd: int, bell: socket.socket) -> None:
        super().__init__(fd, bell)
        self.full_waits = 0
        """Number of waits for room in `write_message`."""

    def write_message(self, session: int, pcm: np.ndarray) -> None:
        """Writes an array of any dtype and length; it must be C-contiguous.

        Waits while the ring is full. Raises PeerGone, also while waiting, when the reader dies.
        """
        if not pcm.nbytes:
            return
        data, offset = pcm.data.cast("B"), 0
        with self._message:
            self._bell.look()
            must_wake = False
            while offset < len(data):
                if self._bell.gone:
                    raise self._peer_gone(offset, len(data))
                # Every chunk but the last is full, so the position determines its number.
                written, rings = self._ring.write(session, offset // self._ring.payload_bytes, data[offset:])
                offset += written
                must_wake = must_wake or rings
                if offset < len(data) and not rings and self._ring.producer_sleeps():
                    if must_wake:  # it is full; else once, for the whole message and not for every slot
                        self._bell.ring()
                        must_wake = False
                    self.full_waits += 1
                    self._bell.wait()
            if must_wake:
                self._bell.ring()


class PcmReader(_Side):
    """Consuming side, used by one thread, in the order of writing."""

    def read_message(self, session: int, samples: int, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Reads the next message, which must belong to `session` and have `samples` samples, into a new array.

        Waits until it is complete. Raises PeerGone when the writer is gone before that; OutOfStep, and hangs up,
        for any other message.
        """
        pcm = np.empty(samples, dtype)
        if not pcm.nbytes:
            return pcm
        data, offset = pcm.data.cast("B"), 0
        with self._message:
            while offset < len(data):
                chunk = -(-offset // self._ring.payload_bytes)
                read, rings = self._ring.read_into(session, chunk, data[offset:])
                offset += read
                if rings:
                    self._bell.ring()
                elif offset < len(data) and not read:
                    self._expect(session, chunk, len(data) - offset)
                    self._wait(offset, len(data))
        return pcm

    def _expect(self, session: int, chunk: int, left: int) -> None:
        """Raises OutOfStep unless the ring is empty or `read_into` would accept the next slot."""
        slot = self._ring.peek()
        if slot is not None and (slot[:2] != (session, chunk) or len(slot[2]) > left):
            raise OutOfStep(
                f"the ring holds {len(slot[2])} bytes, chunk {slot[1]} of session {slot[0]}",
                f"chunk {chunk} of session {session} was announced, at most {left} bytes",
                "put and take in one order, and equally much",
            )

    def _wait(self, done: int, of: int) -> None:
        """Waits for a slot. Slots that the writer filled before it died are still read. Raises PeerGone."""
        if self._ring.consumer_sleeps():
            if self._bell.gone:
                raise self._peer_gone(done, of)
            self._bell.wait()
