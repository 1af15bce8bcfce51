"""Bytes on their way: the event loop appends, any thread reads from the first byte and waits for the rest."""

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
"""When a caller may try again who met a full disk."""


class Spool:
    """The bytes of one upload: the first `memory_bytes` in memory, what follows in a file without a name.

    All methods but `read` belong to one thread, the event loop's.

    Raises  AtCapacity from `append` where the disk takes no more; OSError from `read` once failed or closed
    """

    def __init__(self, memory_bytes: int) -> None:
        self.size_bytes = 0
        self.ended = False
        self._memory_bytes = memory_bytes
        self._memory = bytearray()
        self._disk: BinaryIO | None = None
        self._failure = ""
        self._arrived = threading.Condition()
        # Held while the disk is read, so that `close` cannot give the descriptor to another file meanwhile.
        # Not `_arrived`: every append takes that one, and the event loop must not wait for a disk to answer.
        self._reading = threading.Lock()

    def append(self, piece: memoryview) -> None:
        # Written on the event loop: a copy into the page cache. Only when the kernel has no room left there
        # does the loop wait for the disk. A thread for every piece would cost more than the copy, and its pool
        # may be full of readers that wait for these very bytes.
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
        """No more bytes will come: the size is known."""
        with self._arrived:
            self.ended = True
            self._arrived.notify_all()

    def fail(self, why: str) -> None:
        """Every read from now on raises OSError, even of bytes that are here. The first reason stays."""
        with self._arrived:
            self._failure = self._failure or why
            self._arrived.notify_all()

    def close(self) -> None:
        """Fail every reader; give memory and disk back, whatever readers there still are. Idempotent."""
        self.fail("the upload is closed")
        with self._arrived:
            self._memory = bytearray()
        with self._reading:
            if self._disk is not None:
                self._disk.close()

    def read(self, at_bytes: int, buffer: memoryview) -> int:
        """Copy what is here from `at_bytes` on, waiting until something is; 0 at the end."""
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
            here = buffer[: self.size_bytes - at_bytes]
        with self._reading:
            assert self._disk is not None, "what is not in memory was written"
            if self._disk.closed:
                raise OSError(self._failure)
            return os.preadv(self._disk.fileno(), [here], at_bytes - self._memory_bytes)

    def _write(self, piece: memoryview) -> None:
        if self._disk is None:
            self._disk = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  `close` closes it
        while piece:
            piece = piece[self._disk.write(piece) :]


class SpoolReader(io.RawIOBase):
    """A spool as a binary stream. It can seek once all bytes are here, and not before."""

    seekable_when_read = True
    """For audio/byte_source: who has read it to its end may seek in it."""

    def __init__(self, spool: Spool) -> None:
        self._spool, self._at = spool, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._spool.read(self._at, memoryview(buffer).cast("B"))
        self._at += count
        return count

    def seekable(self) -> bool:
        return self._spool.ended

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if not self._spool.ended:
            raise io.UnsupportedOperation("an upload that is still arriving cannot be seeked in")
        self._at = max(0, offset + (0, self._at, self._spool.size_bytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at
