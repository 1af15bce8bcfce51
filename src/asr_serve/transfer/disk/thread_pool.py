"""Thread pool with preadv and pwritev: the fallback without native code, and the reference in tests of other back
ends."""

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
        remaining = [memory.nbytes for _, memory in extents]
        pieces = split_extents(extents, PIECE_BYTES)
        done: SimpleQueue[tuple[IoPiece, OSError | None]] = SimpleQueue()
        under_way = 0
        try:
            while True:
                while under_way < UNDER_WAY and (piece := next(pieces, None)):
                    self._threads.submit(_carry, fd, piece, write, done)
                    under_way += 1
                if not under_way:
                    return
                piece, error = done.get()
                under_way -= 1
                if error is not None:
                    raise error
                self._file.expect_open()
                remaining[piece.extent] -= piece.memory.nbytes
                if not remaining[piece.extent]:
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
    """Transfers a whole piece; the kernel may do less in a call. A remainder begins on a block, as O_DIRECT wants."""
    offset = 0
    while offset < piece.memory.nbytes:
        rest = piece.memory[offset:]
        moved = os.pwritev(fd, [rest], piece.offset + offset) if write else os.preadv(fd, [rest], piece.offset + offset)
        if moved < rest.nbytes:
            moved = moved // BLOCK * BLOCK
        if not moved:
            raise (
                OSError(errno.ENOSPC, "nothing was taken") if write else OSError(errno.ENODATA, "the file ends before")
            )
        offset += moved
