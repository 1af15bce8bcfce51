"""Interface of transports: memory leased region by region, an offer that lets the other side attach, a sender.

    receiver = create_receiver("shm", 64 << 20, host)   receiving side; `receiver.offer` goes to the other side
    sender = attach_sender(offer)                       sending side
    region = receiver.lease(nbytes)                     credit for that many bytes; it goes to the other side
    checksum = sender.write_region(region, data, 30.0)  the bytes have arrived; the answer holds the checksum
    view = receiver.received(region, nbytes, checksum)  verified, and used
    receiver.release(region)                            the memory may be leased again

Offer, regions and answers travel on the caller's control connection, which also detects a dead peer. A receiver
has one sender. Nothing is sent without a region, so the bytes in flight never exceed the receiver's memory.

**When a region is leased again.** Once it was released and its sender has answered, in any order: a sender that
has not answered may still write, and with some transports this side would not notice. So a cancelled request
releases its region at once, and the memory waits until `received` or `sender_done` is called for it; a sender that
never answers holds its regions until the receiver is closed. After a timeout or a death the whole receiver is
closed and never used again: late writes go to memory that is not read any more, or nowhere.

**Part by part.** A part of a region (`BufferRegion.subregion`) can be written and received by itself, with a
checksum of its own, while the rest is still being computed; `sender_done(region)` marks the last one. That pays
where sending a part takes about as long as computing the next one: over a network, with a large state. Over shared
memory the whole arrives in a few milliseconds; parts are available earlier from some 64 MiB on, and later for
small states (bench/transports.py).
"""

from __future__ import annotations

import secrets
import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from asr_serve.errors import Cancelled, ChecksumMismatch, PeerGone, TransportFailed
from asr_serve.transfer.checksum import checksum as checksum_of
from asr_serve.transfer.transports.allocator import BufferAllocator

TransportKind = Literal["local", "shm", "nixl", "tcp"]

MAX_BUFFER_BYTES = 1 << 36
"""Limit of a receiver's memory; larger offers are refused."""
TOKEN_BYTES = 32
WHERE_BYTES = 1 << 16

Offset = Annotated[int, Meta(ge=0, le=MAX_BUFFER_BYTES)]


class BufferRegion(msgspec.Struct, frozen=True):
    """Region of a receiver's memory, and the credit to write that many bytes there."""

    at: Offset
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BUFFER_BYTES)]

    def subregion(self, at: int, nbytes: int) -> BufferRegion:
        """Returns the part of `nbytes` bytes that begins `at` bytes after this region's start."""
        assert at >= 0
        assert 0 < nbytes <= self.nbytes - at
        return BufferRegion(self.at + at, nbytes)


class ReceiverOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Offer with which a sender attaches. The token permits writing into the receiver's memory: it goes over the
    control connection and into no log."""

    kind: TransportKind
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BUFFER_BYTES)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    where: Annotated[bytes, Meta(max_length=WHERE_BYTES)]
    """Location in the transport's own form: a name in /dev/shm, an address, the metadata of an agent."""


def read_offer(offer: bytes) -> ReceiverOffer:
    """Parses an offer. Raises TransportFailed for an invalid one."""
    try:
        return msgspec.msgpack.decode(offer, type=ReceiverOffer)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise TransportFailed(f"an offer of memory that makes no sense: {str(wrong)[:200]!r}") from None


def expect_address(host: str, only_at: str | None) -> None:
    """Raises TransportFailed for an invalid address, or one other than `only_at`."""
    if only_at is not None and _address(host) != _address(only_at):
        raise TransportFailed(
            f"a landing memory at {host[:100]!r} is offered from {only_at}",
            "the address from which the offer comes, as it is seen here",
            "offer it without address translation between the two",
        )


def _address(host: str) -> IPv4Address | IPv6Address:
    """Parses an address. IPv4 mapped into IPv6 becomes IPv4; the interface (%eth0) is dropped: its name differs
    between machines. Raises TransportFailed."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        raise TransportFailed(f"an address {host[:100]!r} is offered", "an IPv4 or IPv6 address in numbers") from None
    return getattr(address, "ipv4_mapped", None) or address


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


class LeasedRegion:
    """Leased region. Free again when it is both `released` and `sender_done`."""

    __slots__ = ("released", "sender_done", "spot")

    def __init__(self, spot: BufferRegion) -> None:
        self.spot, self.released, self.sender_done = spot, False, False


class Receiver:
    """Receiving side: leases regions of its memory. Any thread may call.

    After `close`, `lease` and `received` raise PeerGone, and other methods do nothing; views that were returned
    stay readable.
    """

    checked = True
    """Whether `received` compares checksums; not needed within one process."""

    def __init__(self, offer: ReceiverOffer, memory: np.ndarray) -> None:
        """Takes the memory: `offer.nbytes` of uint8."""
        assert memory.dtype == np.uint8
        assert memory.nbytes == offer.nbytes
        self.kind: TransportKind = offer.kind
        self.nbytes = offer.nbytes
        self.offer = msgspec.msgpack.encode(offer)
        self._memory = memory
        self._lock = threading.Lock()
        self._allocator = BufferAllocator(memory.nbytes)
        self._leased: dict[int, LeasedRegion] = {}
        self._closed = False

    def lease(self, nbytes: int) -> BufferRegion | None:
        """Leases a region of `nbytes` bytes, 1 or more; None when there is no room now. Raises TransportFailed for more
        than the whole memory, PeerGone."""
        if nbytes > self._allocator.nbytes:
            raise TransportFailed(
                f"{nbytes} bytes for a landing memory of {self._allocator.nbytes}",
                todo="make that larger, or send less",
            )
        with self._lock:
            self._expect_open()
            at = self._allocator.allocate(nbytes)
            if at is None:
                return None
            region = BufferRegion(at, nbytes)
            self._leased[at] = LeasedRegion(region)
            return region

    def received(self, spot: BufferRegion, nbytes: int, checksum: int) -> np.ndarray:
        """Returns the bytes written into the first `nbytes` of a region, or of a part of one: uint8, valid until
        `release`.

        `nbytes` and `checksum` come with the sender's answer. Raises ChecksumMismatch where the memory holds something
        else; TransportFailed where region or size does not match a lease, or it was answered before; Cancelled when the
        region was released already; PeerGone."""
        with self._lock:
            self._expect_open()
            lease = self._leased_region(spot)
            if lease is None or lease.sender_done or not 1 <= nbytes <= spot.nbytes:
                raise TransportFailed(f"an answer about {nbytes} bytes at {spot}, of which no such spot is lent")
            if spot == lease.spot:
                lease.sender_done = True
                self._free_region(lease)
            if lease.released:
                raise Cancelled(f"what was put at {spot} is not wanted any more")
            view = self._view(spot, nbytes)
        if self.checked and checksum_of(view) != checksum:
            raise ChecksumMismatch(
                f"{nbytes} bytes came by {self.kind} with another checksum than they were sent with",
                todo="send them again, by another transport if it goes on",
            )
        return view

    def sender_done(self, spot: BufferRegion) -> None:
        """Marks that the sender is done with this region, whether it wrote or not: it will not write there any
        more.

        Called for a refusal, for an answer to a cancelled request, and after the last of several parts. May be
        called after `received`. Raises TransportFailed for a region that is not leased.
        """
        with self._lock:
            if self._closed:
                return
            lease = self._leased.get(spot.at)
            if lease is None or lease.spot != spot:
                raise TransportFailed(f"an answer about {spot}, which is not lent")
            lease.sender_done = True
            self._free_region(lease)

    def release(self, spot: BufferRegion) -> None:
        """Releases a region that is not read any more. It is leased again once its sender has answered, not before."""
        with self._lock:
            if self._closed:
                return
            lease = self._leased.get(spot.at)
            assert lease is not None, "given back, and not lent"
            assert lease.spot == spot, "a part is not given back by itself"
            assert not lease.released, "given back twice"
            lease.released = True
            self._free_region(lease)

    def close(self) -> None:
        """Closes the receiver; data that arrives later is ignored. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._leased.clear()
        self._close_transport()

    def _close_transport(self) -> None:
        """Closes the transport's resources. Called once."""

    def _view(self, spot: BufferRegion, nbytes: int) -> np.ndarray:
        return self._memory[spot.at : spot.at + nbytes]

    def _leased_region(self, spot: BufferRegion) -> LeasedRegion | None:
        """Returns the lease of this region, or of the region that contains it."""
        lease = self._leased.get(spot.at)
        if lease is None:
            lease = next((candidate for candidate in self._leased.values() if _within(spot, candidate.spot)), None)
        return lease if lease and _within(spot, lease.spot) else None

    def _free_region(self, lent: LeasedRegion) -> None:
        if lent.released and lent.sender_done:
            del self._leased[lent.spot.at]
            self._allocator.free_at(lent.spot.at)

    def _expect_open(self) -> None:
        if self._closed:
            raise PeerGone("this landing memory is closed", todo="open another one")


def _within(part: BufferRegion, whole: BufferRegion) -> bool:
    return whole.at <= part.at and part.nbytes >= 1 and part.at + part.nbytes <= whole.at + whole.nbytes


class TransportSender:
    """Sending side. Any thread may call; waiting for another thread's write counts towards the timeout."""

    def __init__(self, offer: ReceiverOffer) -> None:
        self.kind: TransportKind = offer.kind
        self.nbytes = offer.nbytes
        """Size of the receiver's memory."""

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Writes bytes to the beginning of a region, or of a part of one; returns their checksum once they have
        arrived.

        `data`: uint8, one-dimensional and contiguous; the caller may change it afterwards. Raises TransportFailed for a
        region that is too small or not in the receiver's memory; PeerGone; TransportTimeout. After the last two,
        nothing more can be sent by this sender."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the sender. Idempotent; a concurrent `write_region` of another thread raises PeerGone."""
        raise NotImplementedError

    def _validate(self, spot: BufferRegion, data: np.ndarray) -> None:
        assert data.dtype == np.uint8
        assert data.ndim == 1
        assert data.flags.c_contiguous
        if not 1 <= data.nbytes <= spot.nbytes or not 0 <= spot.at <= self.nbytes - spot.nbytes:
            raise TransportFailed(
                f"{data.nbytes} bytes for {spot} of a landing memory of {self.nbytes} bytes",
                "1 byte or more, in a spot that is large enough and lies in that memory",
            )
