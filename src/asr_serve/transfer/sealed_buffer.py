"""Bytes handed from one process to another: memory without a name, sealed, its descriptor passed over a socket.

    parcel = Parcel.pack([head, body])                 whoever has one closes it
    parcel.send(ours)                                  the other process has a descriptor of its own then
    Parcel.receive(theirs, parcel.label).open()        [head, body]; the label went there by another road

Nobody copies it on the way: a process that only passes it on never looks inside. When the last that has it closes
it, or dies, it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

import msgspec

from asr_serve.errors import Torn
from asr_serve.transfer.checksum import checksum

SUPPORTED = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether this system has such memory; Linux has."""


class SealedBufferLabel(msgspec.Struct, frozen=True):
    """What must be known of a parcel to open it."""

    lengths: tuple[int, ...]
    """Bytes of its parts, which lie end to end."""
    checksum: int
    """Of all of them."""

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


class SealedBuffer:
    """Made by `pack` and `receive`."""

    def __init__(self, fd: int, label: SealedBufferLabel) -> None:
        """`fd` becomes ours."""
        self._fd, self.label = fd, label

    @classmethod
    def pack(cls, parts: Sequence[bytes | memoryview]) -> SealedBuffer:
        """A copy of them, which nobody can change any more. Where POSSIBLE. Raises OSError."""
        lengths = tuple(len(part) for part in parts)
        fd = os.memfd_create("asr-serve-parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            total, at = 0, 0
            os.ftruncate(fd, sum(lengths))
            if any(lengths):
                with mmap.mmap(fd, sum(lengths)) as memory:
                    for part in parts:
                        memory[at : at + len(part)] = part
                        at += len(part)
                    total = checksum(memory)
            # Sealed, it can't be cut short under whoever reads it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            undo.pop_all()
        return cls(fd, SealedBufferLabel(lengths, total))

    def read(self) -> list[bytes]:
        """Its parts. Raises Torn."""
        label, parts, at = self.label, list[bytes](), 0
        size = os.fstat(self._fd).st_size
        if size != label.nbytes:
            raise Torn(f"a parcel of {size} bytes", f"its label says {label.nbytes}")
        if not size:
            return [b""] * len(label.lengths)
        # Private: kernels before 6.7 take a shared one of sealed memory for one that may write.
        with mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as memory:
            if checksum(memory) != label.checksum:
                raise Torn(f"a parcel of {size} bytes whose checksum is another", "what was packed")
            for length in label.lengths:
                parts.append(memory[at : at + length])
                at += length
        return parts

    def send(self, line: socket.socket) -> None:
        """Over a Unix socket. Raises OSError."""
        socket.send_fds(line, [b"!"], [self._fd])

    @classmethod
    def receive(cls, line: socket.socket, label: SealedBufferLabel) -> SealedBuffer:
        """The one that was sent. Raises EOFError, OSError."""
        _, descriptors, _, _ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise EOFError("a parcel was announced and did not come")
        return cls(descriptors[0], label)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
