"""A stream between two steps, as data: from it another slot, or another engine of the same model, goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

Part = bytes | memoryview
T = TypeVar("T")


class Saved(msgspec.Struct, frozen=True):
    """A stream between two steps: from it another slot, or another engine of the same model, goes on to the bit.

    Who takes it up checks its sizes and counts, not what its rows say: bytes that somebody made up are other words
    at worst, or fail the step that they are in.
    """

    numbers: bytes
    """msgpack of our own."""
    parts: tuple[bytes, ...]
    """Audio that was heard, rows, waiting audio, pages."""


class Held(NamedTuple):
    """The same where it lies: until its session's next step, or until who has it drops it."""

    numbers: bytes
    parts: Sequence[Part]

    def saved(self) -> Saved:
        return Saved(self.numbers, tuple(map(bytes, self.parts)))


def read(kind: type[T], numbers: Part) -> T:
    """Raises ValueError for what is none of that kind."""
    try:
        return msgspec.msgpack.decode(numbers, type=kind)
    except msgspec.MsgspecError as failure:
        raise ValueError(f"numbers of a saved stream that cannot be read: {failure}") from failure
