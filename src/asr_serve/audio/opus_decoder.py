"""Opus packets to mono samples, by PyAV."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import av
import av.error
import msgspec
import numpy as np

from asr_serve.audio.pcm import to_mono
from asr_serve.errors import CorruptAudio

OPUS_RATE_HZ = 48_000
"""Rate that Opus decodes to, whatever was recorded."""
MAX_PACKET_BYTES = 61_298
"""Longest packet, by RFC 6716, appendix B: 48 frames of up to 1,275 bytes, their lengths, two header bytes, and
padding that no encoder sends."""


PREROLL_SAMPLES = OPUS_RATE_HZ
"""Audio after which a decoder that begins in the middle of a stream returns what one returns that has all of it, within
the rounding of float32. After the 80 ms of RFC 7845, section 4.6, prediction of voiced speech is still audibly off."""
MAX_PREROLL_BYTES = 32 << 10
"""Most bytes of packets that are kept for that: a second at 256 kbit/s."""


class OpusDecoderState(msgspec.Struct, frozen=True):
    """State of an OpusPacketDecoder, from which another one continues: at the same sample, and with the same values but
    for the rounding of float32, unless the last second is of more than MAX_PREROLL_BYTES."""

    channels: int
    gain: int
    packets: int
    """Number of packets so far."""
    recent: list[bytes]
    """Last packets."""


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
        self._channels, self._gain = channels, gain
        self._packets = 0
        self._recent: deque[tuple[bytes, int]] = deque()
        """Last packets, and how many samples came with each."""
        self._recent_samples = self._recent_bytes = 0

    def export_state(self) -> OpusDecoderState:
        return OpusDecoderState(self._channels, self._gain, self._packets, [packet for packet, _ in self._recent])

    @classmethod
    def of(cls, state: OpusDecoderState) -> OpusPacketDecoder:
        """Decoder that continues there. Raises CorruptAudio."""
        decoder = cls(state.channels, state.gain)
        decoder.warm_up(state.recent)
        decoder._packets = state.packets
        return decoder

    def warm_up(self, packets: Sequence[bytes]) -> None:
        """Decodes packets whose samples were returned before. Raises CorruptAudio."""
        for packet in packets:
            self.decode(packet)

    def decode(self, packet: bytes) -> np.ndarray:
        self._packets += 1
        if not 0 < len(packet) <= MAX_PACKET_BYTES:
            raise self._corrupt(f"holds {len(packet)} bytes", f"1 to {MAX_PACKET_BYTES} are allowed")
        try:
            pcm = self._decoded(av.Packet(packet))
        except av.error.FFmpegError as error:
            raise self._corrupt("is none", "RFC 6716 says what one looks like") from error
        self._recent.append((packet, len(pcm)))
        self._recent_samples += len(pcm)
        self._recent_bytes += len(packet)
        while self._recent_samples - self._recent[0][1] >= PREROLL_SAMPLES or self._recent_bytes > MAX_PREROLL_BYTES:
            oldest, samples = self._recent.popleft()
            self._recent_samples -= samples
            self._recent_bytes -= len(oldest)
            if not self._recent:
                break
        return pcm

    def finish(self) -> np.ndarray:
        """Remaining samples of the decoder."""
        return self._decoded(None)

    def _decoded(self, packet: av.Packet[Any] | None) -> np.ndarray:
        frames = [to_mono(frame.to_ndarray(), CorruptAudio) for frame in self._codec.decode(packet)]
        return np.concatenate(frames) if frames else np.zeros(0, np.float32)

    def _corrupt(self, why: str, allowed: str) -> CorruptAudio:
        return CorruptAudio(f"Opus packet {self._packets} {why}", allowed, "send each packet whole, once")
