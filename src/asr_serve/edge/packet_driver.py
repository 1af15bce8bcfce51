"""Packet drivers: datagrams in batches. What receives packets is behind this contract.

`RecvmmsgDriver` runs everywhere; `XdpDriver` (edge/xdp) takes packets past the kernel's stack.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Protocol

from asr_serve import kernels
from asr_serve.errors import OptionError
from asr_serve.kernels.packets_reference import Datagram, source_key

RECEIVE_BUFFER_BYTES = 8 << 20
"""Kernel memory for packets that wait: a second of 512 callers, and more."""
BATCH = 512
GATHER_MS = 2.0
"""Time for which a receiver that was woken waits for more, as network cards moderate interrupts: at 64 callers a packet
comes each 0.3 ms, and a wake-up costs more than a packet."""
SLOT_BYTES = 2_048
"""Longest datagram: RTP stays below the networks' 1500 bytes."""


class PacketDriver(Protocol):
    """Driver of one UDP port. It drops, as early as it can, what no flow expects or what comes too fast.

    A datagram belongs to the flow of its SSRC if the flow expects this source or any; else to the flow of its source;
    else to that of its address (a source with port 0). A source from which a second flow was latched has no flow of its
    own any more: there each flow has its SSRCs alone. Nor does a flow that was admitted by SSRC get those of flows that
    have ended (the last 4,096 are remembered). One thread calls `receive`; any thread makes the other calls,
    but for `close`, after which nothing is received.
    """

    name: str
    port: int
    details: str
    """Description of how it receives, for its user."""

    def admit_ssrc(self, flow: int, ssrc: int, source: bytes, per_s: float, burst: float) -> None:
        """Expects an SSRC, of one source or, for no bytes, of any: `per_s` packets, after a burst."""

    def admit_source(self, flow: int, source: bytes, per_s: float, burst: float) -> None:
        """Expects a source; one of port 0 is any port of its address."""

    def admit_rtcp(self, flow: int, per_s: float, burst: float, source_per_s: float, source_burst: float) -> None:
        """Expects RTCP, from anywhere, as that of this flow: `per_s` packets in all, and `source_per_s` of an address,
        each after a burst. While there is no such flow, RTCP is as any other datagram."""

    def latch(self, flow: int, source: bytes, ssrc: int) -> None:
        """Expects the flow from this source only, with this SSRC too, in place of the last one that was latched."""

    def forget(self, flow: int) -> None:
        """Expects the flow no more."""

    def over_rate(self, flow: int) -> int:
        """Datagrams of a flow that came faster than it may send, since it was admitted; 0 for one that is forgotten."""

    def receive(self, timeout_ms: int) -> list[Datagram]:
        """Datagrams that are there, or come within this time, those that no flow expects left out. Each is its flow,
        its source (16 bytes of IPv6 or mapped IPv4 address, 2 of port), its payload, and its time of arrival in
        seconds of the monotonic clock."""

    def send(self, destination: bytes, payload: bytes) -> bool:
        """Sends a datagram from the port, without waiting; returns whether it went. Called by any thread."""

    def counts(self) -> dict[str, int]:
        """Datagrams received, and dropped by reason: unknown_source over_rate truncated not_rtp
        checksum kernel."""

    def close(self) -> None:
        """Closes the port."""


class SocketDriver:
    """Base of drivers that own a UDP socket, from which they send, and a receiver, which has the flows."""

    def __init__(self, bound: socket.socket, receiver: Any) -> None:
        """`receiver`: a PacketReceiver that reads the socket, and perhaps others."""
        self._socket, self._receiver = bound, receiver
        self.port: int = bound.getsockname()[1]
        self.admit_ssrc, self.admit_source = receiver.admit_ssrc, receiver.admit_source
        self.admit_rtcp = receiver.admit_rtcp
        self.latch, self.forget, self.over_rate = receiver.latch, receiver.forget, receiver.over_rate
        self.receive, self.counts = receiver.receive, receiver.counts

    def send(self, destination: bytes, payload: bytes) -> bool:
        return send_from(self._socket, destination, payload)

    def close(self) -> None:
        self._receiver.close()
        self._socket.close()


class RecvmmsgDriver(SocketDriver):
    """Driver of an ordinary UDP socket. Raises OptionError for an address that cannot be listened on."""

    name = "recvmmsg"
    details = "the kernel's UDP socket, recvmmsg"

    def __init__(self, host: str, port: int, *, gather_ms: float = GATHER_MS) -> None:
        module = kernels.packets()
        bound = bind_udp(host, port)
        receiver = module.PacketReceiver([bound.fileno()], **receiver_settings(gather_ms))
        super().__init__(bound, receiver)


def receiver_settings(gather_ms: float) -> dict[str, int]:
    """Settings of a PacketReceiver that all drivers share."""
    return {"batch": BATCH, "slot_bytes": SLOT_BYTES, "gather_us": round(gather_ms * 1_000)}


def bind_udp(host: str, port: int) -> socket.socket:
    """Non-blocking UDP socket on a port, 0 for any, with a large receive buffer. Raises OptionError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if hasattr(socket, "SO_RCVBUFFORCE"):
            with contextlib.suppress(OSError):  # beyond the system's limit, where we may
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        made.bind(address)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise _unusable(host, port, error) from error
    return made


def _unusable(host: str, port: int, error: OSError) -> OptionError:
    return OptionError(
        f"UDP {host}:{port} cannot be listened on: {error.strerror or error}",
        "an address of this machine and a free port",
        "choose another with --port, or 0 for any",
        param="port",
    )


def send_from(own: socket.socket, destination: bytes, payload: bytes) -> bool:
    """Sends a datagram to a source's key, without waiting; returns whether it went."""
    address = ipaddress.IPv6Address(destination[:16])
    host = str(address.ipv4_mapped or address) if own.family == socket.AF_INET else str(address)
    try:
        own.sendto(payload, socket.MSG_DONTWAIT, (host, int.from_bytes(destination[16:], "big")))
    except OSError:  # a full buffer, or nobody there: the next packet is 20 ms away
        return False
    return True


def parse_source(text: str) -> bytes:
    """Parses `10.0.0.1:5004`, `[::1]:5004`, or an address alone, which is any of its ports. Raises OptionError."""
    address, _, port = text.rpartition(":") if "]:" in text or text.count(":") == 1 else (text, "", "0")
    try:
        ip = ipaddress.ip_address(address.strip("[]"))
        number = int(port)
        if not (port.isascii() and port.isdigit() and number < 1 << 16):
            raise ValueError
    except ValueError:
        raise OptionError(
            f"source={text[:80]!r}", "an IP address, or one with a port", "like 10.0.0.1:5004", param="source"
        ) from None
    return source_key(str(ip), number)


def describe_source(key: bytes) -> str:
    """Formats a source's key as `address:port`."""
    address = ipaddress.IPv6Address(key[:16])
    port = int.from_bytes(key[16:], "big")
    return f"{address.ipv4_mapped}:{port}" if address.ipv4_mapped else f"[{address}]:{port}"


__all__ = [
    "BATCH",
    "Datagram",
    "PacketDriver",
    "RecvmmsgDriver",
    "SocketDriver",
    "bind_udp",
    "describe_source",
    "parse_source",
]
