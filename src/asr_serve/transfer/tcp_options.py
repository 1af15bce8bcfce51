"""What every TCP connection between two engines is set to."""

from __future__ import annotations

import socket
import struct
import sys

SILENT_S = 10
"""Until a machine that answers nothing any more is taken for dead, while nothing is being sent."""


def configure_connection(line: socket.socket) -> None:
    """A connection in blocking mode, which says small things at once and notices a peer that vanished."""
    line.setblocking(True)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 2)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // 2)


def set_timeout(line: socket.socket, which: int, seconds: float) -> None:
    """How long one call may take: the kernel's own time limit, so that the call needs no other to wait for it and
    the interpreter is left once for all the bytes. `which`: SO_RCVTIMEO or SO_SNDTIMEO. 0 is no limit."""
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    line.setsockopt(
        socket.SOL_SOCKET, which, struct.pack("@ll", whole, micros if whole or micros or not seconds else 1)
    )
