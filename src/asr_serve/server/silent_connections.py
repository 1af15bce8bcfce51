"""Closes connections that never sent a byte.

granian times out headers that begin and do not end, and waits for ever for the first byte. Enough such connections
take all that the server accepts, and nobody else is answered. Linux tells how much each connection has received.

TCP_DEFER_ACCEPT is no replacement: Linux holds back only as many silent connections as fit the backlog, and accepts
them in the end.
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
import time
from collections.abc import Collection

log = logging.getLogger(__name__)

SILENT_MS = 30_000
"""Longest time from connecting to the first byte; granian allows as much for the headers that follow."""
CROWDED_SILENT_MS = 2_000
"""The same while more than half of the connections that the server accepts are open: soon nobody could connect."""
CHECK_S = 5.0
"""Time between two checks."""
CROWDED_CHECK_S = 1.0
"""Time between two checks of how many files are open, and between two checks while there are many."""
_OPEN_FILES = "/proc/self/fd"
_ESTABLISHED = 1
_STATE, _LAST_RECEIVED, _BYTES_RECEIVED = 0, 52, 128
"""Offsets in `struct tcp_info` (linux/tcp.h) of tcpi_state (u8), tcpi_last_data_recv (u32, in ms; from connecting on
where nothing came) and tcpi_bytes_received (u64)."""
_TCP_INFO_BYTES = 136


async def watch(ports: Collection[int], connections: int) -> None:
    """Closes silent connections to these ports until it is cancelled. Returns at once where the system is not
    Linux. `connections`: the most that are accepted on each port."""
    checked_s = time.monotonic()
    while sys.platform == "linux":
        await asyncio.sleep(CROWDED_CHECK_S)
        crowded = len(os.listdir(_OPEN_FILES)) > connections // 2
        if not crowded and time.monotonic() - checked_s < CHECK_S:
            continue
        silent_ms = CROWDED_SILENT_MS if crowded else SILENT_MS
        if closed := await asyncio.to_thread(close_silent, ports, silent_ms):
            log.warning("%d connections were closed that sent nothing for %g s", closed, silent_ms / 1_000)
        checked_s = time.monotonic()


def close_silent(ports: Collection[int], silent_ms: int) -> int:
    """Shuts down this process's connections to `ports` that are older than `silent_ms` and never sent a byte. Their
    owner reads the end of the stream and closes them. Returns their number."""
    closed = 0
    for name in os.listdir(_OPEN_FILES):
        with contextlib.suppress(OSError):  # closed, or another's by now: looked at through a copy of its own
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if _is_silent(connection, ports, silent_ms):
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _is_silent(connection: socket.socket, ports: Collection[int], silent_ms: int) -> bool:
    """Returns whether it is such a connection. Raises OSError for a socket that is not TCP."""
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
