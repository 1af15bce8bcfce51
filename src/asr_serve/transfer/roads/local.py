"""Within one process: an array that nobody may change is handed over as it is, any other is copied once."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from asr_serve.errors import PeerGone, RoadFailed
from asr_serve.transfer.roads import base
from asr_serve.transfer.roads.base import Offer, Spot

_open: weakref.WeakValueDictionary[bytes, Landing] = weakref.WeakValueDictionary()
"""Landings of this process by token: an offer is bytes, and has to lead back to one."""


def is_here() -> bool:
    return True


def land(nbytes: int, host: str) -> Landing:
    return Landing(nbytes)


def attach(offer: Offer, only_at: str | None) -> Sender:
    """It is on this machine or nowhere: `only_at` says nothing of it."""
    landing = _open.pop(offer.token, None)
    if landing is None:
        raise RoadFailed(
            "a landing memory that is not in this process, or has its sender", todo="take another road"
        )
    return Sender(offer, landing)


class Landing(base.Landing):
    """Memory for what has to be copied; it is not touched, and costs nothing, until something is."""

    checked = False

    def __init__(self, nbytes: int) -> None:
        offer = Offer("local", nbytes, base.new_token(), b"")
        super().__init__(offer, np.empty(nbytes, np.uint8))
        self._handed: dict[int, np.ndarray] = {}
        _open[offer.token] = self

    def take_in(self, spot: Spot, data: np.ndarray) -> None:
        """Of the sender. Raises RoadFailed where the spot is not lent, PeerGone."""
        with self._lock:
            self._expect_open()
            lent = self._holding(spot)
            if lent is None or lent.answered:
                raise RoadFailed(f"{data.nbytes} bytes for {spot}, which is not lent")
            if lent.spot == spot and not data.flags.writeable:
                self._handed[spot.at] = data
                return
            self._handed.pop(lent.spot.at, None)
        np.copyto(self._memory[spot.at : spot.at + data.nbytes], data)

    def _view(self, spot: Spot, nbytes: int) -> np.ndarray:
        handed = self._handed.get(spot.at)
        return super()._view(spot, nbytes) if handed is None else handed[:nbytes]

    def _free(self, lent: base.Lent) -> None:
        super()._free(lent)
        if lent.given:
            self._handed.pop(lent.spot.at, None)

    def _shut(self) -> None:
        self._handed.clear()


class Sender(base.Sender):
    """Writes into the landing itself. There is nothing to wait for, and its checksums are 0."""

    def __init__(self, offer: Offer, landing: Landing) -> None:
        super().__init__(offer)
        self._landing: Landing | None = landing
        self._lock = threading.Lock()

    def put(self, spot: Spot, data: np.ndarray, timeout_s: float) -> int:
        """Raises RoadFailed, PeerGone; never RoadTimeout."""
        self._expect(spot, data)
        landing = self._landing
        if landing is None:
            raise PeerGone("this end of the road is closed")
        landing.take_in(spot, data)
        return 0

    def close(self) -> None:
        self._landing = None
