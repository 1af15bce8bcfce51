"""PCM from one process to another: a ring in shared memory, and a bell for whoever sleeps.

    fd, _ = create()                     who starts the other process; the fd goes there by pass_fds or send_fds
    ends = socket.socketpair()           one end of the bell for each process, and for nobody else
    PcmWriter(fd, ends[0]).put(7, pcm)   waits while the ring is full
    PcmReader(fd, ends[1]).take(7, 512)  waits until it has come

One `put` is one `take`, in the same order: a message on another road says which. Audio is copied once on each side
and never by the kernel; the bell is rung only for a side that sleeps. When a process dies, its end of the bell is
closed, and the other one wakes up with PeerGone: so a process must not keep a copy of the other's end.
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
"""16 MiB: more than four minutes of float32 at 16 kHz."""


def create(slots: int = SLOTS, payload_bytes: int = PAYLOAD_BYTES) -> tuple[int, int]:
    """An empty ring in memory of its own, as (file descriptor, bytes). The descriptor is the caller's to close.

    `slots` a power of two; `payload_bytes` of each a multiple of 64. Raises ValueError, OSError.
    """
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
            pass  # a bell that is full of rings has been rung
        except OSError:
            self.gone = True

    def wait(self) -> None:
        """Until it is rung, or the other end is gone."""
        try:
            if not self._end.recv(4_096):
                self.gone = True
        except OSError:
            self.gone = True

    def look(self) -> None:
        """Whether the other end is gone, without waiting."""
        if not self.gone and self._poll.poll(0):
            self.wait()

    def hang_up(self) -> None:
        """Tell the other side that nothing more will come, and wake whoever waits on this one."""
        self.gone = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class _Message:
    """One message at a time. Half of one is of no use, and nothing can follow it: what breaks off hangs up."""

    def __init__(self, bell: _Bell) -> None:
        self._bell, self._lock = bell, threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._bell.hang_up()
        self._lock.release()


class _Side:
    """What writer and reader share. `fd` stays the caller's, and may be closed; `bell` becomes ours."""

    def __init__(self, fd: int, bell: socket.socket) -> None:
        """Raises ValueError when there is no ring behind `fd`."""
        # All pages now: a fault in the first lap costs more than the copy.
        memory = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._ring = kernels.ring().Ring(memory)
        self._bell = _Bell(bell)
        self._message = _Message(self._bell)

    @property
    def slots(self) -> int:
        return int(self._ring.slots)

    @property
    def capacity_bytes(self) -> int:
        """What the ring holds when it is full."""
        return int(self._ring.slots * self._ring.payload_bytes)

    @property
    def depth(self) -> int:
        """Slots filled and not yet read, of `slots`."""
        return int(self._ring.depth)

    def close(self) -> None:
        """Hang up. Who waits in `put` or `take`, here or over there, gets PeerGone. May be called again."""
        self._bell.hang_up()
        with self._message:
            self._bell.close()

    @staticmethod
    def _peer_gone(done: int, of: int) -> PeerGone:
        return PeerGone(
            f"the other end of the ring is gone after {done} of {of} bytes", todo="start that process again"
        )


class PcmWriter(_Side):
    """The producing side. `put` may be called from any thread."""

    def __init__(self, fd: int, bell: socket.socket) -> None:
        super().__init__(fd, bell)
        self.full_waits = 0
        """How often `put` had to wait for room."""

    def write_message(self, session: int, pcm: np.ndarray) -> None:
        """Send an array, of any dtype and as long as you like; it must be C-contiguous.

        Waits while the ring is full. Raises PeerGone, at once when the reader dies while this waits.
        """
        if not pcm.nbytes:
            return
        data, at = pcm.data.cast("B"), 0
        with self._message:
            self._bell.look()
            wanted = False
            while at < len(data):
                if self._bell.gone:
                    raise self._peer_gone(at, len(data))
                # Every chunk but the last is full, so the position tells its number.
                written, rings = self._ring.write(session, at // self._ring.payload_bytes, data[at:])
                at += written
                wanted = wanted or rings
                if at < len(data) and not rings and self._ring.producer_sleeps():
                    if wanted:  # it is full; else once, for the whole message and not for every slot
                        self._bell.ring()
                        wanted = False
                    self.full_waits += 1
                    self._bell.wait()
            if wanted:
                self._bell.ring()


class PcmReader(_Side):
    """The consuming side. One thread takes, in the order in which the other side put."""

    def read_message(self, session: int, samples: int, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """The next message, which must be that of `session` and of just `samples`: an array of the caller's own.

        Waits until it is there. Raises PeerGone when the writer is gone before that; OutOfStep, and hangs up,
        when something else comes.
        """
        pcm = np.empty(samples, dtype)
        if not pcm.nbytes:
            return pcm
        data, at = pcm.data.cast("B"), 0
        with self._message:
            while at < len(data):
                chunk = -(-at // self._ring.payload_bytes)
                read, rings = self._ring.read_into(session, chunk, data[at:])
                at += read
                if rings:
                    self._bell.ring()
                elif at < len(data) and not read:
                    self._expect(session, chunk, len(data) - at)
                    self._wait(at, len(data))
        return pcm

    def _expect(self, session: int, chunk: int, left: int) -> None:
        """Nothing in the ring, or a slot that `read_into` would take."""
        slot = self._ring.peek()
        if slot is not None and (slot[:2] != (session, chunk) or len(slot[2]) > left):
            raise OutOfStep(
                f"the ring holds {len(slot[2])} bytes, chunk {slot[1]} of session {slot[0]}",
                f"chunk {chunk} of session {session} was announced, at most {left} bytes",
                "put and take in one order, and equally much",
            )

    def _wait(self, done: int, of: int) -> None:
        """For a slot. What the writer left in the ring before it died is still read."""
        if self._ring.consumer_sleeps():
            if self._bell.gone:
                raise self._peer_gone(done, of)
            self._bell.wait()
