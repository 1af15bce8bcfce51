"""Buffer of arriving bytes: the event loop appends, any thread reads from the start and waits for the rest."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from typing import TYPE_CHECKING, BinaryIO, cast

from asr_serve.errors import AtCapacity

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

RETRY_MS = 10_000
"""Retry time where the disk is full."""


class Spool:
    """Bytes of one upload: the first `memory_bytes` in memory, the rest in an unnamed file.

    All methods but `read` belong to one thread, the event loop's.

    Raises  AtCapacity from `append` if the disk is full; OSError from `read` once failed or closed
    """

    def __init__(self, memory_bytes: int) -> None:
        self.size_bytes = 0
        self.ended = False
        self._memory_bytes = memory_bytes
        self._memory = bytearray()
        self._disk: BinaryIO | None = None
        self._failure = ""
        self._arrived = threading.Condition()
        # Held while the disk is read, so that `close` cannot free the descriptor for another file meanwhile.
        # Not `_arrived`: every append takes that one, and the event loop must not wait for a disk.
        self._reading = threading.Lock()

    def append(self, piece: memoryview) -> None:
        # Written on the event loop: a copy into the page cache. The loop waits for the disk only when that is
        # full. A thread for every piece would cost more than the copy, and its pool may be full of readers
        # that wait for these bytes.
        on_disk = piece[max(0, self._memory_bytes - self.size_bytes) :]
        if on_disk:
            try:
                self._write(on_disk)
            except OSError as error:
                raise AtCapacity(
                    f"the server cannot keep the upload: {error.strerror}", "its disk needs room", RETRY_MS
                ) from error
        with self._arrived:
            self._memory += piece[: len(piece) - len(on_disk)]
            self.size_bytes += len(piece)
            self._arrived.notify_all()

    def end(self) -> None:
        """Marks the end of the bytes: the size is known."""
        with self._arrived:
            self.ended = True
            self._arrived.notify_all()

    def fail(self, reason: str) -> None:
        """Makes every later read raise OSError, even of bytes that have arrived. The first reason is kept."""
        with self._arrived:
            self._failure = self._failure or reason
            self._arrived.notify_all()

    def close(self) -> None:
        """Fails every reader and frees memory and disk. Idempotent."""
        self.fail("the upload is closed")
        with self._arrived:
            self._memory = bytearray()
        with self._reading:
            if self._disk is not None:
                self._disk.close()

    def read(self, at_bytes: int, buffer: memoryview) -> int:
        """Copies bytes from `at_bytes` on, waiting until some are here; returns their number, 0 at the end."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._failure or self.ended or self.size_bytes > at_bytes)
            if self._failure:
                raise OSError(self._failure)
            if at_bytes < len(self._memory):
                piece = self._memory[at_bytes : at_bytes + len(buffer)]
                buffer[: len(piece)] = piece
                return len(piece)
            if at_bytes >= self.size_bytes:
                return 0
            available = buffer[: self.size_bytes - at_bytes]
        with self._reading:
            assert self._disk is not None, "what is not in memory was written"
            if self._disk.closed:
                raise OSError(self._failure)
            return os.preadv(self._disk.fileno(), [available], at_bytes - self._memory_bytes)

    def _write(self, piece: memoryview) -> None:
        if self._disk is None:
            self._disk = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  `close` closes it
        while piece:
            piece = piece[self._disk.write(piece) :]


class SpoolReader(io.RawIOBase):
    """Binary stream of a spool. It can seek only once all bytes have arrived."""

    seekable_when_read = True
    """Tells audio/byte_source that it can seek once read to its end."""

    def __init__(self, spool: Spool, prefix: bytes = b"") -> None:
        """`prefix`: bytes before those of the spool."""
        self._spool, self._prefix, self._at = spool, prefix, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if self._at < len(self._prefix):
            piece = self._prefix[self._at : self._at + len(view)]
            view[: len(piece)] = piece
            count = len(piece)
        else:
            count = self._spool.read(self._at - len(self._prefix), view)
        self._at += count
        return count

    def seekable(self) -> bool:
        return self._spool.ended

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if not self._spool.ended:
            raise io.UnsupportedOperation("an upload that is still arriving cannot be seeked in")
        self._at = max(0, offset + (0, self._at, len(self._prefix) + self._spool.size_bytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at
