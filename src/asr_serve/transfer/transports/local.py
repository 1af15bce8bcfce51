"""Transport within one process: a read-only array is passed without a copy, any other is copied once."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from asr_serve.errors import PeerGone, TransportFailed
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

_open: weakref.WeakValueDictionary[bytes, LocalReceiver] = weakref.WeakValueDictionary()
"""Receivers of this process by token: an offer is bytes, which must lead back to one."""


def is_available() -> bool:
    return True


def create_receiver(nbytes: int, host: str) -> LocalReceiver:
    return LocalReceiver(nbytes)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> LocalSender:
    """Attaches to a receiver of this process. `only_at` is ignored: nothing leaves the machine."""
    receiver = _open.pop(offer.token, None)
    if receiver is None:
        raise TransportFailed(
            "a landing memory that is not in this process, or has its sender", todo="take another transport"
        )
    return LocalSender(offer, receiver)


class LocalReceiver(base.Receiver):
    """Receiver whose memory serves arrays that must be copied; until then its pages are untouched and cost nothing."""

    checked = False

    def __init__(self, nbytes: int) -> None:
        offer = ReceiverOffer("local", nbytes, base.new_token(), b"")
        super().__init__(offer, np.empty(nbytes, np.uint8))
        self._handed: dict[int, np.ndarray] = {}
        _open[offer.token] = self

    def write_direct(self, spot: BufferRegion, data: np.ndarray) -> None:
        """Writes for the sender. Raises TransportFailed where the region is not leased, PeerGone."""
        with self._lock:
            self._expect_open()
            lease = self._leased_region(spot)
            if lease is None or lease.sender_done:
                raise TransportFailed(f"{data.nbytes} bytes for {spot}, which is not lent")
            if lease.spot == spot and not data.flags.writeable:
                self._handed[spot.at] = data
                return
            self._handed.pop(lease.spot.at, None)
        np.copyto(self._memory[spot.at : spot.at + data.nbytes], data)

    def _view(self, spot: BufferRegion, nbytes: int) -> np.ndarray:
        passed = self._handed.get(spot.at)
        return super()._view(spot, nbytes) if passed is None else passed[:nbytes]

    def _free_region(self, lent: base.LeasedRegion) -> None:
        super()._free_region(lent)
        if lent.released:
            self._handed.pop(lent.spot.at, None)

    def _close_transport(self) -> None:
        self._handed.clear()


class LocalSender(base.TransportSender):
    """Sender that writes into the receiver itself. It never waits, and its checksums are 0."""

    def __init__(self, offer: ReceiverOffer, landing: LocalReceiver) -> None:
        super().__init__(offer)
        self._landing: LocalReceiver | None = landing
        self._lock = threading.Lock()

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Writes as in the base class. Raises TransportFailed, PeerGone; never TransportTimeout."""
        self._validate(spot, data)
        receiver = self._landing
        if receiver is None:
            raise PeerGone("this end of the transport is closed")
        receiver.write_direct(spot, data)
        return 0

    def close(self) -> None:
        self._landing = None
