"""What every road to the disk has: extents in, the number of each as it is done."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from asr_serve.errors import DiskFailed, OptionError, RoadTimeout
from asr_serve.transfer.disk.nameless_file import BLOCK, FileExtent, NamelessFile, aligned_memory, disk_failure


class IoPiece(NamedTuple):
    """A part of an extent, small enough that many are under way at once."""

    extent: int
    offset: int
    memory: memoryview


class DiskBackend(ABC):
    """One way to read and write a file. Any number of transfers at a time, each in one thread at a time.

    A transfer is an iterator of the indices of `extents`, each as it is done. It begins when it is first asked;
    between two questions nothing more is handed to the disk than was under way. Close it, or ask it to the end:
    until then the disk may touch the memory. It raises DiskFailed, where room ran out DiskFull; then, nothing is
    under way any more (but see `still_under_way`) and what was not told is undefined.
    """

    name: ClassVar[str]

    def __init__(self, file: NamelessFile) -> None:
        self._file = file
        self.nbytes = file.nbytes
        file.on_gone = self._release

    @property
    def direct(self) -> bool:
        """False: the file system offers no way past the page cache."""
        return self._file.direct

    def write(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]:
        """Raises ValueError at once for what is not whole blocks."""
        return self._transfer(self._file.validate_extents(extents, write=True), write=True)

    def read(self, extents: Sequence[tuple[int, memoryview]]) -> Iterator[int]:
        """Raises ValueError at once for what is not whole blocks. What was never written is zeros."""
        return self._transfer(self._file.validate_extents(extents, write=False), write=False)

    def close(self) -> None:
        """Idempotent; from any thread. Transfers under way fail with DiskFailed; the last of them takes the file
        away."""
        self._file.close()

    def probe(self) -> None:
        """Read a block. Raises OptionError where this road does not work on this file."""
        try:
            for _ in self.read([(0, aligned_memory(BLOCK))]):
                pass
        except DiskFailed as error:
            raise OptionError(f"disk_road {self.name} does not work here: {error}", param="disk_road") from error

    @abstractmethod
    def _transfer_extents(self, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        """Raises OSError and DiskFailed; nothing is under way when it has ended, however it ends."""

    @abstractmethod
    def _release(self) -> None:
        """The file is closed, and no transfer is left."""

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
    """Whether the disk may touch the memory of what failed so for as long as this process lives: it neither came
    nor could be called off. Nobody may use that memory for anything else, and the disk carries no more."""
    return isinstance(failure.__cause__, RoadTimeout)


def split_extents(extents: list[FileExtent], nbytes: int) -> Iterator[IoPiece]:
    """All of them, in order, cut to `nbytes` at most."""
    for index, (offset, memory) in enumerate(extents):
        for at in range(0, memory.nbytes, nbytes):
            yield IoPiece(index, offset + at, memory[at : at + nbytes])
