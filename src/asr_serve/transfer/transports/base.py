"""What every road has: memory that is lent spot by spot, an offer that lets the other side in, a side that puts.

    landing = land("shm", 64 << 20, "127.0.0.1")    who will receive; `landing.offer` goes to the other side
    sender = attach(offer)                          who will send
    spot = landing.lend(nbytes)                     the credit for so many bytes; it goes to the other side
    checksum = sender.put(spot, data, 30.0)         they are there; the checksum goes back with the answer
    view = landing.arrived(spot, nbytes, checksum)  looked at, and used
    landing.give(spot)                              the memory may be lent again

Offer, spots and answers travel on a control connection of the caller's, which also tells who is gone. One landing
has one sender. Nothing is sent without a spot, so what is on its way never exceeds the landing memory.

**When a spot is lent again.** Once it was given back and its sender has answered, in any order: a sender that has
not answered may still write, and on some roads nobody on this side would notice. So a request that was cancelled
just gives its spot back, and the memory waits until `arrived` or `answered` is called for it; a sender that never
answers keeps its spots until the landing is closed. After a timeout or a death the whole landing is closed and
never used again: what is written late lands in memory that nobody reads, or nowhere.

**Part by part.** A part of a spot (`Spot.part`) can be put and looked at by itself, with a checksum of its own,
while the rest is still being computed; `answered(spot)` says that the last one has come. That pays where a part
takes about as long to send as the next one takes to compute: a network, and a large state. Over shared memory the
whole is there in a few milliseconds; in parts it is looked at sooner from some 64 MiB on, and later where it is
small (bench/roads.py).
"""

from __future__ import annotations

import secrets
import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from asr_serve.errors import Cancelled, PeerGone, RoadFailed, Torn
from asr_serve.transfer.checksum import checksum as checksum_of
from asr_serve.transfer.transports.allocator import BufferAllocator

TransportKind = Literal["local", "shm", "nixl", "tcp"]

MAX_BUFFER_BYTES = 1 << 36
"""Of one landing; an offer of more is nonsense."""
TOKEN_BYTES = 32
WHERE_BYTES = 1 << 16

Offset = Annotated[int, Meta(ge=0, le=MAX_BUFFER_BYTES)]


class BufferRegion(msgspec.Struct, frozen=True):
    """Where in the landing memory; the credit to send so much there."""

    at: Offset
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BUFFER_BYTES)]

    def subregion(self, at: int, nbytes: int) -> BufferRegion:
        """So many bytes of this one, `at` bytes after its beginning."""
        assert at >= 0
        assert 0 < nbytes <= self.nbytes - at
        return BufferRegion(self.at + at, nbytes)


class ReceiverOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the other side needs to attach. Whoever has the token may write into the landing memory: it goes over
    the control connection and into no log."""

    kind: TransportKind
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BUFFER_BYTES)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    where: Annotated[bytes, Meta(max_length=WHERE_BYTES)]
    """The road's own: a name in /dev/shm, an address, the metadata of an agent."""


def read_offer(offer: bytes) -> ReceiverOffer:
    """Raises RoadFailed for what is no offer."""
    try:
        return msgspec.msgpack.decode(offer, type=ReceiverOffer)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise RoadFailed(f"an offer of memory that makes no sense: {str(wrong)[:200]!r}") from None


def expect_address(host: str, only_at: str | None) -> None:
    """Raises RoadFailed for an address that is not `only_at`, or none."""
    if only_at is not None and _address(host) != _address(only_at):
        raise RoadFailed(
            f"a landing memory at {host[:100]!r} is offered from {only_at}",
            "the address from which the offer comes, as it is seen here",
            "offer it without address translation between the two",
        )


def _address(host: str) -> IPv4Address | IPv6Address:
    """IPv4 in IPv6 is the IPv4 that it means; an interface (%eth0) has another name on each machine."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        raise RoadFailed(f"an address {host[:100]!r} is offered", "an IPv4 or IPv6 address in numbers") from None
    return getattr(found, "ipv4_mapped", None) or found


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


class LeasedRegion:
    """One spot that is out. Free again when it is both `given` and `answered`."""

    __slots__ = ("released", "sender_done", "spot")

    def __init__(self, spot: BufferRegion) -> None:
        self.spot, self.released, self.sender_done = spot, False, False


class Receiver:
    """The side that receives: memory that it lends. Any thread may call.

    After `close`, `lend` and `arrived` raise PeerGone, and the others do nothing; views that were handed out stay
    readable.
    """

    checked = True
    """Whether `arrived` compares checksums; no need to within one process."""

    def __init__(self, offer: ReceiverOffer, memory: np.ndarray) -> None:
        """`memory`: `offer.nbytes` of uint8."""
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
        """A spot of so many bytes, 1 or more; None when there is no room now.

        Raises RoadFailed for more than the landing memory will ever hold, PeerGone.
        """
        if nbytes > self._allocator.nbytes:
            raise RoadFailed(
                f"{nbytes} bytes for a landing memory of {self._allocator.nbytes}",
                todo="make that larger, or send less",
            )
        with self._lock:
            self._expect_open()
            at = self._allocator.allocate(nbytes)
            if at is None:
                return None
            spot = BufferRegion(at, nbytes)
            self._leased[at] = LeasedRegion(spot)
            return spot

    def received(self, spot: BufferRegion, nbytes: int, checksum: int) -> np.ndarray:
        """What was put into the first `nbytes` of a spot, or of a part of one: uint8, valid until `give`.

        `nbytes` and `checksum` come with the sender's answer. Raises Torn where the memory holds something else;
        RoadFailed where spot or size is not one that was lent, or it was answered before; Cancelled when the spot
        was given back already; PeerGone.
        """
        with self._lock:
            self._expect_open()
            lent = self._leased_region(spot)
            if lent is None or lent.sender_done or not 1 <= nbytes <= spot.nbytes:
                raise RoadFailed(f"an answer about {nbytes} bytes at {spot}, of which no such spot is lent")
            if spot == lent.spot:
                lent.sender_done = True
                self._free_region(lent)
            if lent.released:
                raise Cancelled(f"what was put at {spot} is not wanted any more")
            view = self._view(spot, nbytes)
        if self.checked and checksum_of(view) != checksum:
            raise Torn(
                f"{nbytes} bytes came by {self.kind} with another checksum than they were sent with",
                todo="send them again, by another road if it goes on",
            )
        return view

    def sender_done(self, spot: BufferRegion) -> None:
        """The sender is done with this spot, whether it wrote or not: it will not write there any more.

        For an answer that says no, one that nobody waits for any more, and after the last of several parts. May be
        called after `arrived`. Raises RoadFailed for a spot that is not lent.
        """
        with self._lock:
            if self._closed:
                return
            lent = self._leased.get(spot.at)
            if lent is None or lent.spot != spot:
                raise RoadFailed(f"an answer about {spot}, which is not lent")
            lent.sender_done = True
            self._free_region(lent)

    def release(self, spot: BufferRegion) -> None:
        """Nobody here reads it any more. It is lent again once its sender has answered, not before."""
        with self._lock:
            if self._closed:
                return
            lent = self._leased.get(spot.at)
            assert lent is not None, "given back, and not lent"
            assert lent.spot == spot, "a part is not given back by itself"
            assert not lent.released, "given back twice"
            lent.released = True
            self._free_region(lent)

    def close(self) -> None:
        """Nothing that comes from now on is seen by anybody. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._leased.clear()
        self._close_transport()

    def _close_transport(self) -> None:
        """What the road has open. Called once."""

    def _view(self, spot: BufferRegion, nbytes: int) -> np.ndarray:
        return self._memory[spot.at : spot.at + nbytes]

    def _leased_region(self, spot: BufferRegion) -> LeasedRegion | None:
        """The lent spot that this one is, or lies in."""
        lent = self._leased.get(spot.at)
        if lent is None:
            lent = next((each for each in self._leased.values() if _within(spot, each.spot)), None)
        return lent if lent and _within(spot, lent.spot) else None

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
    """The side that sends. Any thread may call; who waits for another one's `put` waits within its own timeout."""

    def __init__(self, offer: ReceiverOffer) -> None:
        self.kind: TransportKind = offer.kind
        self.nbytes = offer.nbytes
        """Of the landing memory."""

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Bytes to the beginning of a spot, or of a part of one; returns their checksum once they are there.

        `data`: uint8, one-dimensional and contiguous; the caller may change it afterwards. Raises RoadFailed for
        a spot that is not in the landing memory or too small; PeerGone; RoadTimeout. After the last two, nothing
        more can be sent by this road.
        """
        raise NotImplementedError

    def close(self) -> None:
        """May be called again, and while another thread is in `put`, which then raises PeerGone."""
        raise NotImplementedError

    def _validate(self, spot: BufferRegion, data: np.ndarray) -> None:
        assert data.dtype == np.uint8
        assert data.ndim == 1
        assert data.flags.c_contiguous
        if not 1 <= data.nbytes <= spot.nbytes or not 0 <= spot.at <= self.nbytes - spot.nbytes:
            raise RoadFailed(
                f"{data.nbytes} bytes for {spot} of a landing memory of {self.nbytes} bytes",
                "1 byte or more, in a spot that is large enough and lies in that memory",
            )
