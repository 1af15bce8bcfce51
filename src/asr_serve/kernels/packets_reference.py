"""Datagrams with one system call each: the reference of the native module `_packets`, and its fallback where that was
not built or the system has no recvmmsg."""

from __future__ import annotations

import hashlib
import secrets
import select
import socket
import threading
import time
from typing import Any

HEADER_BYTES, KEY_BYTES = 12, 18
MAX_BATCH, MAX_GATHER_US = 4_096, 100_000
RTCP_SOURCES = 4_096
"""Number of token buckets for RTCP: each address is hashed to one of them."""
MAX_ENDED = 4_096
"""Maximum remembered SSRCs of flows that have ended."""

Datagram = tuple[int, bytes, bytes, float]
"""Flow, source, payload, time of arrival by the monotonic clock."""


class _Bucket:
    """Token bucket."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst, self._tokens = per_s, burst, burst
        self._last_s = time.monotonic()

    def take(self, now_s: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now_s - self._last_s) * self._per_s)
        self._last_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _Flow:
    """Expected flow: its source, where that is known, and its rate."""

    def __init__(self, source: bytes, per_s: float, burst: float) -> None:
        self.source, self.bucket = source, _Bucket(per_s, burst)
        self.over_rate = 0
        self.learned: int | None = None
        """SSRC that is in the table because the sender uses it."""


class _Source:
    """Source of packets, and the flow that owns those with an unexpected SSRC. None owns them once two flows have come
    from this source: they may be a third caller's, or those of a flow that has ended."""

    def __init__(self, flow: int | None = None) -> None:
        self.flow = flow
        self.admitted = self.shared = False
        """Whether the flow was admitted by this source, so that any SSRC is its own; whether several flows came."""
        self.latched: set[int] = set()
        """Flows whose packets have come from this source."""


class PacketReceiver:
    """Receiver of datagrams for expected flows. Others are dropped and counted."""

    def __init__(self, fds: list[int], *, batch: int = 64, slot_bytes: int = 2_048, gather_us: int = 0) -> None:
        if not (fds and 0 < batch <= MAX_BATCH and 64 <= slot_bytes <= 65_536 and 0 <= gather_us <= MAX_GATHER_US):
            raise ValueError("sockets, 1 to 4096 packets of 64 to 65536 bytes, gathered for up to 0.1 s")
        self._sockets = [socket.socket(fileno=socket.dup(fd)) for fd in fds]
        self._batch, self._slot_bytes, self._gather_s = batch, slot_bytes, gather_us / 1e6
        self._closed = self._received = False
        """Whether it is closed; whether the last call of `receive` found packets."""
        self._lock = threading.Lock()
        """Held while a datagram is sorted; flows come and go in other threads."""
        self._flows: dict[int, _Flow] = {}
        self._by_ssrc: dict[int, int] = {}
        self._by_source: dict[bytes, _Source] = {}
        self._ended: set[int] = set()
        self._rtcp_flow: int | None = None
        self._rtcp_rate = 0.0, 0.0
        """Packets per second of an address, and its burst."""
        self._rtcp_sources: dict[int, _Bucket] = {}
        """Buckets of RTCP, by a keyed hash of the address: no sender can choose to share another's."""
        self._hash_key = secrets.token_bytes(16)
        names = ("received", "unknown_source", "over_rate", "truncated", "not_rtp", "checksum", "kernel")
        self._counts = dict.fromkeys(names, 0)

    def admit_ssrc(self, flow: int, ssrc: int, source: bytes, per_s: float, burst: float) -> None:
        """Admits a flow by its SSRC, from one source or, if `source` is empty, from any."""
        if len(source) not in (0, KEY_BYTES):
            raise ValueError("a source is 16 bytes of address and 2 of port")
        with self._lock:
            self._flows[flow] = _Flow(source, per_s, burst)
            self._by_ssrc[ssrc] = flow
            self._ended.discard(ssrc)

    def admit_source(self, flow: int, source: bytes, per_s: float, burst: float) -> None:
        """Admits a flow by its source; port 0 stands for any port of the address."""
        if len(source) != KEY_BYTES:
            raise ValueError("a source is 16 bytes of address and 2 of port")
        with self._lock:
            self._flows[flow] = _Flow(b"", per_s, burst)
            named = self._by_source.setdefault(source, _Source())
            named.flow, named.admitted = flow, True

    def admit_rtcp(self, flow: int, per_s: float, burst: float, source_per_s: float, source_burst: float) -> None:
        """Admits RTCP from any source, with a rate for all together and one for each address."""
        with self._lock:
            self._flows[flow] = _Flow(b"", per_s, burst)
            self._rtcp_flow, self._rtcp_rate = flow, (source_per_s, source_burst)
            self._rtcp_sources.clear()

    def latch(self, flow: int, source: bytes, ssrc: int) -> None:
        """Latches a flow to this source, and admits this SSRC for it."""
        with self._lock:
            latched = self._flows.get(flow)
            if latched is None:
                return
            if latched.learned not in (None, ssrc):  # one for each flow, however often a sender changes it
                if self._by_ssrc.get(latched.learned) == flow:
                    del self._by_ssrc[latched.learned]
                latched.learned = None
            if ssrc not in self._by_ssrc:
                self._by_ssrc[ssrc], latched.learned = flow, ssrc
            if latched.source not in (b"", source):
                self._leave(latched.source, flow)
            latched.source = source
            here = self._by_source.setdefault(source, _Source(flow))
            here.shared = here.shared or bool(here.latched - {flow})
            here.latched.add(flow)

    def forget(self, flow: int) -> None:
        """Ends a flow: its packets are dropped from now on."""
        with self._lock:
            self._flows.pop(flow, None)
            if self._rtcp_flow == flow:
                self._rtcp_flow = None
                self._rtcp_sources.clear()
            for ssrc in [key for key, each in self._by_ssrc.items() if each == flow]:
                del self._by_ssrc[ssrc]
                if len(self._ended) >= MAX_ENDED:
                    self._ended.clear()
                self._ended.add(ssrc)
            for source in list(self._by_source):
                self._leave(source, flow)

    def over_rate(self, flow: int) -> int:
        """Number of datagrams of a flow that were dropped for its rate; 0 for an unknown flow."""
        with self._lock:
            known = self._flows.get(flow)
            return 0 if known is None else known.over_rate

    def receive(self, timeout_ms: int) -> list[Datagram]:
        """Returns copies of the datagrams that are there, or come within this time."""
        if self._closed:
            raise RuntimeError("the receiver is closed")
        if (
            self._received and self._gather_s
        ):  # while packets come, one sleep for each batch, not a wake-up for each packet
            time.sleep(self._gather_s)
        ready, _, _ = select.select(self._sockets, [], [], timeout_ms / 1_000)
        self._received = bool(ready)
        datagrams: list[Datagram] = []
        taken = 0
        for each in ready:
            while taken < self._batch:
                try:
                    data, _, flags, address = each.recvmsg(self._slot_bytes, 0, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError, ConnectionRefusedError):
                    break
                taken += 1
                with self._lock:
                    datagram = self._take(data, flags, address)
                if datagram is not None:
                    datagrams.append(datagram)
        return datagrams

    def counts(self) -> dict[str, int]:
        """Datagrams received, and dropped by reason."""
        return dict(self._counts)

    def close(self) -> None:
        """Stops receiving. The sockets themselves stay open: they belong to the caller."""
        self._closed = True
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
        is_rtcp = 64 <= data[1] & 0x7F < 96
        if is_rtcp and self._rtcp_flow is not None:
            number: int | None = self._rtcp_flow
        else:
            number = self._find(int.from_bytes(data[8:12], "big"), source)
        if number is None:
            self._count("unknown_source")
            return None
        flow = self._flows[number]
        # The address first: packets dropped for its rate must not use up the rate of all.
        of_address = self._rtcp_bucket(source) if number == self._rtcp_flow else None
        if (of_address is not None and not of_address.take(now_s)) or not flow.bucket.take(now_s):
            self._count("over_rate")
            flow.over_rate += 1
            return None
        return number, source, data, now_s

    def _find(self, ssrc: int, source: bytes) -> int | None:
        """Returns the flow of an SSRC, if this source may send it; else that of the source, or of its address."""
        number = self._by_ssrc.get(ssrc)
        if number is not None and self._flows[number].source in (b"", source):
            return number
        known = self._by_source.get(source, self._by_source.get(source[:16] + b"\0\0"))
        if known is None or known.flow is None or known.shared or (not known.admitted and ssrc in self._ended):
            return None
        return known.flow if self._flows[known.flow].source in (b"", source) else None

    def _rtcp_bucket(self, source: bytes) -> _Bucket:
        hashed = hashlib.blake2b(source[:16], key=self._hash_key, digest_size=8).digest()
        index = int.from_bytes(hashed) % RTCP_SOURCES
        return self._rtcp_sources.setdefault(index, _Bucket(*self._rtcp_rate))

    def _leave(self, source: bytes, flow: int) -> None:
        """Removes a flow from a source, and the source once no flow is left."""
        known = self._by_source.get(source)
        if known is None:
            return
        known.latched.discard(flow)
        if known.flow == flow:
            known.flow, known.admitted = None, False
        if known.flow is None and not known.latched:
            del self._by_source[source]

    def _count(self, reason: str) -> None:
        self._counts[reason] += 1


class RtpParser:
    """Parser of RTP headers. Source: RFC 3550, section 5.1 and appendix A; RFC 5761, section 4."""

    def __init__(self, record: Any, not_rtp: Any, malformed: Any, rtcp: Any) -> None:
        """`record`: class of the results, a subclass of tuple. The other three are returned for datagrams that are too
        short or of another version, whose lengths exceed the datagram, and that are RTCP on the same port."""
        self._record, self._not_rtp, self._malformed, self._rtcp = record, not_rtp, malformed, rtcp

    def __call__(self, datagram: memoryview | bytes) -> Any:
        """Returns a record of payload type, marker, sequence number, timestamp, SSRC and payload, or one of the
        reasons. Never raises."""
        length = len(datagram)
        if length < HEADER_BYTES or datagram[0] >> 6 != 2:
            return self._not_rtp
        first, second = datagram[0], datagram[1]
        if 64 <= second & 0x7F < 96:
            return self._rtcp
        start = HEADER_BYTES + 4 * (first & 0x0F)
        if first & 0x10:
            if start + 4 > length:
                return self._malformed
            start += 4 + 4 * (datagram[start + 2] << 8 | datagram[start + 3])
        end = length
        if first & 0x20:
            padding = datagram[length - 1]
            if not padding:
                return self._malformed
            end -= padding
        if start > end:
            return self._malformed
        return self._record(
            second & 0x7F,
            second >= 0x80,
            datagram[2] << 8 | datagram[3],
            int.from_bytes(datagram[4:8], "big"),
            int.from_bytes(datagram[8:12], "big"),
            bytes(datagram[start:end]),
        )


def source_key(address: str, port: int) -> bytes:
    """Key of a source: an IPv6 address, or an IPv4 address mapped into one, and the port."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    else:
        packed = bytes(10) + b"\xff\xff" + socket.inet_pton(socket.AF_INET, address)
    return packed + port.to_bytes(2, "big")
