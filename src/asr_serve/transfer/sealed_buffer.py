"""Sealed buffers, passed from one process to another: memory without a name, whose descriptor goes over a socket.

    buffer = SealedBuffer.pack([head, body])            the owner closes it
    buffer.send(ours)                                   the other process then has a descriptor of its own
    SealedBuffer.receive(theirs, buffer.label).read()   [head, body]; the label was sent separately

The bytes are not copied on the way: a process that forwards a buffer never reads it. It is freed when its last
owner closes it, or dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

import msgspec

from asr_serve.errors import ChecksumMismatch
from asr_serve.transfer.checksum import checksum

SUPPORTED = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether this system has sealed memory; Linux does."""


class SealedBufferLabel(msgspec.Struct, frozen=True):
    """Description of a buffer, required to read it."""

    lengths: tuple[int, ...]
    """Bytes of its parts, which lie end to end."""
    checksum: int
    """Checksum of all parts together."""

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


class SealedBuffer:
    """Sealed buffer, made by `pack` or `receive`."""

    def __init__(self, fd: int, label: SealedBufferLabel) -> None:
        """Takes ownership of `fd`."""
        self._fd, self.label = fd, label

    @classmethod
    def pack(cls, parts: Sequence[bytes | memoryview]) -> SealedBuffer:
        """Copies parts into an immutable buffer. Requires SUPPORTED. Raises OSError."""
        lengths = tuple(len(part) for part in parts)
        fd = os.memfd_create("asr-serve-parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            total, offset = 0, 0
            os.ftruncate(fd, sum(lengths))
            if any(lengths):
                with mmap.mmap(fd, sum(lengths)) as memory:
                    for part in parts:
                        memory[offset : offset + len(part)] = part
                        offset += len(part)
                    total = checksum(memory)
            # A sealed buffer cannot be truncated while it is read.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            undo.pop_all()
        return cls(fd, SealedBufferLabel(lengths, total))

    @classmethod
    def copy(cls, data: bytes, label: SealedBufferLabel) -> SealedBuffer:
        """Copies the bytes of another machine's buffer into one of this machine. Requires SUPPORTED. Raises OSError."""
        view, parts, offset = memoryview(data), list[memoryview](), 0
        for length in label.lengths:
            parts.append(view[offset : offset + length])
            offset += length
        copied = cls.pack(parts)
        copied.label = label  # its checksum is of what was sent
        return copied

    def read(self) -> list[bytes]:
        """Returns the parts. Raises ChecksumMismatch."""
        label, parts, offset = self.label, list[bytes](), 0
        size = os.fstat(self._fd).st_size
        if size != label.nbytes:
            raise ChecksumMismatch(f"a parcel of {size} bytes", f"its label says {label.nbytes}")
        if not size:
            return [b""] * len(label.lengths)
        # Private: kernels before 6.7 treat a shared mapping of sealed memory as writable.
        with mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as memory:
            if checksum(memory) != label.checksum:
                raise ChecksumMismatch(f"a parcel of {size} bytes whose checksum is another", "what was packed")
            for length in label.lengths:
                parts.append(memory[offset : offset + length])
                offset += length
        return parts

    def send(self, line: socket.socket) -> None:
        """Sends the buffer over a Unix socket. Raises OSError."""
        socket.send_fds(line, [b"!"], [self._fd])

    @classmethod
    def receive(cls, line: socket.socket, label: SealedBufferLabel) -> SealedBuffer:
        """Receives a buffer. Raises EOFError, OSError."""
        _, descriptors, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise EOFError("a parcel was announced and did not come")
        return cls(descriptors[0], label)

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
