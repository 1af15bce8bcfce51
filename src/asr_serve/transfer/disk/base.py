"""Interface of disk back ends: extents in, the index of each as it completes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from asr_serve.errors import DiskFailed, OptionError, TransportTimeout
from asr_serve.transfer.disk.nameless_file import BLOCK, FileExtent, NamelessFile, aligned_memory, disk_failure


class IoPiece(NamedTuple):
    """Part of an extent, small enough that many are in flight at once."""

    extent: int
    offset: int
    memory: memoryview


class DiskBackend(ABC):
    """Back end that reads and writes a file. Any number of transfers at a time, each in one thread at a time.

    A transfer is an iterator of the indices of `extents`, each as it completes. It begins with the first `next`;
    between two calls nothing new is submitted to the disk. Close it, or exhaust it: until then the disk may access
    the memory. It raises DiskFailed, where room ran out DiskFull; then nothing is in flight any more (but see
    `still_under_way`), and extents that were not reported are undefined.
    """

    name: ClassVar[str]

    def __init__(self, file: NamelessFile) -> None:
        self._file = file
        self.nbytes = file.nbytes
        file.on_gone = self._release

    @property
    def direct(self) -> bool:
        """Returns whether the file bypasses the page cache; False where the file system does not support that."""
        return self._file.direct

    def write(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]:
        """Writes extents. Raises ValueError at once for any that are not whole blocks."""
        return self._transfer(self._file.validate_extents(extents, write=True), write=True)

    def read(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]:
        """Reads extents. Blocks that were never written are zeros. Raises ValueError at once for any that are not
        whole blocks."""
        return self._transfer(self._file.validate_extents(extents, write=False), write=False)

    def close(self) -> None:
        """Closes the file; from any thread. Transfers in flight fail with DiskFailed; the last of them releases
        it. Idempotent."""
        self._file.close()

    def probe(self) -> None:
        """Reads a block. Raises OptionError where this back end does not work on this file."""
        try:
            for _ in self.read([(0, aligned_memory(BLOCK))]):
                pass
        except DiskFailed as error:
            raise OptionError(f"disk_backend {self.name} does not work here: {error}", param="disk_backend") from error

    @abstractmethod
    def _transfer_extents(self, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        """Transfers extents. Raises OSError and DiskFailed; nothing is in flight when it has ended, however it ends."""

    @abstractmethod
    def _release(self) -> None:
        """Releases resources once the file is closed and no transfer remains."""

    def _transfer(self, extents: list[FileExtent], write: bool) -> Iterator[int]:
        with self._file.open_fd() as fd:
            try:
                for index in self._transfer_extents(fd, extents, write):
                    self._file.expect_open()
                    yield index
            except OSError as error:
                raise disk_failure(error, write) from error
            finally:
                if not self.direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def still_under_way(failure: DiskFailed) -> bool:
    """Returns whether the disk may access the memory of a failed transfer as long as this process lives: it neither
    completed nor could be cancelled. That memory must not be used for anything else, and the back end accepts no
    more transfers."""
    return isinstance(failure.__cause__, TransportTimeout)


def split_extents(extents: list[FileExtent], nbytes: int) -> Iterator[IoPiece]:
    """Yields all extents, in order, cut into pieces of at most `nbytes`."""
    for index, (offset, memory) in enumerate(extents):
        for start in range(0, memory.nbytes, nbytes):
            yield IoPiece(index, offset + start, memory[start : start + nbytes])
