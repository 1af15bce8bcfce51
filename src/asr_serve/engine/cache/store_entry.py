"""Entries of the tiered store: where each lies, and who still uses that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.cache.block_allocator import BlockAllocator, BlockExtent, round_up_to_block
from asr_serve.engine.cache.integrity import ChunkTag

CHUNK_BYTES = 1 << 20
"""Bytes read, verified and decrypted at a time: the disk reads others while one is verified."""
ALIGN_BYTES = 64
"""Alignment of parts, whatever type of numbers they hold."""

EMPTY_VIEW = memoryview(b"")

ReadCallback = Callable[[list[memoryview] | None], None]


class StorePlacement:
    """Extents of the arena or of the file, with a count of users. The last `release` frees them, so what was
    dropped while the disk or a reader uses it is not overwritten."""

    def __init__(self, ground: BlockAllocator, extents: tuple[BlockExtent, ...], data: memoryview = EMPTY_VIEW) -> None:
        """`data`: the memory itself; empty for extents of the file."""
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
    """Offset in the entry."""
    nbytes: int


class StoreEntry:
    """Entry of one name. `memory`, `file`: where it lies; at least one is set unless it is new or `removed`."""

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

    def __init__(self, name: bytes, sizes: Sequence[int], pinned: bool) -> None:
        self.name, self.pinned = name, pinned
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
        """Callbacks of readers while the entry is in the file only."""
        self.loading = False
        """Whether it is being read from the file."""
        self.last_used = 0
        """Use counter of the index at the last put or get."""
        self.removed = False
        """Whether it was dropped or replaced."""
        self.write_failed = False
        """Whether the disk failed to write it: it stays in memory."""


def file_chunks(extents: Sequence[BlockExtent]) -> Iterator[FileChunk]:
    """Yields the chunks of an entry with these extents in the file."""
    number = start = 0
    for extent in extents:
        for at in range(extent.at, extent.end, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, extent.end - at)
            yield FileChunk(number, at, start, nbytes)
            number, start = number + 1, start + nbytes
