"""Within one process: an array that nobody may change is handed over as it is, any other is copied once."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from asr_serve.errors import PeerGone, RoadFailed
from asr_serve.transfer.transports import base
from asr_serve.transfer.transports.base import BufferRegion, ReceiverOffer

_open: weakref.WeakValueDictionary[bytes, LocalReceiver] = weakref.WeakValueDictionary()
"""Landings of this process by token: an offer is bytes, and has to lead back to one."""


def is_available() -> bool:
    return True


def create_receiver(nbytes: int, host: str) -> LocalReceiver:
    return LocalReceiver(nbytes)


def attach_sender(offer: ReceiverOffer, only_at: str | None) -> LocalSender:
    """It is on this machine or nowhere: `only_at` says nothing of it."""
    landing = _open.pop(offer.token, None)
    if landing is None:
        raise RoadFailed(
            "a landing memory that is not in this process, or has its sender", todo="take another road"
        )
    return LocalSender(offer, landing)


class LocalReceiver(base.Receiver):
    """Memory for what has to be copied; it is not touched, and costs nothing, until something is."""

    checked = False

    def __init__(self, nbytes: int) -> None:
        offer = ReceiverOffer("local", nbytes, base.new_token(), b"")
        super().__init__(offer, np.empty(nbytes, np.uint8))
        self._handed: dict[int, np.ndarray] = {}
        _open[offer.token] = self

    def write_direct(self, spot: BufferRegion, data: np.ndarray) -> None:
        """Of the sender. Raises RoadFailed where the spot is not lent, PeerGone."""
        with self._lock:
            self._expect_open()
            lent = self._leased_region(spot)
            if lent is None or lent.sender_done:
                raise RoadFailed(f"{data.nbytes} bytes for {spot}, which is not lent")
            if lent.spot == spot and not data.flags.writeable:
                self._handed[spot.at] = data
                return
            self._handed.pop(lent.spot.at, None)
        np.copyto(self._memory[spot.at : spot.at + data.nbytes], data)

    def _view(self, spot: BufferRegion, nbytes: int) -> np.ndarray:
        handed = self._handed.get(spot.at)
        return super()._view(spot, nbytes) if handed is None else handed[:nbytes]

    def _free_region(self, lent: base.LeasedRegion) -> None:
        super()._free_region(lent)
        if lent.released:
            self._handed.pop(lent.spot.at, None)

    def _close_transport(self) -> None:
        self._handed.clear()


class LocalSender(base.TransportSender):
    """Writes into the landing itself. There is nothing to wait for, and its checksums are 0."""

    def __init__(self, offer: ReceiverOffer, landing: LocalReceiver) -> None:
        super().__init__(offer)
        self._landing: LocalReceiver | None = landing
        self._lock = threading.Lock()

    def write_region(self, spot: BufferRegion, data: np.ndarray, timeout_s: float) -> int:
        """Raises RoadFailed, PeerGone; never RoadTimeout."""
        self._validate(spot, data)
        landing = self._landing
        if landing is None:
            raise PeerGone("this end of the road is closed")
        landing.write_direct(spot, data)
        return 0

    def close(self) -> None:
        self._landing = None
