"""Shared memory of two processes of one machine that are not parent and child: one copy, and no wake-up.

The receiver's memory is a file in /dev/shm, with a random name, that only this user may open, and with a token in
it which proves to the sender that the file is the one it was offered. The sender removes the name as soon as it
has attached, so a third process cannot, and memory without a name is freed with its last process, however that
ends.

The receiver holds a lock on the file (flock), which the kernel releases with its process. By that a sender sees
before and after every copy that the other side is alive, and the next receiver on this machine removes the files
of those that died before a sender attached. Process ids differ between containers; a lock works everywhere. The
file is locked before it has a name.

All pages are reserved before the offer is made: /dev/shm that is too small, as in containers by default, is an
error then and no fault later. A process of the same user could truncate the file; it could as well kill this
process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import mmap
import os
import re
import secrets
import stat
import threading
from pathlib import Path

import numpy as np

from asr_serve.errors import OptionError, PeerGone, TransportFailed
from asr_serve.transfer.checksum import copy_and_sum
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

FOLDER = Path("/dev/shm")
PREFIX = "asr-serve-transport-"
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
HEAD_BYTES = mmap.PAGESIZE
"""Header before the receiver's memory: the token, and then a byte that is 1 once the receiver is closed."""
_CLOSED_AT = base.TOKEN_BYTES


def is_available() -> bool:
    return hasattr(os, "O_TMPFILE") and os.access(FOLDER, os.W_OK | os.X_OK)


def create_receiver(nbytes: int, host: str) -> ShmReceiver:
    sweep()
    return ShmReceiver(nbytes)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> ShmSender:
    """Attaches to memory of this machine. `only_at` is ignored: nothing leaves the machine."""
    return ShmSender(offer)


def sweep() -> None:
    """Removes the files of receivers whose process died before a sender attached."""
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in [entry for entry in entries if _NAME.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # it is locked, another user's, or gone by now
                fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(fd)


class ShmReceiver(base.Receiver):
    def __init__(self, nbytes: int) -> None:
        name, token = PREFIX + secrets.token_hex(16), base.new_token()
        self._path = FOLDER / name
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as after:
            try:
                self._fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._fd)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(self._fd, 0, HEAD_BYTES + nbytes)
                self._map = _mapped(self._fd, HEAD_BYTES + nbytes)
                self._map[: len(token)] = token
                files = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                after.callback(os.close, files)
                os.link(
                    str(self._fd), self._path, src_dir_fd=files
                )  # with src_dir_fd, link follows the symbolic link in /proc
            except OSError as error:
                no_space = error.errno in (errno.ENOSPC, errno.ENOMEM)
                raise OptionError(
                    f"no {nbytes} bytes of shared memory: {error.strerror}",
                    todo=f"make {FOLDER} larger (docker run --shm-size), or take less" if no_space else "",
                ) from error
            undo.pop_all()
        memory = np.frombuffer(self._map, np.uint8, nbytes, HEAD_BYTES)
        super().__init__(ReceiverOffer("shm", nbytes, token, name.encode()), memory)

    def _close_transport(self) -> None:
        self._map[_CLOSED_AT] = 1
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._fd)


class ShmSender(base.TransportSender):
    """Sender that copies into the receiver's memory; the receiving process takes no part in that, and may sleep."""

    def __init__(self, offer: ReceiverOffer) -> None:
        super().__init__(offer)
        self._lock = threading.Lock()
        self._fd, self._map = _attached(offer)
        self._memory = np.frombuffer(self._map, np.uint8, offer.nbytes, HEAD_BYTES)
        self._closed = False

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Writes as in the base class. Raises TransportFailed, PeerGone; never TransportTimeout."""
        self._validate(spot, data)
        self._expect_landing()
        digest = copy_and_sum(self._memory[spot.at : spot.at + data.nbytes], data)
        self._expect_landing()
        return digest

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)

    def _expect_landing(self) -> None:
        with self._lock:
            if self._closed:
                raise PeerGone("this end of the shared memory is closed")
            if self._map[_CLOSED_AT] or _unlocked(self._fd):
                raise PeerGone("the other end of the shared memory is gone", todo="ask another engine")


def _unlocked(fd: int) -> bool:
    """Returns whether the receiver's lock is released."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _attached(offer: ReceiverOffer) -> tuple[int, mmap.mmap]:
    """Opens and maps the file of an offer, and removes its name. Raises TransportFailed."""
    name = offer.where.decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise TransportFailed("shared memory of a name that none of ours has")
    path = FOLDER / name
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            _expect_ours(status, offer.nbytes)
            memory = _mapped(fd, HEAD_BYTES + offer.nbytes)
        except OSError as error:
            raise TransportFailed(
                f"shared memory that is offered is not on this machine ({error.strerror})",
                todo="take another transport",
            ) from error
        if not hmac.compare_digest(memory[: base.TOKEN_BYTES], offer.token):
            raise TransportFailed("shared memory of the right name is not the one that was offered")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        undo.pop_all()
    return fd, memory


def _expect_ours(found: os.stat_result, nbytes: int) -> None:
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not private or found.st_size != HEAD_BYTES + nbytes:
        raise TransportFailed("what is offered as shared memory is of another user, open to others or of another size")


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Maps the file with all pages present: a fault at every first write to a page costs more than the copy.

    Never closed explicitly: views of it may live on.
    """
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
