"""io_uring back end: many pieces in flight at once, from one thread and without a copy, by the native module
`_disk`.

Memory and file are not registered with the ring: the number of segments of the memory matters
(`nameless_file.aligned_memory`), and pinning costs as much as it saves for memory that is used once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asr_serve import kernels
from asr_serve.errors import OptionError
from asr_serve.transfer.disk.base import DiskBackend
from asr_serve.transfer.disk.nameless_file import FileExtent, NamelessFile

DEPTH, PIECE_BYTES = 32, 2 << 20
"""Pieces in flight, 64 MiB in all: the disk stays busy while the caller processes the last extent."""
ALL, NONE_YET = -2, -1


class UringDiskBackend(DiskBackend):
    """Disk back end by io_uring. Raises OptionError where the module was not built, or the kernel or the container
    allows no io_uring."""

    name = "uring"

    def __init__(self, file: NamelessFile) -> None:
        self._idle: list[Any] = []
        super().__init__(file)
        module = kernels.disk()
        if module is None:
            raise OptionError(
                "disk_backend uring: the native module was not built",
                todo="install a C++ compiler and asr-serve again, or take disk_backend threads",
                param="disk_backend",
            )
        self._uring = module.Uring
        try:
            self._idle.append(self._uring(DEPTH, PIECE_BYTES))
        except OSError as error:
            raise OptionError(
                f"disk_backend uring: this kernel or container allows no io_uring ({error.strerror})",
                todo="allow io_uring_setup, io_uring_enter and io_uring_register, or take disk_backend threads",
                param="disk_backend",
            ) from error

    def _transfer_extents(self, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = self._uring(DEPTH, PIECE_BYTES)
        try:
            queue.begin(fd, write, extents)
            while (index := queue.wait()) != ALL:
                self._file.expect_open()
                if index != NONE_YET:
                    yield index
        finally:
            queue.finish()
            self._idle.append(queue)

    def _release(self) -> None:
        self._idle.clear()
