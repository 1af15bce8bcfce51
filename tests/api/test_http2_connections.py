"""Connections to /v1/stream over HTTP/2, and how sessions share them; against a peer of h2 that has the limits of a
test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded
from h2.settings import SettingCodes, Settings

from asr_serve.api.client import http2_connection
from asr_serve.api.client.http2_connection import Http2StreamConnection, Http2StreamConnections
from asr_serve.errors import Unreachable
from asr_serve.protocols.stream.server_events import SessionEvent

SESSION = b"data: %s\n\n" % msgspec.json.encode(SessionEvent("s", False, "m", "en", "pcm_s16le", 16_000, 0, 0, 0.0))


class Peer:
    """Server that answers each request with a session."""

    def __init__(self, max_streams: int, *, ends: bool = True) -> None:
        """`ends`: whether an answer ends with its request."""
        self._max_streams, self._ends = max_streams, ends
        self.connections = self.open_now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_now += 1
        try:
            http2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
            limit = {SettingCodes.MAX_CONCURRENT_STREAMS: self._max_streams}
            http2.local_settings = Settings(client=False, initial_values=limit)
            http2.initiate_connection()
            writer.write(http2.data_to_send())
            while data := await reader.read(65_536):
                for event in http2.receive_data(data):
                    if isinstance(event, RequestReceived):
                        http2.send_headers(event.stream_id, [(":status", "200")])
                        http2.send_data(event.stream_id, SESSION)
                    elif isinstance(event, StreamEnded) and self._ends:
                        http2.end_stream(event.stream_id)
                writer.write(http2.data_to_send())
        finally:
            self.open_now -= 1
            writer.close()


def run(peer: Peer, work: Callable[[Http2StreamConnections], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        async with server:
            connections = Http2StreamConnections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                await work(connections)
            finally:
                await connections.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def finish(connection: Http2StreamConnection) -> None:
    connection._finished = True
    await connection.close()


def test_many_sessions_at_once_share_connections_up_to_the_servers_limit() -> None:
    peer = Peer(3)

    async def work(connections: Http2StreamConnections) -> None:
        opened = await asyncio.gather(*(connections.open({}) for _ in range(7)))
        assert (connections.count, peer.connections) == (3, 3)
        assert {connection.session.session_id for connection in opened} == {"s"}

    run(peer, work)


def test_a_request_that_the_server_has_not_ended_counts_and_the_next_one_finds_another_connection() -> None:
    peer = Peer(1, ends=False)

    async def work(connections: Http2StreamConnections) -> None:
        await finish(await connections.open({}))
        await connections.open({})
        assert peer.connections == 2

    run(peer, work)


def test_a_connection_that_takes_no_more_requests_is_left_for_another() -> None:
    peer = Peer(9)

    async def work(connections: Http2StreamConnections) -> None:
        await connections.open({})
        connections._lines[0]._http2.highest_outbound_stream_id = (1 << 31) - 1  # after as many sessions
        await connections.open({})
        assert (connections.count, peer.connections) == (2, 2)

    run(peer, work)


@pytest.mark.parametrize("ending", [finish, Http2StreamConnection.close])
def test_connections_without_sessions_are_closed_after_a_while(
    ending: Callable[[Http2StreamConnection], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "IDLE_S", 0.2)
    peer = Peer(1)

    async def work(connections: Http2StreamConnections) -> None:
        opened = [await connections.open({}) for _ in range(3)]
        assert peer.open_now == 3
        await ending(opened[0])
        await ending(opened[1])
        await until(lambda: peer.open_now == 1)
        await asyncio.sleep(0.5)
        assert (connections.count, peer.open_now) == (1, 1)  # a session is on it
        await ending(opened[2])
        assert connections.count == 1  # for the next session
        await until(lambda: connections._lines[-1].has_room)  # its answer has ended
        await ending(await connections.open({}))
        await until(lambda: not connections.count and not peer.open_now)
        assert peer.connections == 3
        await connections.open({})
        assert peer.connections == 4

    run(peer, work)


def test_a_server_that_allows_no_session_is_asked_once() -> None:
    peer = Peer(0)

    async def work(connections: Http2StreamConnections) -> None:
        with pytest.raises(Unreachable, match="allows no session"):
            await connections.open({})
        assert (connections.count, peer.connections) == (0, 1)

    run(peer, work)


@contextlib.contextmanager
def packets_dropped(port: int = 0) -> Iterator[int]:
    """Port whose queue of connections is full, so that the kernel drops further SYNs, as a host that is away does."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        full.bind(("127.0.0.1", port))
        full.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_sessions_to_a_host_that_drops_packets_fail_together_after_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behind another, each would wait for all before it."""
    monkeypatch.setattr(http2_connection, "CONNECT_S", 0.5)
    attempts: list[int] = []
    connect = asyncio.open_connection

    async def count(host: str, port: int, **options: Any) -> Any:
        attempts.append(port)
        return await connect(host, port, **options)

    monkeypatch.setattr(asyncio, "open_connection", count)

    async def main(port: int) -> None:
        connections = Http2StreamConnections(f"http://127.0.0.1:{port}")
        failures = await asyncio.gather(*(connections.open({}) for _ in range(50)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [Unreachable] * 50
        assert {failure.came for failure in failures if isinstance(failure, Unreachable)} == {
            f"no server answers at http://127.0.0.1:{port}: nothing came within 0.5 s"
        }
        # servers of other tests, in threads of this process, may connect elsewhere meanwhile
        assert attempts.count(port) == 1
        await connections.close()

    with packets_dropped() as port:
        asyncio.run(asyncio.wait_for(main(port), 60))


def test_an_attempt_that_gets_no_answer_holds_up_no_session_for_which_there_is_room() -> None:
    peer = Peer(2)

    async def main() -> None:
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Http2StreamConnections(f"http://127.0.0.1:{port}")
        first, _ = [await connections.open({}) for _ in range(2)]
        server.close()  # the connection stays
        with packets_dropped(port):
            third = asyncio.create_task(connections.open({}))
            await until(lambda: connections._connecting is not None)
            await finish(first)
            await until(lambda: connections._lines[0].has_room)
            fourth = await connections.open({})
            assert fourth.session.session_id == "s"
            assert not third.done()
            await connections.close()
            with pytest.raises(Unreachable):
                await third

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_refused_connection_is_told_to_all_and_the_next_session_tries_again() -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        connections = Http2StreamConnections(f"http://127.0.0.1:{port}")
        failures = await asyncio.gather(*(connections.open({}) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(failure, Unreachable) and "no server answers" in failure.came for failure in failures)
        async with await asyncio.start_server(Peer(9).serve, "127.0.0.1", port):
            await connections.open({})
            await connections.close()

    asyncio.run(asyncio.wait_for(main(), 60))
