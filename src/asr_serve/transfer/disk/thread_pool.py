"""A few threads with preadv and pwritev: where nothing was compiled; the other roads are checked against it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from asr_serve.transfer.disk.base import DiskBackend, IoPiece, split_extents
from asr_serve.transfer.disk.nameless_file import BLOCK, FileExtent, NamelessFile

THREADS, UNDER_WAY, PIECE_BYTES = 8, 16, 4 << 20


class ThreadPoolDiskBackend(DiskBackend):
    name = "threads"

    def __init__(self, file: NamelessFile) -> None:
        super().__init__(file)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")

    def _transfer_extents(self, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        yield from (index for index, (_, memory) in enumerate(extents) if not memory.nbytes)
        left = [memory.nbytes for _, memory in extents]
        coming = split_extents(extents, PIECE_BYTES)
        done: SimpleQueue[tuple[IoPiece, OSError | None]] = SimpleQueue()
        under_way = 0
        try:
            while True:
                while under_way < UNDER_WAY and (piece := next(coming, None)):
                    self._threads.submit(_carry, fd, piece, write, done)
                    under_way += 1
                if not under_way:
                    return
                piece, error = done.get()
                under_way -= 1
                if error is not None:
                    raise error
                self._file.expect_open()
                left[piece.extent] -= piece.memory.nbytes
                if not left[piece.extent]:
                    yield piece.extent
        finally:
            for _ in range(under_way):
                done.get()

    def _release(self) -> None:
        self._threads.shutdown(wait=False)


def _carry(fd: int, piece: IoPiece, write: bool, done: SimpleQueue[tuple[IoPiece, OSError | None]]) -> None:
    try:
        _whole(fd, piece, write)
    except OSError as error:
        done.put((piece, error))
    else:
        done.put((piece, None))


def _whole(fd: int, piece: IoPiece, write: bool) -> None:
    """All of a piece: the kernel may take or give less. A rest begins on a block, for O_DIRECT takes no other."""
    at = 0
    while at < piece.memory.nbytes:
        rest = piece.memory[at:]
        moved = os.pwritev(fd, [rest], piece.offset + at) if write else os.preadv(fd, [rest], piece.offset + at)
        if moved < rest.nbytes:
            moved = moved // BLOCK * BLOCK
        if not moved:
            raise (
                OSError(errno.ENOSPC, "nothing was taken")
                if write
                else OSError(errno.ENODATA, "the file ends before")
            )
        at += moved
