"""Socket options of every TCP connection between two engines."""

from __future__ import annotations

import socket
import struct
import sys

SILENT_S = 10
"""Seconds without an answer after which a connection's peer counts as dead."""


def configure_connection(line: socket.socket) -> None:
    """Makes a connection blocking, without delay for small messages, and with keepalive against a vanished peer."""
    line.setblocking(True)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        # Keepalive says nothing of a peer that vanished while data is on its way.
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1_000 * SILENT_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 2)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // 2)


def set_timeout(line: socket.socket, which: int, seconds: float) -> None:
    """Sets the kernel's time limit of one call, so that no other call has to wait first, and the GIL is released
    once for all bytes. `which`: SO_RCVTIMEO or SO_SNDTIMEO. 0 is no limit."""
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    line.setsockopt(
        socket.SOL_SOCKET, which, struct.pack("@ll", whole, micros if whole or micros or not seconds else 1)
    )
