"""What is asleep: where an entry lies, and who still uses that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.cache.extents import BlockAllocator, BlockExtent, round_up_to_block
from asr_serve.engine.cache.integrity import ChunkTag

CHUNK_BYTES = 1 << 20
"""Read, checked and decrypted at a time: while one is checked the disk brings others."""
ALIGN_BYTES = 64
"""Parts begin on such, whatever they hold numbers of."""

EMPTY_VIEW = memoryview(b"")

ReadCallback = Callable[[list[memoryview] | None], None]


class StorePlacement:
    """Extents of the arena or of the file, and how many use them. The last to leave gives them back, so what was
    dropped while the disk was at it, or while somebody looks at it, is not overwritten."""

    def __init__(
        self, ground: BlockAllocator, extents: tuple[BlockExtent, ...], data: memoryview = EMPTY_VIEW
    ) -> None:
        """`data`: the memory itself, where it is memory and not of the file."""
        self.extents, self.data, self.users = extents, data, 1
        self._allocator = ground

    def acquire(self) -> StorePlacement:
        assert self.users, "it has been given back"
        self.users += 1
        return self

    def release(self) -> None:
        assert self.users, "it has been given back"
        self.users -= 1
        if not self.users:
            for extent in self.extents:
                self._allocator.free_extent(extent)


class FileChunk(NamedTuple):
    number: int
    file_at: int
    start: int
    """In the entry."""
    nbytes: int


class StoreEntry:
    """One name. `memory` and `file`: where it lies, one of them at least unless it is new or `gone`."""

    __slots__ = (
        "chunk_tags",
        "file",
        "last_used",
        "loading",
        "memory",
        "name",
        "nbytes",
        "parts",
        "pinned",
        "read_callbacks",
        "removed",
        "write_failed",
    )

    def __init__(self, name: bytes, sizes: Sequence[int], keep: bool) -> None:
        self.name, self.pinned = name, keep
        self.parts: list[BlockExtent] = []
        end = 0
        for size in sizes:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.parts.append(BlockExtent(start, size))
            end = start + size
        self.nbytes = round_up_to_block(end)
        self.memory: StorePlacement | None = None
        self.file: StorePlacement | None = None
        self.chunk_tags: list[ChunkTag] = []
        self.read_callbacks: list[ReadCallback] = []
        """Who asked for it while it lies in the file only."""
        self.loading = False
        """It is being read."""
        self.last_used = 0
        """When it was last put or got, counted up."""
        self.removed = False
        """Dropped, or replaced."""
        self.write_failed = False
        """The disk would not take it: it stays in memory."""


def file_chunks(extents: Sequence[BlockExtent]) -> Iterator[FileChunk]:
    """Of an entry that lies so in the file."""
    number = start = 0
    for extent in extents:
        for at in range(extent.at, extent.end, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, extent.end - at)
            yield FileChunk(number, at, start, nbytes)
            number, start = number + 1, start + nbytes
