"""Connections that never send a byte are closed; those that send are left alone."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import pytest

from asr_serve.server.silent_connections import close_silent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a connection has received")
WAIT_S = 20.0


@pytest.fixture
def accepted():
    """A listening port, and pairs (client, the server's side) of connections to it."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=WAIT_S))
            return client, stack.enter_context(listening.accept()[0])

        yield listening.getsockname()[1], connect


def test_only_silent_connections_are_closed(accepted) -> None:
    port, connect = accepted
    silent, talking = [connect() for _ in range(3)], connect()
    talking[0].sendall(b"G")
    assert talking[1].recv(1) == b"G"
    assert close_silent({port}, silent_ms=60_000) == 0, "too young"
    assert close_silent({port + 1}, silent_ms=0) == 0, "of another port"
    time.sleep(0.02)  # the kernel's clock ticks
    assert close_silent({port}, silent_ms=1) == 3
    for client, server in silent:
        assert client.recv(1) == b""
        assert server.recv(1) == b""
    talking[0].sendall(b"E")
    assert talking[1].recv(1) == b"E"
    for _, server in silent:
        server.close()
    assert close_silent({port}, silent_ms=1) == 0


def test_a_client_in_this_process_is_not_touched(accepted) -> None:
    """A client's own end of a connection has another local port."""
    port, connect = accepted
    client, server = connect()
    server.close()
    time.sleep(0.02)
    assert close_silent({port}, silent_ms=1) == 0
    assert client.recv(1) == b""
