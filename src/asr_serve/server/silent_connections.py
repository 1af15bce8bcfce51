"""Closes connections that never sent a byte.

granian times out headers that begin and do not end, and waits for ever for the first byte. Enough such connections
take all that the server accepts, and nobody else is answered. Linux tells how much each connection has received.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection

log = logging.getLogger(__name__)

SILENT_MS = 30_000
"""Longest time from connecting to the first byte; granian allows as much for the headers that follow."""
CHECK_S = 5.0
"""Time between two checks."""
_ESTABLISHED = 1
_STATE, _LAST_RECEIVED, _BYTES_RECEIVED = 0, 52, 128
"""Offsets in `struct tcp_info` (linux/tcp.h) of tcpi_state (u8), tcpi_last_data_recv (u32, in ms; from connecting on
where nothing came) and tcpi_bytes_received (u64)."""
_TCP_INFO_BYTES = 136


async def watch(ports: Collection[int]) -> None:
    """Closes silent connections to these ports until it is cancelled. Returns at once where the system is not
    Linux."""
    while sys.platform == "linux":
        await asyncio.sleep(CHECK_S)
        if closed := await asyncio.to_thread(close_silent, ports):
            log.warning("%d connections were closed that sent nothing for %g s", closed, SILENT_MS / 1_000)


def close_silent(ports: Collection[int], silent_ms: int = SILENT_MS) -> int:
    """Shuts down this process's connections to `ports` that are older than `silent_ms` and never sent a byte. Their
    owner reads the end of the stream and closes them. Returns their number."""
    closed = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed, or another's by now: looked at through a copy of its own
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if _is_silent(connection, ports, silent_ms):
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _is_silent(connection: socket.socket, ports: Collection[int], silent_ms: int) -> bool:
    """Whether it is such a connection. Raises OSError for a socket that is not TCP."""
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if connection.getsockname()[1] not in ports:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES or info[_STATE] != _ESTABLISHED:
        return False
    (waited_ms,), (received,) = (
        struct.unpack_from("I", info, _LAST_RECEIVED),
        struct.unpack_from("Q", info, _BYTES_RECEIVED),
    )
    return not received and waited_ms >= silent_ms
