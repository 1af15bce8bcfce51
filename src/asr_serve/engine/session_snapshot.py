"""A stream between two steps, as data: from it another slot, or another engine of the same model, goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

BytesLike = bytes | memoryview
T = TypeVar("T")


class SessionSnapshot(msgspec.Struct, frozen=True):
    """A stream between two steps: from it another slot, or another engine of the same model, goes on to the bit.

    Who takes it up checks its sizes and counts, not what its rows say: bytes that somebody made up are other words
    at worst, or fail the step that they are in.
    """

    header: bytes
    """msgpack of our own."""
    parts: tuple[bytes, ...]
    """Audio that was heard, rows, waiting audio, pages."""


class SessionSnapshotView(NamedTuple):
    """The same where it lies: until its session's next step, or until who has it drops it."""

    header: bytes
    parts: Sequence[BytesLike]

    def to_snapshot(self) -> SessionSnapshot:
        return SessionSnapshot(self.header, tuple(map(bytes, self.parts)))


def decode_header(kind: type[T], numbers: BytesLike) -> T:
    """Raises ValueError for what is none of that kind."""
    try:
        return msgspec.msgpack.decode(numbers, type=kind)
    except msgspec.MsgspecError as failure:
        raise ValueError(f"numbers of a saved stream that cannot be read: {failure}") from failure
