"""Handshake between a server and an engine process that it did not start: each proves that it knows the key.

    server -> engine   version, PCM transport, nonce
    engine -> server   version, nonce, proof
    server -> engine   proof, and the descriptors of the ring where samples go through one

The key is never sent; both proofs are HMACs over both nonces, so none can be replayed or reflected. The rest of the
connection is neither encrypted nor signed: the network must be trusted, and the key keeps out those who merely reach
the port.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Literal

from asr_serve.errors import PeerGone, PeerRefused

VERSION = 1
"""Version of the messages. A server and an engine of different versions do not work together."""
HANDSHAKE_S = 10.0
"""Time limit of a handshake, and of a connection's first message."""
MAX_SERVERS = 128
"""Servers that may be connected to an engine at once."""
MAX_GREETINGS = 64
"""Connections over a network that have not proved yet that they know the key, at once. They take no server's place."""
NONCE_BYTES, PROOF_BYTES = 32, 32
SERVER, ENGINE = b"server", b"engine"
PcmTransport = Literal["ring", "inline"]
"""Transport of samples: shared memory, or the connection itself."""
_TRANSPORTS: tuple[PcmTransport, ...] = ("ring", "inline")
_HELLO = struct.Struct("<4sHH32s")
_REPLY = struct.Struct("<4sH32s32s")
_MAGIC = b"asrE"


def greet_engine(line: socket.socket, key: bytes, descriptors: tuple[int, int] | None) -> None:
    """Server's side. `descriptors`: bell and memory of the ring; None: samples follow their messages. Raises
    PeerRefused, PeerGone."""
    with _failures():
        end_s = time.monotonic() + HANDSHAKE_S
        line.settimeout(HANDSHAKE_S)
        nonce, transport = os.urandom(NONCE_BYTES), int(descriptors is None)
        line.sendall(_HELLO.pack(_MAGIC, VERSION, transport, nonce))
        magic, version, engine_nonce, proof = _REPLY.unpack(_receive_exactly(line, _REPLY.size, end_s))
        if (magic, version) != (_MAGIC, VERSION):
            raise PeerRefused(f"an engine of version {version}", f"version {VERSION}", "the same release on both sides")
        nonces = bytes([transport]) + nonce + engine_nonce
        if not hmac.compare_digest(proof, _proof(key, ENGINE, nonces)):
            raise PeerRefused("the engine does not know the key", "the key of this cluster")
        own = _proof(key, SERVER, nonces)
        if descriptors is None:
            line.sendall(own)
        else:
            socket.send_fds(line, [own], list(descriptors))
        line.setblocking(True)


def greet_server(line: socket.socket, key: bytes) -> tuple[int, int] | None:
    """Engine's side. Returns the descriptors of bell and memory, which the caller closes; None where samples follow
    their messages. Raises PeerRefused, PeerGone."""
    with _failures():
        end_s = time.monotonic() + HANDSHAKE_S
        magic, version, transport, nonce = _HELLO.unpack(_receive_exactly(line, _HELLO.size, end_s))
        own = os.urandom(NONCE_BYTES)
        if magic != _MAGIC or transport >= len(_TRANSPORTS):
            raise PeerRefused("bytes that are no greeting", "a server of this cluster")
        nonces = bytes([transport]) + nonce + own
        line.sendall(_REPLY.pack(_MAGIC, VERSION, own, _proof(key, ENGINE, nonces)))
        if version != VERSION:
            raise PeerRefused(f"a server of version {version}", f"version {VERSION}", "the same release on both sides")
        if _TRANSPORTS[transport] == "ring" and line.family != socket.AF_UNIX:
            raise PeerRefused("a ring over a network", "shared memory is within a machine")
        descriptors: list[int] = []
        if _TRANSPORTS[transport] == "ring":
            # One message: a proof in parts would come without the descriptors.
            line.settimeout(_left_s(end_s))
            proof, descriptors, _, _ = socket.recv_fds(line, PROOF_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        else:
            proof = _receive_exactly(line, PROOF_BYTES, end_s)
        try:
            if not hmac.compare_digest(proof, _proof(key, SERVER, nonces)):
                raise PeerRefused("a server that does not know the key", "the key of this cluster")
            if _TRANSPORTS[transport] == "ring" and len(descriptors) != 2:
                raise PeerRefused(f"{len(descriptors)} descriptors", "two: bell and memory")
        except PeerRefused:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        line.setblocking(True)
        return (descriptors[0], descriptors[1]) if descriptors else None


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + nonces, "sha256")


def _left_s(end_s: float) -> float:
    """Time until `end_s`, as a time limit of one call. Raises TimeoutError."""
    if (left_s := end_s - time.monotonic()) <= 0:
        raise TimeoutError(f"it took longer than {HANDSHAKE_S:g} s")
    return left_s


def _receive_exactly(line: socket.socket, count: int, end_s: float) -> bytes:
    data = b""
    while len(data) < count:
        line.settimeout(_left_s(end_s))
        received = line.recv(count - len(data))
        if not received:
            raise PeerGone(f"the other side hung up after {len(data)} of {count} bytes of a greeting")
        data += received
    return data


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise PeerGone(f"no greeting: {failure or type(failure).__name__}") from failure
