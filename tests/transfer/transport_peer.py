"""The other process of a transport's test: does what it is told over a connection, and tells what came of it.

python transport_peer.py <descriptor of a socket>
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np

from asr_serve.errors import AsrServeError
from asr_serve.transfer import transports
from asr_serve.transfer.transports import BufferRegion, Receiver, TransportSender

TIMEOUT_S = 60.0


def bytes_of(nbytes: int, seed: int) -> np.ndarray:
    """The same on both sides, and nowhere aligned."""
    return np.random.default_rng(seed).integers(0, 256, nbytes + 3, np.uint8)[3:]


class Peer:
    """Each method is an order. At most one landing and one sender."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._landing: Receiver
        self._sender: TransportSender

    def attach(self, offer: bytes) -> None:
        self._sender = transports.attach_sender(offer)

    def put(self, spot: BufferRegion, nbytes: int, seed: int, timeout_s: float = TIMEOUT_S) -> int:
        return self._sender.write_region(spot, bytes_of(nbytes, seed), timeout_s)

    def put_many(self, orders: list[tuple[BufferRegion, int, int]], threads: int) -> list[int]:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda order: self.put(*order), orders))

    def put_again_and_again(self, spot: BufferRegion) -> None:
        """Until it fails. Says when the first is there."""
        data = bytes_of(spot.nbytes, 0)
        self._sender.write_region(spot, data, TIMEOUT_S)
        self._line.send("going")
        while True:
            self._sender.write_region(spot, data, TIMEOUT_S)

    def land(self, kind: str, nbytes: int, host: str = "127.0.0.1") -> bytes:
        self._landing = transports.create_receiver(kind, nbytes, host)
        return self._landing.offer

    def lend(self, nbytes: int) -> BufferRegion | None:
        return self._landing.lease(nbytes)

    def arrived(self, spot: BufferRegion, nbytes: int, checksum: int, seed: int) -> bool:
        """Returns whether it is what `bytes_of` says."""
        return bool((self._landing.received(spot, nbytes, checksum) == bytes_of(nbytes, seed)).all())


def main() -> None:
    with Connection(int(sys.argv[1])) as line:
        peer = Peer(line)
        line.send("here")
        while True:
            try:
                order, args = line.recv()
            except EOFError:
                return
            try:
                line.send(getattr(peer, order)(*args))
            except AsrServeError as error:
                line.send(error)


if __name__ == "__main__":
    main()
