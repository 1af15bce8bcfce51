"""Storage of a disk: a file without a name, past the page cache; and memory suitable for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from asr_serve.errors import DiskFailed, DiskFull, OptionError

BLOCK = 4_096
"""Block size of offsets, lengths and memory addresses: enough for O_DIRECT on any disk."""

DIRECT: int = getattr(os, "O_DIRECT", 0)
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of no room, of an exhausted quota, and of the limit of one file (RLIMIT_FSIZE)."""
NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

FileExtent = tuple[int, memoryview]
"""Offset in the file, and the memory that is written there or read from there."""

log = logging.getLogger("asr_serve.disk")


def whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def aligned_memory(nbytes: int) -> memoryview:
    """Returns zeroed memory of `nbytes` rounded up to whole blocks (one at least), on a page's boundary.

    It uses huge pages where the system has them (from 2 MiB on): then the first touch costs less, and a disk gets
    a few long segments instead of hundreds of pages, of which a request can hold only so many. On a virtual disk
    that matters more than any depth or piece size. It is freed when no view of it remains.
    """
    memory = mmap.mmap(-1, whole_blocks(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class NamelessFile:
    """File of a fixed size that no other process can open and that is freed with this process, however it ends.

    It lies in `folder` without a name (O_TMPFILE; where the file system does not support that, its name is removed
    at once). All of its room is reserved when it is made. `direct`: whether it bypasses the page cache; where the
    file system does not support that, a warning is logged.

    Raises OptionError where the folder cannot be used, DiskFull where it has no room.
    """

    def __init__(self, folder: str | None, nbytes: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            raise OptionError("this system offers no disk", "Linux", "leave disk_bytes at 0", param="disk_bytes")
        folder = folder or tempfile.gettempdir()
        self.nbytes = whole_blocks(nbytes)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self.on_gone: Callable[[], None] | None = None
        """Called once, when the file was closed and its last user has left."""
        try:
            self._fd = _make(folder)
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise _full(folder, self.nbytes, error) from error
            raise OptionError(
                f"no file can be made in disk_path {folder!r} ({error.strerror})",
                "a folder that is there and may be written to",
                param="disk_path",
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._fd)
            _take_room(self._fd, folder, self.nbytes)
            self.direct = _past_the_cache(self._fd)
            undo.pop_all()
        if not self.direct:
            log.warning("%s lies on a file system without O_DIRECT: the disk goes through the page cache", folder)

    @property
    def closed(self) -> bool:
        return self._closed

    @contextlib.contextmanager
    def open_fd(self) -> Iterator[int]:
        """Yields the descriptor, which stays open within the context. Raises DiskFailed once the file is closed."""
        with self._lock:
            self.expect_open()
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
            self._release_user()

    def keep_open(self) -> None:
        """Leaks the descriptor for the life of this process; called by a user of the file."""
        with self._lock:
            assert self._users, "nobody uses it"
            self._users += 1

    def expect_open(self) -> None:
        if self._closed:
            raise DiskFailed("the file on disk was closed")

    def close(self) -> None:
        """Closes the file without waiting: its last user releases it. Idempotent."""
        self._closed = True
        self._release_user()

    def _release_user(self) -> None:
        with self._lock:
            if not self._closed or self._users or self._fd < 0:
                return
            fd, self._fd = self._fd, -1
        os.close(fd)
        if self.on_gone is not None:
            self.on_gone()

    def validate_extents(self, extents: Sequence[tuple[int, memoryview]], write: bool) -> list[FileExtent]:
        """Returns the extents as plain bytes. Raises ValueError for any that are not whole blocks of this file, or
        of memory."""
        checked = []
        for offset, memory in extents:
            view = memoryview(memory).cast("B")
            if offset % BLOCK or view.nbytes % BLOCK:
                raise ValueError(f"{view.nbytes} bytes at {offset}: not whole blocks of {BLOCK}")
            if offset < 0 or offset + view.nbytes > self.nbytes:
                raise ValueError(f"{view.nbytes} bytes at {offset} lie outside of the file's {self.nbytes}")
            if view.nbytes and address(view) % BLOCK:
                raise ValueError(f"memory at {address(view):#x} does not begin on a block of {BLOCK}: take aligned()")
            if view.readonly and not write:
                raise ValueError("memory to read into must be writable")
            checked.append((offset, view))
        return checked


def address(view: memoryview) -> int:
    pointer: int = np.frombuffer(view, np.uint8).ctypes.data
    return pointer


def disk_failure(error: OSError, write: bool) -> DiskFailed:
    """Converts the error of an operation on the file."""
    came = f"the disk cannot {'write' if write else 'read'} ({error.strerror or error})"
    return DiskFull(came) if write and error.errno in DISK_FULL_ERRNOS else DiskFailed(came)


def _make(folder: str) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in NO_TMPFILE:
                raise
    fd, name = tempfile.mkstemp(prefix="asr-serve-", dir=folder)
    os.unlink(name)
    return fd


def _take_room(fd: int, folder: str, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise _full(folder, nbytes, error) from error
        if error.errno not in NO_FALLOCATE:
            raise DiskFailed(f"the disk cannot make room in {folder!r} ({error.strerror})") from error
        # This file system cannot reserve room: at least there is enough now.
        if _free(folder) < nbytes:
            raise _full(folder, nbytes, error) from error
        os.ftruncate(fd, nbytes)


def _past_the_cache(fd: int) -> bool:
    if not DIRECT:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
    except OSError:
        return False
    return True


def _free(folder: str) -> int:
    statistics = os.statvfs(folder)
    return statistics.f_bavail * statistics.f_frsize


def _full(folder: str, nbytes: int, error: OSError) -> DiskFull:
    return DiskFull(
        f"{nbytes} bytes do not fit in {folder!r} ({error.strerror})",
        f"{_free(folder)} bytes are free there",
        "set disk_bytes to less, or disk_path to a folder on another disk",
    )
