"""Datagrams with one system call each: the reference of the native module `_packets`, and what runs where that one
was not built or the system has no recvmmsg."""

from __future__ import annotations

import select
import socket
import time

HEADER_BYTES, KEY_BYTES = 12, 18
MAX_BATCH, MAX_BATCHES = 1_024, 64

Datagram = tuple[int, bytes, memoryview, float]
"""Flow, source, payload, time of arrival by the monotonic clock."""


class PacketLoan:
    """Batch of datagrams, whose payloads are lent until `release`."""

    def __init__(self, receiver: PacketReceiver, datagrams: list[Datagram]) -> None:
        self._receiver: PacketReceiver | None = receiver
        self.datagrams = datagrams

    def release(self) -> None:
        """Gives the slots back: the payloads are overwritten from now on."""
        if self._receiver is not None:
            self._receiver.lent -= 1
            self._receiver, self.datagrams = None, []


class _Flow:
    def __init__(self, source: bytes, per_s: float, burst: float) -> None:
        self.source, self.per_s, self.burst, self.tokens = source, per_s, burst, burst
        self.last_s = time.monotonic()


class PacketReceiver:
    """Receiver of datagrams for expected flows. Others are dropped and counted."""

    def __init__(self, fds: list[int], *, batch: int = 64, batches: int = 4, slot_bytes: int = 2_048) -> None:
        if not (fds and 0 < batch <= MAX_BATCH and 0 < batches <= MAX_BATCHES and 64 <= slot_bytes <= 65_536):
            raise ValueError("sockets, 1 to 1024 packets in 1 to 64 batches, of 64 to 65536 bytes")
        self._sockets = [socket.socket(fileno=socket.dup(fd)) for fd in fds]
        self._batch, self._batches, self._slot_bytes = batch, batches, slot_bytes
        self.lent = 0
        self._flows: dict[int, _Flow] = {}
        self._by_ssrc: dict[int, int] = {}
        self._by_source: dict[bytes, int] = {}
        self._counts = dict.fromkeys(("received", "unknown_source", "over_rate", "truncated", "not_rtp", "kernel"), 0)

    def admit_ssrc(self, flow: int, ssrc: int, source: bytes, per_s: float, burst: float) -> None:
        """Expects an SSRC, of one source or, for no bytes, of any."""
        self._flows[flow] = _Flow(source, per_s, burst)
        self._by_ssrc[ssrc] = flow

    def admit_source(self, flow: int, source: bytes, per_s: float, burst: float) -> None:
        """Expects a source; one of port 0 is any port of its address."""
        if len(source) != KEY_BYTES:
            raise ValueError("a source is 16 bytes of address and 2 of port")
        self._flows[flow] = _Flow(b"", per_s, burst)
        self._by_source[source] = flow

    def latch(self, flow: int, source: bytes) -> None:
        """Expects the flow from this source only."""
        if flow in self._flows:
            self._flows[flow].source = source
            self._by_source.setdefault(source, flow)

    def forget(self, flow: int) -> None:
        """Expects the flow no more."""
        self._flows.pop(flow, None)
        self._by_ssrc = {key: each for key, each in self._by_ssrc.items() if each != flow}
        self._by_source = {key: each for key, each in self._by_source.items() if each != flow}

    def receive(self, timeout_ms: int) -> PacketLoan | None:
        """Datagrams that are there, or come within this time; None for none that are expected."""
        if self.lent == self._batches:
            raise RuntimeError("all batches are lent: release one first")
        ready, _, _ = select.select(self._sockets, [], [], timeout_ms / 1_000)
        datagrams: list[Datagram] = []
        taken = 0
        for each in ready:
            while taken < self._batch:
                try:
                    data, _, flags, address = each.recvmsg(self._slot_bytes, 0, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError, ConnectionRefusedError):
                    break
                taken += 1
                if (datagram := self._take(data, flags, address)) is not None:
                    datagrams.append(datagram)
        if not datagrams:
            return None
        self.lent += 1
        return PacketLoan(self, datagrams)

    def counts(self) -> dict[str, int]:
        """Datagrams received, and dropped by reason."""
        return dict(self._counts)

    def close(self) -> None:
        """Receives no more. The sockets stay their owner's."""
        for each in self._sockets:
            each.close()

    def _take(self, data: bytes, flags: int, address: tuple[str, int]) -> Datagram | None:
        now_s = time.monotonic()
        self._counts["received"] += 1
        if flags & socket.MSG_TRUNC:
            self._count("truncated")
            return None
        if len(data) < HEADER_BYTES or data[0] >> 6 != 2:
            self._count("not_rtp")
            return None
        source = source_key(*address[:2])
        number = self._by_ssrc.get(int.from_bytes(data[8:12], "big"))
        if number is None:
            number = self._by_source.get(source, self._by_source.get(source[:16] + b"\0\0"))
        flow = None if number is None else self._flows[number]
        if flow is None or number is None or flow.source not in (b"", source):
            self._count("unknown_source")
            return None
        flow.tokens = min(flow.burst, flow.tokens + (now_s - flow.last_s) * flow.per_s)
        flow.last_s = now_s
        if flow.tokens < 1:
            self._count("over_rate")
            return None
        flow.tokens -= 1
        return number, source, memoryview(data), now_s

    def _count(self, reason: str) -> None:
        self._counts[reason] += 1


def source_key(address: str, port: int) -> bytes:
    """Key of a source: an IPv6 address, or an IPv4 address mapped into one, and the port."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    else:
        packed = bytes(10) + b"\xff\xff" + socket.inet_pton(socket.AF_INET, address)
    return packed + port.to_bytes(2, "big")
