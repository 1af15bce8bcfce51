"""A sender of RTP for tests: speech in 20 ms packets, with what a network does to them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

import numpy as np

from asr_serve.edge.rtp import RtpPacket, build_rtp

UNITS = 320


def l16_packets(
    pcm: np.ndarray, ssrc: int, *, kind: int = 97, sequence: int = 65_500, timestamp: int = 2**32 - 5_000
) -> list[bytes]:
    """Packets of L16/16000 of (n,) float32 at 16 kHz; sequence numbers and timestamps wrap around."""
    samples = np.rint(pcm * 32_767).astype(">i2")
    return [
        build_rtp(
            RtpPacket(
                kind,
                False,
                (sequence + number) % 2**16,
                (timestamp + at) % 2**32,
                ssrc,
                samples[at : at + UNITS].tobytes(),
            )
        )
        for number, at in enumerate(range(0, len(samples), UNITS))
    ]


class RtpSender:
    """Socket that sends to a port of this machine, or of another address."""

    def __init__(self, port: int, address: str = "127.0.0.1", to: str | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._to = (to or address, port)
        self.source = "{}:{}".format(f"[{address}]" if ":" in address else address, self._socket.getsockname()[1])

    def send(self, packets: Iterable[bytes], pause_s: float = 0.001) -> None:
        """Sends, `pause_s` between two: faster than speech, slower than what a kernel drops."""
        for packet in packets:
            self._socket.sendto(packet, self._to)
            if pause_s:
                time.sleep(pause_s)

    def close(self) -> None:
        self._socket.close()
