"""What is asleep: where an entry lies, and who still uses that place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.tiers.extents import Extent, Extents, rounded
from asr_serve.engine.tiers.sealing import Mark

CHUNK_BYTES = 1 << 20
"""Read, checked and decrypted at a time: while one is checked the disk brings others."""
ALIGN_BYTES = 64
"""Parts begin on such, whatever they hold numbers of."""

NOTHING = memoryview(b"")

Done = Callable[[list[memoryview] | None], None]


class Place:
    """Extents of the arena or of the file, and how many use them. The last to leave gives them back, so what was
    dropped while the disk was at it, or while somebody looks at it, is not overwritten."""

    def __init__(self, ground: Extents, extents: tuple[Extent, ...], data: memoryview = NOTHING) -> None:
        """`data`: the memory itself, where it is memory and not of the file."""
        self.extents, self.data, self.users = extents, data, 1
        self._ground = ground

    def use(self) -> Place:
        assert self.users, "it has been given back"
        self.users += 1
        return self

    def leave(self) -> None:
        assert self.users, "it has been given back"
        self.users -= 1
        if not self.users:
            for extent in self.extents:
                self._ground.give(extent)


class Chunk(NamedTuple):
    number: int
    file_at: int
    start: int
    """In the entry."""
    nbytes: int


class Entry:
    """One name. `memory` and `file`: where it lies, one of them at least unless it is new or `gone`."""

    __slots__ = (
        "coming",
        "file",
        "gone",
        "keep",
        "marks",
        "memory",
        "name",
        "nbytes",
        "parts",
        "stuck",
        "used",
        "waiting",
    )

    def __init__(self, name: bytes, sizes: Sequence[int], keep: bool) -> None:
        self.name, self.keep = name, keep
        self.parts: list[Extent] = []
        end = 0
        for size in sizes:
            start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            self.parts.append(Extent(start, size))
            end = start + size
        self.nbytes = rounded(end)
        self.memory: Place | None = None
        self.file: Place | None = None
        self.marks: list[Mark] = []
        self.waiting: list[Done] = []
        """Who asked for it while it lies in the file only."""
        self.coming = False
        """It is being read."""
        self.used = 0
        """When it was last put or got, counted up."""
        self.gone = False
        """Dropped, or replaced."""
        self.stuck = False
        """The disk would not take it: it stays in memory."""


def chunks(extents: Sequence[Extent]) -> Iterator[Chunk]:
    """Of an entry that lies so in the file."""
    number = start = 0
    for extent in extents:
        for at in range(extent.at, extent.end, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, extent.end - at)
            yield Chunk(number, at, start, nbytes)
            number, start = number + 1, start + nbytes
