"""One reader for bytes from a path, memory or a stream, with a limit on their number."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from typing import BinaryIO, cast

from asr_serve.errors import AudioError, AudioTooLarge, EmptyAudio, SourceNotFound, UnsupportedAudio

HEAD_BYTES = 65_536
"""Bytes of the beginning that are kept for `container_headers`."""

SPOOL_MAX_BYTES = 4 * 1024**3
"""Most bytes copied to disk for a stream that must be seekable but is not."""


class _Memory:
    """A buffer as a raw file, without copying it as a whole."""

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        view = memoryview(buffer)
        self._view = view.cast("B") if view.contiguous else memoryview(bytes(view))
        self._at = 0

    def seekable(self) -> bool:
        return True

    def read(self, size: int) -> bytes:
        piece = bytes(self._view[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._view))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._view.release()


class ByteSource:
    """Bytes of one input, with just the methods that PyAV uses.

    A stream is read from its current position, and stays open afterwards; a file opened by path is closed.
    A stream that sets `seekable_when_read` promises that it can seek once it has been read to its end.

    Raises  SourceNotFound, EmptyAudio, AudioTooLarge, UnsupportedAudio (not a binary stream); at open, from
            `spool`, or from `expect_unbroken` for errors that occur while PyAV reads
    """

    def __init__(self, source: object, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._owned = False
        self._raw = self._open(source)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._begin()
            undo.pop_all()

    def _open(self, source: object) -> BinaryIO:
        if isinstance(source, str | os.PathLike):
            self._owned, self.label = True, f"the file {os.fsdecode(source)!r}"
            return _open_path(source, self.label)
        if isinstance(source, bytes | bytearray | memoryview):
            self._owned, self.label = True, f"a buffer of {memoryview(source).nbytes} bytes"
            return cast(BinaryIO, _Memory(source))
        if callable(getattr(source, "read", None)):
            self.label = "the stream"
            return cast(BinaryIO, source)
        raise UnsupportedAudio(
            f"a {type(source).__name__} came as audio",
            "a path, bytes, a binary stream, a numpy array or (array, rate_hz) is allowed",
            "convert it to one of these",
        )

    def _begin(self) -> None:
        self._can_seek = _seekable(self._raw)
        self._base = self._raw.tell() if self._can_seek else 0
        self.size_bytes: int | None = None
        if self._can_seek:
            self.size_bytes = max(0, self._raw.seek(0, os.SEEK_END) - self._base)
            self._raw.seek(self._base)
            self._expect_allowed(self.size_bytes)
        self._at = 0
        self._broken: AudioError | None = None
        self.read_bytes = 0
        self.ended = False
        self.head = b""
        while len(self.head) < HEAD_BYTES and (piece := self._read_raw(HEAD_BYTES - len(self.head))):
            self.head += piece
        if not self.head:
            raise EmptyAudio(f"{self.label} holds 0 bytes", "audio needs some", "check how it was written")

    def spool(self) -> None:
        """Make a stream seekable: by waiting for its end where that is enough, else by a copy on disk.

        Raises  AudioTooLarge past the byte limit, or past SPOOL_MAX_BYTES where there is none; SourceNotFound
        """
        if self._can_seek:
            return
        if self.max_bytes is None:
            self.max_bytes = SPOOL_MAX_BYTES
        if getattr(self._raw, "seekable_when_read", False):
            while not _seekable(self._raw):
                piece = self._read_raw(HEAD_BYTES)
                assert piece or _seekable(self._raw), "it promised to be seekable once read"
        if _seekable(self._raw):  # including a stream that has become so since it was opened
            self._base = self._raw.tell() - self.read_bytes
            self.size_bytes = self._raw.seek(0, os.SEEK_END) - self._base
            self._expect_allowed(self.size_bytes)
            self._can_seek = True
            self.seek(0)
            return
        with ExitStack() as undo:
            disk = undo.enter_context(tempfile.TemporaryFile(buffering=0))
            disk.write(self.head)
            while piece := self._read_raw(HEAD_BYTES):
                disk.write(piece)
            undo.pop_all()  # the file outlives this call, as our source
        self.size_bytes = self.read_bytes
        self.close()
        self._raw, self._owned, self._can_seek, self._base = cast(BinaryIO, disk), True, True, 0
        self.seek(0)

    def seekable(self) -> bool:
        return self._can_seek

    def read(self, size: int) -> bytes:
        """Read for PyAV: an error looks like the end of the input, and `expect_unbroken` raises it.

        PyAV stores exceptions raised in here until a later call. It prints all but the last to stderr when a
        demuxer (matroska) reads on, and the last may be raised for another input on the same thread.
        """
        if self._broken is None:
            try:
                return self._read(size)
            except AudioError as error:
                self._broken = error
        return b""

    def expect_unbroken(self) -> None:
        """Raise the error that `read` or `seek` stored, if any."""
        if self._broken is not None:
            raise self._broken

    def _read(self, size: int) -> bytes:
        if self._at < len(self.head):
            piece = self.head[self._at : self._at + size]
            self._at += len(piece)
            if self._can_seek:
                self._seek_raw()
            return piece
        piece = self._read_raw(size)
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek for PyAV; -1, its code for a failure, where the stream is broken."""
        assert self.size_bytes is not None, "only offered to PyAV where seekable() says so"
        self._at = max(0, offset + (0, self._at, self.size_bytes)[whence])
        try:
            self._seek_raw()
        except AudioError as error:
            self._broken = self._broken or error
            return -1
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if self._owned:
            self._raw.close()

    def _seek_raw(self) -> None:
        try:
            self._raw.seek(self._base + self._at)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            raise SourceNotFound(f"{self.label} stopped being readable: {error}") from error

    def _read_raw(self, size: int) -> bytes:
        try:
            piece: object = self._raw.read(min(size, self._left_bytes()))
        except (OSError, ValueError, EOFError) as error:  # ValueError: the stream was closed
            raise SourceNotFound(f"{self.label} stopped being readable: {error}") from error
        if not isinstance(piece, bytes | bytearray | memoryview):
            kind = "text" if isinstance(piece, str) else type(piece).__name__
            raise UnsupportedAudio(
                f"{self.label} gave {kind}",
                "a blocking stream of bytes is allowed",
                "open it in binary mode (for standard input: sys.stdin.buffer)",
            )
        self.ended = self.ended or not piece
        self.read_bytes += len(piece)
        if not self._can_seek:
            self._expect_allowed(self.read_bytes)
        return bytes(piece)

    def _left_bytes(self) -> int:
        """Bytes that may still be read of a stream, and one more, to detect that it is too large."""
        if self._can_seek or self.max_bytes is None:
            return sys.maxsize
        return self.max_bytes - self.read_bytes + 1

    def _expect_allowed(self, size_bytes: int) -> None:
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            raise AudioTooLarge(
                f"{self.label} holds {size_bytes} bytes or more",
                f"at most {self.max_bytes} are allowed",
                "send less, compress it (flac, opus), or raise max_bytes",
            )


def _seekable(raw: BinaryIO) -> bool:
    if not (hasattr(raw, "seek") and hasattr(raw, "tell")):
        return False
    answer = getattr(raw, "seekable", None)
    try:
        return bool(answer()) if callable(answer) else True
    except (OSError, ValueError):
        return False  # closed: reading it will raise the error


def _open_path(path: str | os.PathLike[str], label: str) -> BinaryIO:
    # The file is opened here, never by ffmpeg, which does not take "http://..." and "concat:..." for file names.
    todo = "check the path" if "://" not in os.fsdecode(path) else "fetch it first: nothing is downloaded here"
    try:
        return cast(BinaryIO, open(path, "rb", buffering=0))
    except FileNotFoundError:
        raise SourceNotFound(f"{label} does not exist", "a readable file is needed", todo) from None
    except IsADirectoryError:
        raise SourceNotFound(f"{label} is a folder", "a file is needed", "name a file in it") from None
    except PermissionError:
        raise SourceNotFound(f"{label} may not be read", "a readable file is needed", todo) from None
    except (OSError, ValueError) as error:
        raise SourceNotFound(f"{label} cannot be opened: {error}", "a readable file is needed", todo) from error
