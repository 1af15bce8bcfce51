"""SIP endpoint: the UDP port, the TCP connections and the timer of a user agent, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from asr_serve.edge.sip.message import MAX_MESSAGE_BYTES, MalformedSip, SipFrameSplitter
from asr_serve.edge.sip.transactions import SipPeer
from asr_serve.edge.sip.user_agent import UserAgent
from asr_serve.errors import OptionError
from asr_serve.types import is_address

MAX_CONNECTIONS = 256
"""Connections of others, and, besides them, as many of ours."""
MAX_CONNECTIONS_PER_HOST = 64
"""Connections of one host that the settings do not trust."""
MAX_WAITING = 32
"""Messages that wait for a connection, or for the address of a name."""
PORT_ATTEMPTS = 8
"""Ports that are tried where any will do: one that is free for UDP may be taken for TCP."""
CONNECT_S = 5.0
FIRST_MESSAGE_S = 10.0
"""Time for the first whole message of a connection that somebody opened."""
IDLE_S = 900.0
"""Time after which a connection without a message is closed."""

log = logging.getLogger(__name__)


class SipEndpoint:
    """Endpoint of one address. `start` it; call `pump` after every call of the agent's methods."""

    def __init__(self, host: str, port: int, *, tcp: bool, on_events: Callable[[], None]) -> None:
        """`on_events`: called when the agent may have events."""
        self._host, self._asked_port, self._takes_tcp, self._on_events = host, port, tcp, on_events
        self.agent: UserAgent | None = None
        self.port = 0
        self._udp: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[SipPeer, asyncio.Transport] = {}
        self._incoming: Counter[str] = Counter()
        """Connections of others, by host."""
        self._waiting: dict[SipPeer, list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._is_pumping = False

    async def start(self) -> None:
        """Opens the port: where any will do, another one if TCP's is taken. Raises OptionError."""
        for attempts_left in reversed(range(1 if self._asked_port else PORT_ATTEMPTS)):
            try:
                await self._listen()
                return
            except OSError as error:
                if self._udp is not None:
                    self._udp.close()
                    self._udp = None
                if attempts_left and error.errno == errno.EADDRINUSE:
                    continue
                raise OptionError(
                    f"SIP cannot listen on {self._host}:{self._asked_port}: {error.strerror or error}",
                    "an address of this machine and a free port",
                    "choose another with --sip HOST:PORT, or port 0 for any",
                    param="sip",
                ) from error

    async def _listen(self) -> None:
        self._udp, _ = await self._loop.create_datagram_endpoint(
            lambda: _Datagrams(self), local_addr=(self._host, self._asked_port)
        )
        self.port = self._udp.get_extra_info("sockname")[1]
        if self._takes_tcp:
            hosts = ["0.0.0.0", "::"] if self._host == "::" else self._host
            self._server = await self._loop.create_server(lambda: _Connection(self, None), hosts, self.port)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for transport in list(self._connections.values()):
            transport.close()
        if self._udp is not None:
            self._udp.close()
        await asyncio.sleep(0)

    def receive(self, data: bytes, peer: SipPeer) -> None:
        if self.agent is not None:
            self.agent.receive(data, peer, self._loop.time())
            self.pump()

    def pump(self) -> None:
        """Sends what the agent has to send, tells of its events, and sets the timer."""
        if self.agent is None or self._is_pumping:
            return
        self._is_pumping = True
        try:
            while True:
                self._on_events()
                output = self.agent.take_output()
                if not output:
                    break
                for peer, data in output:
                    self._send(peer, data)
        finally:
            self._is_pumping = False
            self._set_timer()

    def _set_timer(self) -> None:
        assert self.agent is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_s := self.agent.due_s) is not None:
            self._timer = self._loop.call_at(max(due_s, self._loop.time()), self._advance)

    def _advance(self) -> None:
        assert self.agent is not None
        self._timer = None
        try:
            self.agent.advance(self._loop.time())
        finally:
            self.pump()

    # --- sending ---------------------------------------------------------------------------------------

    def _send(self, peer: SipPeer, data: bytes) -> None:
        waiting = self._waiting.get(peer)
        if waiting is not None:
            if len(waiting) < MAX_WAITING:
                waiting.append(data)
        elif peer in self._connections:
            self._connections[peer].write(data)
        elif peer.transport == "udp" and is_address(peer.host):
            self._send_datagram(peer, data)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[peer] = [data]
            task = self._loop.create_task(self._reach(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _send_datagram(self, peer: SipPeer, data: bytes) -> None:
        if self._udp is not None and not self._udp.is_closing():
            mapped = self._udp.get_extra_info("socket").family == socket.AF_INET6 and ":" not in peer.host
            with contextlib.suppress(OSError, ValueError):  # an address that cannot be reached: as if it were lost
                self._udp.sendto(data, (f"::ffff:{peer.host}" if mapped else peer.host, peer.port))

    async def _reach(self, peer: SipPeer) -> None:
        """Resolves a name, opens a connection, and sends what waits. Where that fails it is lost, and the transaction
        times out."""
        found = peer
        try:
            async with asyncio.timeout(CONNECT_S):
                if not is_address(peer.host):
                    kind = socket.SOCK_DGRAM if peer.transport == "udp" else socket.SOCK_STREAM
                    places = await self._loop.getaddrinfo(peer.host, peer.port, type=kind)
                    found = peer._replace(host=str(places[0][4][0]))
                if found.is_reliable and found not in self._connections:
                    if len(self._connections) - self._incoming.total() >= MAX_CONNECTIONS:
                        raise OSError("too many connections")
                    await self._loop.create_connection(lambda: _Connection(self, found), found.host, found.port)
        except (OSError, TimeoutError) as error:
            log.warning("SIP to %s:%d by %s failed: %s", peer.host, peer.port, peer.transport, error)
            del self._waiting[peer]
            return
        for data in self._waiting.pop(peer):
            if found.is_reliable and found in self._connections:
                self._connections[found].write(data)
            elif not found.is_reliable:
                self._send_datagram(found, data)

    # --- connections -----------------------------------------------------------------------------------

    def connected(self, peer: SipPeer, transport: asyncio.Transport, *, is_ours: bool) -> bool:
        """Notes a connection; False where there is no room for it, or where its host may not call."""
        if not is_ours:
            if self.agent is None or not self.agent.allows_connection(peer.host):
                return False
            if not self.agent.is_trusted(peer.host) and self._incoming[peer.host] >= MAX_CONNECTIONS_PER_HOST:
                return False
            if self._incoming.total() >= MAX_CONNECTIONS:
                return False
            self._incoming[peer.host] += 1
        self._connections[peer] = transport
        return True

    def disconnected(self, peer: SipPeer, transport: asyncio.Transport, *, is_ours: bool) -> None:
        if self._connections.get(peer) is transport:
            del self._connections[peer]
            if not is_ours:
                self._incoming[peer.host] -= 1
                if not self._incoming[peer.host]:
                    del self._incoming[peer.host]
            if self.agent is not None:
                self.agent.forget_connection(peer)

    def count_malformed(self) -> None:
        if self.agent is not None:
            self.agent.counts["malformed"] += 1


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, endpoint: SipEndpoint) -> None:
        self._endpoint = endpoint

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        self._endpoint.receive(data, SipPeer("udp", _plain(addr[0]), addr[1]))

    def error_received(self, exc: Exception) -> None:
        """Does nothing where nobody listens: the transaction sends again, and times out."""


class _Connection(asyncio.Protocol):
    def __init__(self, endpoint: SipEndpoint, peer: SipPeer | None) -> None:
        self._endpoint, self._peer = endpoint, peer
        self._is_ours = peer is not None
        self._has_spoken = self._is_ours
        """Whether a whole message has come."""
        self._splitter = SipFrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._peer is None:
            host, port = transport.get_extra_info("peername")[:2]
            self._peer = SipPeer("tcp", _plain(host), port)
        transport.set_write_buffer_limits(MAX_MESSAGE_BYTES)
        if not self._endpoint.connected(self._peer, transport, is_ours=self._is_ours):
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        assert self._peer is not None
        if self._transport.get_write_buffer_size() > MAX_MESSAGE_BYTES:  # it asks, and does not read
            self._transport.abort()
            return
        try:
            messages = self._splitter.feed(data)
        except MalformedSip:
            self._endpoint.count_malformed()
            self._transport.abort()
            return
        self._has_spoken = self._has_spoken or bool(messages)
        if self._has_spoken:  # until then its time runs, whatever comes byte by byte
            self._watch()
        for message in messages:
            self._endpoint.receive(message, self._peer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._peer is not None and self._transport is not None:
            self._endpoint.disconnected(self._peer, self._transport, is_ours=self._is_ours)

    def _watch(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        assert self._transport is not None
        self._idle = asyncio.get_running_loop().call_later(
            IDLE_S if self._has_spoken else FIRST_MESSAGE_S, self._transport.close
        )


def _plain(host: str) -> str:
    """Address without the wrapping of IPv4 in IPv6."""
    return host.removeprefix("::ffff:") if "." in host else host
