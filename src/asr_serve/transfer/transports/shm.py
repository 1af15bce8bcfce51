"""Memory that two processes of one machine share, which are not parent and child: one copy, and nobody is woken.

The landing memory is a file in /dev/shm, with a random name, that only this user may open, and with a token in it
which proves to the other side that the file is the one it was offered. The other side removes the name as soon as
it has attached, so a third cannot, and memory without a name goes with its last process, however that ends.

The landing holds a lock on the file (flock), which the kernel drops with its process. By that a sender sees before
and after every copy that the other side is alive, and the next landing on this machine removes the files of those
that died before anybody attached. Numbers of processes would mean something else in every container; a lock does
not. The file has its lock before it has its name.

All pages are reserved before the offer is made: /dev/shm that is too small, as in containers by default, is an
error then and no fault later. A process of the same user could shorten the file under us; it could as well kill
us.
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

from asr_serve.errors import OptionError, PeerGone, RoadFailed
from asr_serve.transfer.checksum import copy_and_sum
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

FOLDER = Path("/dev/shm")
PREFIX = "asr-serve-road-"
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
HEAD_BYTES = mmap.PAGESIZE
"""Before the landing memory: the token, and then a byte that is 1 once the landing is closed."""
_CLOSED_AT = base.TOKEN_BYTES


def is_available() -> bool:
    return hasattr(os, "O_TMPFILE") and os.access(FOLDER, os.W_OK | os.X_OK)


def create_receiver(nbytes: int, host: str) -> ShmReceiver:
    sweep()
    return ShmReceiver(nbytes)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> ShmSender:
    """It is on this machine or nowhere: `only_at` says nothing of it."""
    return ShmSender(offer)


def sweep() -> None:
    """Remove the files of landings whose process died before anybody attached."""
    with contextlib.suppress(OSError), os.scandir(FOLDER) as found:
        for entry in [entry for entry in found if _NAME.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # it is held, another user's, or gone by now
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
                )  # with a folder it follows what /proc has there
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.ENOMEM)
                raise OptionError(
                    f"no {nbytes} bytes of shared memory: {error.strerror}",
                    todo=f"make {FOLDER} larger (docker run --shm-size), or take less" if full else "",
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
    """Copies into the landing memory, of whose owner nothing is needed for that: it may be asleep."""

    def __init__(self, offer: ReceiverOffer) -> None:
        super().__init__(offer)
        self._lock = threading.Lock()
        self._fd, self._map = _attached(offer)
        self._memory = np.frombuffer(self._map, np.uint8, offer.nbytes, HEAD_BYTES)
        self._closed = False

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Raises RoadFailed, PeerGone; never RoadTimeout."""
        self._validate(spot, data)
        self._expect_landing()
        found = copy_and_sum(self._memory[spot.at : spot.at + data.nbytes], data)
        self._expect_landing()
        return found

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
    """Whether nobody holds the lock of the landing any more."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _attached(offer: ReceiverOffer) -> tuple[int, mmap.mmap]:
    """The file of an offer and its memory; its name is gone then. Raises RoadFailed."""
    name = offer.where.decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise RoadFailed("shared memory of a name that none of ours has")
    path = FOLDER / name
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            found = os.fstat(fd)
            _expect_ours(found, offer.nbytes)
            memory = _mapped(fd, HEAD_BYTES + offer.nbytes)
        except OSError as error:
            raise RoadFailed(
                f"shared memory that is offered is not on this machine ({error.strerror})",
                todo="take another road",
            ) from error
        if not hmac.compare_digest(memory[: base.TOKEN_BYTES], offer.token):
            raise RoadFailed("shared memory of the right name is not the one that was offered")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        undo.pop_all()
    return fd, memory


def _expect_ours(found: os.stat_result, nbytes: int) -> None:
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not private or found.st_size != HEAD_BYTES + nbytes:
        raise RoadFailed("what is offered as shared memory is of another user, open to others or of another size")


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """With all pages at once: a fault in every first write to a page costs more than the copy.

    Never closed by hand: views of it live as long as they like.
    """
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
