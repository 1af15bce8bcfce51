"""Snapshot of a stream between two steps, from which another slot, or another engine of the same model,
continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

BytesLike = bytes | memoryview
T = TypeVar("T")


class SessionSnapshot(msgspec.Struct, frozen=True):
    """Snapshot of a stream between two steps: another slot, or another engine of the same model, continues from it
    with identical results.

    The receiver validates sizes, counts and the indices in rows of the search's state: forged bytes are refused when
    the stream is restored, or produce other words.
    """

    header: bytes
    """msgpack of the fields that are not tensors or audio."""
    parts: tuple[bytes, ...]
    """Processed audio, rows of state, waiting audio, pages."""


class SessionSnapshotView(NamedTuple):
    """Snapshot without a copy: valid until the session's next step, or until its holder drops it."""

    header: bytes
    parts: Sequence[BytesLike]

    def to_snapshot(self) -> SessionSnapshot:
        return SessionSnapshot(self.header, tuple(map(bytes, self.parts)))


def decode_header(kind: type[T], numbers: BytesLike) -> T:
    """Decodes a header. Raises ValueError for bytes of another kind."""
    try:
        return msgspec.msgpack.decode(numbers, type=kind)
    except msgspec.MsgspecError as failure:
        raise ValueError(f"numbers of a saved stream that cannot be read: {failure}") from failure
