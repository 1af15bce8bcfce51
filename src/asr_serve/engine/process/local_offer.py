"""Offer of an engine to other programs of its user on this host: a file that says where its process listens.

The folder is its user's alone, so that whoever reads the file may use the engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from typing import BinaryIO

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.errors import OptionError, PeerRefused

OFFER_FILE = "engine.json"
LOCK_FILE = "engine.lock"
"""File that a server has locked for as long as it offers its engine: by that others see that it lives."""
LOCK_WAIT_S, LOCK_POLL_S = 3.0, 0.05
MAX_OFFER_BYTES = 1 << 20
_LEFT = re.compile(r"\d+\.sock|engine\.json\.\d+")


class EngineOffer(msgspec.Struct, frozen=True):
    """Address of an engine process, and what a client needs beside it."""

    release: str
    """Release of the program; another one has other messages, perhaps."""
    path: str
    """Path of its Unix socket."""
    key: bytes
    """Key that a client must know."""
    ring: RingSize
    """Size of the ring in shared memory."""
    config: EngineConfig
    """Settings of the engine's clients."""

    def __repr__(self) -> str:
        return f"EngineOffer(release={self.release!r}, path={self.path!r})"  # no key in logs


def check_offer_folder(folder: str) -> str | None:
    """Says why a folder is not one of this user alone; None: it is. Raises FileNotFoundError, OSError."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        return "is no folder, but a link or a file"
    return _fault(facts)


def _fault(facts: os.stat_result) -> str | None:
    if facts.st_uid != os.geteuid():
        return f"is of the user {facts.st_uid}, not {os.geteuid()}"
    return "may be read or written by others" if stat.S_IMODE(facts.st_mode) & 0o077 else None


def lock_offer_folder(folder: str, param: str) -> BinaryIO:
    """Makes a folder for an offer, locks it, and removes what a server that was killed has left there. The lock lasts
    until the file that is returned is closed, or this process ends. Raises OptionError for a folder that others may
    read, or that another server has."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if (fault := check_offer_folder(folder)) is not None:
            raise OptionError(
                f"{folder} {fault}",
                "a folder of this user alone: who reads it may use the engine",
                f"chmod 700 {folder}",
                param=param,
            )
        lock = _open(folder, LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            _take_lock(lock, folder, param)
            for name in os.listdir(folder):
                if name == OFFER_FILE or _LEFT.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, name))
        except BaseException:
            lock.close()
            raise
    except OSError as failure:
        raise OptionError(f"{folder}: {failure.strerror}", "a folder that can be written", param=param) from failure
    return lock


def _take_lock(lock: BinaryIO, folder: str, param: str) -> None:
    """Waits a little: the offer before it may be about to end, and readers look at the lock. Raises OptionError."""
    end_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise OptionError(
                    f"another server offers its engine in {folder}",
                    "a folder for each server",
                    "give this one another, or stop that one",
                    param=param,
                ) from None
        time.sleep(LOCK_POLL_S)


def _is_locked(folder: str) -> bool:
    """Returns whether the server of an offer lives. Raises OSError."""
    with _open(folder, LOCK_FILE, os.O_RDWR) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _open(folder: str, name: str, flags: int) -> BinaryIO:
    """Opens a file of this user alone. Raises OSError."""
    path = os.path.join(folder, name)
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        facts = os.fstat(number)
        fault = _fault(facts) if stat.S_ISREG(facts.st_mode) else "is no file"
        if fault is not None:
            raise PermissionError(errno.EPERM, f"{name} {fault}", path)
        return os.fdopen(number, "rb" if flags == os.O_RDONLY else "r+b")
    except BaseException:
        os.close(number)
        raise


def write_offer(folder: str, offer: EngineOffer) -> None:
    """Writes an offer in place of any other. Raises OSError."""
    path = os.path.join(folder, OFFER_FILE)
    new = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(offer))
    os.replace(new, path)


def remove_offer(folder: str) -> None:
    """Removes the offer of who has the lock."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, OFFER_FILE))


def read_offer(folder: str) -> EngineOffer | None:
    """Reads the offer of a server that lives; None: there is none. Raises PeerRefused for one that cannot be read, or
    that others may have written."""
    try:
        if (fault := check_offer_folder(folder)) is not None:
            raise PeerRefused(
                f"{folder} {fault}",
                "a folder of this user alone",
                "name the server's edge_folder, and not a link to it",
            )
        with _open(folder, OFFER_FILE, os.O_RDONLY) as file:
            data = file.read(MAX_OFFER_BYTES)
        return msgspec.json.decode(data, type=EngineOffer) if _is_locked(folder) else None
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as failure:
        raise PeerRefused(
            f"the offer of an engine in {folder} cannot be read: {failure}",
            "that of a server of this release and this user",
            "start both as one user, from one release",
        ) from failure
