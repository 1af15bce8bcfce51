"""ICE-lite on one UDP port for all calls. aioice, whose STUN messages these are, is loaded by this file alone.

A lite agent checks nothing: it answers the checks of the other side, which proves with them that it knows the call's
password and receives what is sent to its address (RFC 8445, section 2.5). A STUN request belongs to the call that its
USERNAME names; every other datagram to the call whose peer has been checked at the address that it comes from.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import string
import struct
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

from aioice import stun

from asr_serve.errors import OptionError
from asr_serve.server.realtime.webrtc.offer_answer import Candidate

ICE_CHARACTERS = string.ascii_letters + string.digits
UFRAG_CHARACTERS, PASSWORD_CHARACTERS = 8, 24
MIN_BYTES = 2
"""Shortest datagram that aiortc tells DTLS from RTP by."""
MAX_WAITING_DATAGRAMS = 512
"""Datagrams of one call that wait to be decrypted: ten seconds of audio."""
MAX_ADDRESSES = 8
"""Addresses at which one peer is known: those of its networks."""
RECEIVE_BUFFER_BYTES = 4 << 20
STUN_BAD_REQUEST, STUN_ROLE_CONFLICT = (400, "Bad Request"), (487, "Role Conflict")

Address = tuple[str, int]


class DatagramDrop(StrEnum):
    """Reason for which a datagram was dropped, as metrics count it."""

    UNKNOWN_SOURCE = "unknown_source"
    """An address at which no call's peer was checked."""
    UNKNOWN_CALL = "unknown_call"
    """A check for a call that does not exist, or not any more."""
    BAD_CHECK = "bad_check"
    """A check without the call's password, no STUN that can be read, or less than any protocol's header."""
    FULL = "full"
    """A call of which too many wait."""


class UdpPort(asyncio.DatagramProtocol):
    """Socket of all calls. Belongs to the event loop's thread."""

    def __init__(self, count_drop: Callable[[DatagramDrop], None]) -> None:
        self._count_drop = count_drop
        self._transport: asyncio.DatagramTransport | None = None
        self._by_ufrag: dict[str, IceLiteTransport] = {}
        self._by_address: dict[Address, IceLiteTransport] = {}
        self.port = 0

    @classmethod
    async def open(cls, host: str, port: int, count_drop: Callable[[DatagramDrop], None]) -> UdpPort:
        """Binds the port; 0 takes any free one. Raises OptionError."""
        loop = asyncio.get_running_loop()
        try:
            transport, made = await loop.create_datagram_endpoint(lambda: cls(count_drop), (host, port))
        except OSError as error:
            raise OptionError(
                f"UDP port {port} of {host} cannot be opened: {error}",
                "a free one",
                "set webrtc.udp_port to another",
                param="webrtc.udp_port",
            ) from None
        made._transport = transport
        # uvloop and asyncio both have the socket; the kernel gives less where its limit is lower
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        made.port = transport.get_extra_info("sockname")[1]
        return made

    @property
    def calls(self) -> int:
        """Calls that are registered."""
        return len(self._by_ufrag)

    @property
    def addresses(self) -> int:
        """Addresses of peers that are known."""
        return len(self._by_address)

    def register(self) -> IceLiteTransport:
        """Makes the transport of a call, which is to be closed."""
        made = IceLiteTransport(self)
        self._by_ufrag[made.ufrag] = made
        return made

    def close(self) -> None:
        for transport in list(self._by_ufrag.values()):
            transport.close()
        if self._transport is not None:
            self._transport.close()

    # --- datagrams -------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        source: Address = (addr[0], addr[1])
        if len(data) >= 20 and data[0] < 4:  # the first two bits of STUN are 0 (RFC 7983)
            self._check_received(data, source)
        elif len(data) < MIN_BYTES:
            self._count_drop(DatagramDrop.BAD_CHECK)
        elif (owner := self._by_address.get(source)) is None:
            self._count_drop(DatagramDrop.UNKNOWN_SOURCE)
        elif not owner.put(data):
            self._count_drop(DatagramDrop.FULL)

    def _check_received(self, data: bytes, source: Address) -> None:
        try:
            message = stun.parse_message(data)
            username = message.attributes.get("USERNAME", "")
        except (ValueError, IndexError, struct.error):
            self._count_drop(DatagramDrop.BAD_CHECK)
            return
        if message.message_method != stun.Method.BINDING or message.message_class != stun.Class.REQUEST:
            return  # this side asks nothing, so nothing is an answer
        owner = self._by_ufrag.get(username.partition(":")[0])
        if owner is None:
            self._count_drop(DatagramDrop.UNKNOWN_CALL)
        elif not owner.check_received(message, source):
            self._count_drop(DatagramDrop.BAD_CHECK)

    def send(self, data: bytes, address: Address) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data, address)

    def claim(self, address: Address, owner: IceLiteTransport) -> None:
        """Gives the address to a call: its peer has been checked there."""
        before = self._by_address.get(address)
        if before is not None and before is not owner:
            before.forget(address)
        self._by_address[address] = owner

    def release(self, address: Address, owner: IceLiteTransport) -> None:
        if self._by_address.get(address) is owner:
            del self._by_address[address]

    def unregister(self, owner: IceLiteTransport) -> None:
        self._by_ufrag.pop(owner.ufrag, None)


class IceLiteTransport:
    """Transport of one call: what aiortc's RTCDtlsTransport needs of an RTCIceTransport, and no more.

    In      `check_received`, `put`: datagrams of this call
    Out     `recv`, `send`: datagrams of DTLS, SRTP
    """

    role = "controlled"
    """A lite agent never is the controlling one (RFC 8445, section 6.1.1)."""

    def __init__(self, port: UdpPort) -> None:
        self._port = port
        self.ufrag = "".join(secrets.choice(ICE_CHARACTERS) for _ in range(UFRAG_CHARACTERS))
        self.password = "".join(secrets.choice(ICE_CHARACTERS) for _ in range(PASSWORD_CHARACTERS))
        self.remote_ufrag: str | None = None
        """The other side's, which its checks name; None: not known yet."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._addresses: dict[Address, None] = {}
        """Addresses of the peer, the one that was checked last at the end."""
        self._selected: Address | None = None
        self.last_check_s: float | None = None
        """Time of the last check, on the event loop's clock."""
        self.closed = False
        self._recv, self._send = self.recv, self.send  # names that aiortc asks for

    @property
    def state(self) -> str:
        """State as of an RTCIceTransport."""
        return "closed" if self.closed else "new" if self._selected is None else "completed"

    @property
    def selected(self) -> Address | None:
        """Address that the peer has nominated."""
        return self._selected

    def check_received(self, message: stun.Message, source: Address) -> bool:
        """Answers a check; False for one that is not of this call's peer, which gets no answer."""
        if self.closed or not self._is_genuine(message):
            return False
        if "ICE-CONTROLLED" in message.attributes:
            self._answer_error(message, source, STUN_ROLE_CONFLICT)
            return True
        self.last_check_s = self._loop.time()
        self._addresses.pop(source, None)
        self._addresses[source] = None
        self._port.claim(source, self)
        self._changed.set()
        if "USE-CANDIDATE" in message.attributes:
            self._selected = source
        while len(self._addresses) > MAX_ADDRESSES:
            oldest = next(each for each in self._addresses if each != self._selected)
            del self._addresses[oldest]
            self._port.release(oldest, self)
        answer = stun.Message(stun.Method.BINDING, stun.Class.RESPONSE, message.transaction_id)
        answer.attributes["XOR-MAPPED-ADDRESS"] = _unmapped(source)
        answer.add_message_integrity(self.password.encode())
        self._port.send(bytes(answer), source)
        return True

    def _is_genuine(self, message: stun.Message) -> bool:
        local, _, remote = cast(str, message.attributes.get("USERNAME", "")).partition(":")
        return (
            local == self.ufrag
            and self.remote_ufrag in (None, remote)
            and message.check_message_integrity(self.password.encode())
        )

    def _answer_error(self, message: stun.Message, source: Address, code: tuple[int, str]) -> None:
        answer = stun.Message(stun.Method.BINDING, stun.Class.ERROR, message.transaction_id)
        answer.attributes["ERROR-CODE"] = code
        answer.add_message_integrity(self.password.encode())
        self._port.send(bytes(answer), source)

    def forget(self, address: Address) -> None:
        """Gives up an address, at which another call's peer has been checked since."""
        self._addresses.pop(address, None)
        if self._selected == address:
            self._selected = None

    def put(self, data: bytes) -> bool:
        """Takes a datagram; False: too many wait."""
        if len(self._waiting) >= MAX_WAITING_DATAGRAMS:
            return False
        self._waiting.append(data)
        self._changed.set()
        return True

    async def recv(self) -> bytes:
        """Returns the next datagram. Raises ConnectionError once closed."""
        while not self._waiting:
            if self.closed:
                raise ConnectionError("the call is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    async def wait_reachable(self) -> None:
        """Waits until the peer has been checked at an address. Raises ConnectionError once closed."""
        while not self._addresses:
            if self.closed:
                raise ConnectionError("the call is closed")
            self._changed.clear()
            await self._changed.wait()

    async def send(self, data: bytes) -> None:
        """Sends to the nominated address, or, before there is one, to the one checked last. Raises ConnectionError."""
        address = self._selected or next(reversed(self._addresses), None)
        if self.closed or address is None:
            raise ConnectionError("the call is closed" if self.closed else "the peer has no address yet")
        self._port.send(data, address)

    def close(self) -> None:
        """Releases everything. Idempotent."""
        self.closed = True
        self._waiting.clear()
        for address in self._addresses:
            self._port.release(address, self)
        self._addresses.clear()
        self._port.unregister(self)
        self._changed.set()


def _unmapped(address: Address) -> Address:
    """Address without the prefix that an IPv6 socket gives to IPv4."""
    mapped = getattr(ipaddress.ip_address(address[0].partition("%")[0]), "ipv4_mapped", None)
    return (str(mapped) if mapped is not None else address[0].partition("%")[0], address[1])


def local_candidates(host: str, port: int, announced: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Candidates of a port: the announced addresses, or else those of `host`, which may be all of this machine."""
    if announced:
        return tuple(Candidate(address, port) for address in announced)
    found = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)})
    if any(ipaddress.ip_address(each.partition("%")[0]).is_unspecified for each in found):
        import ifaddr  # of aioice

        every = [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for each in ifaddr.get_adapters() for ip in each.ips]
        usable = [each for each in every if not ipaddress.ip_address(each.partition("%")[0]).is_link_local]
        only4 = all(ipaddress.ip_address(each.partition("%")[0]).version == 4 for each in found)
        usable = [each for each in usable if not only4 or ipaddress.ip_address(each).version == 4]
        # A loopback address only where there is nothing else: others cannot reach it.
        found = [each for each in usable if not ipaddress.ip_address(each).is_loopback] or usable
    return tuple(Candidate(each, port) for each in found)
