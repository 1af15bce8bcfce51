"""Opus packets to mono samples, by PyAV."""

from __future__ import annotations

import struct
from typing import Any

import av
import av.error
import numpy as np

from asr_serve.audio.pcm import to_mono
from asr_serve.errors import CorruptAudio

OPUS_RATE_HZ = 48_000
"""Rate that Opus decodes to, whatever was recorded."""
MAX_PACKET_BYTES = 61_298
"""Longest packet, by RFC 6716, appendix B: 48 frames of up to 1,275 bytes, their lengths, two header bytes, and
padding that no encoder sends."""


class OpusPacketDecoder:
    """Decoder of one packet after another.

    Out     (n,) float32, mono, 48 kHz: 2.5 to 120 ms of a packet, the encoder's delay included
    Raises  CorruptAudio
    Source  RFC 6716; ffmpeg's decoder, as for files
    """

    def __init__(self, channels: int = 1, gain: int = 0) -> None:
        """`channels` 1 or 2, which are averaged; one costs less to decode. `gain` in 1/256 dB."""
        self._codec = av.CodecContext.create("opus", "r")
        self._codec.extradata = struct.pack("<8sBBHIhB", b"OpusHead", 1, channels, 0, OPUS_RATE_HZ, gain, 0)
        self._packets = 0

    def decode(self, packet: bytes) -> np.ndarray:
        self._packets += 1
        if not 0 < len(packet) <= MAX_PACKET_BYTES:
            raise self._corrupt(f"holds {len(packet)} bytes", f"1 to {MAX_PACKET_BYTES} are allowed")
        try:
            return self._decoded(av.Packet(packet))
        except av.error.FFmpegError as error:
            raise self._corrupt("is none", "RFC 6716 says what one looks like") from error

    def finish(self) -> np.ndarray:
        """Remaining samples of the decoder."""
        return self._decoded(None)

    def _decoded(self, packet: av.Packet[Any] | None) -> np.ndarray:
        frames = [to_mono(frame.to_ndarray(), CorruptAudio) for frame in self._codec.decode(packet)]
        return np.concatenate(frames) if frames else np.zeros(0, np.float32)

    def _corrupt(self, why: str, allowed: str) -> CorruptAudio:
        return CorruptAudio(f"Opus packet {self._packets} {why}", allowed, "send each packet whole, once")
