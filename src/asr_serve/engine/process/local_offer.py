"""Offer of an engine to other programs of its user on this host: a file that says where its process listens.

The folder is its user's alone, so that whoever reads the file may use the engine.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.errors import OptionError, PeerRefused

OFFER_FILE = "engine.json"
_SOCKET = re.compile(r"(\d+)\.sock")


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


def prepare_offer_folder(folder: str, param: str) -> None:
    """Makes a folder for an offer, and removes what a process that was killed has left there. Raises OptionError for
    one that others may read."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.stat(folder)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise OptionError(
                f"{folder} may be read by others",
                "a folder of this user alone: who reads it may use the engine",
                f"chmod 700 {folder}",
                param=param,
            )
        for name in os.listdir(folder):
            found = _SOCKET.fullmatch(name)
            if found is not None and not os.path.exists(f"/proc/{found[1]}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
    except OSError as failure:
        raise OptionError(f"{folder}: {failure.strerror}", "a folder that can be written", param=param) from failure


def write_offer(folder: str, offer: EngineOffer) -> None:
    """Writes an offer in place of any other. Raises OSError."""
    path = os.path.join(folder, OFFER_FILE)
    new = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(offer))
    os.replace(new, path)


def remove_offer(folder: str, path: str) -> None:
    """Removes the offer of the process at that socket; one of another stays."""
    with contextlib.suppress(OSError, PeerRefused):
        offer = read_offer(folder)
        if offer is not None and offer.path == path:
            os.unlink(os.path.join(folder, OFFER_FILE))


def read_offer(folder: str) -> EngineOffer | None:
    """Reads an offer; None: there is none. Raises PeerRefused for one that cannot be read."""
    try:
        with open(os.path.join(folder, OFFER_FILE), "rb") as file:
            return msgspec.json.decode(file.read(), type=EngineOffer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as failure:
        raise PeerRefused(
            f"the offer of an engine in {folder} cannot be read: {failure}",
            "that of a server of this release and this user",
            "start both as one user, from one release",
        ) from failure
