"""Decoding of a live stream in a container, sans-I/O: Ogg with Opus, or WAV, found by its first bytes."""

from __future__ import annotations

import struct

import numpy as np

from asr_serve.audio.stream_decoder import MAX_RATE_HZ, MIN_RATE_HZ, LiveAudioDecoder, create_live_decoder
from asr_serve.errors import UnsupportedAudio
from asr_serve.units import RATE_HZ

MAX_HEADER_BYTES = 1 << 16
"""Longest WAV header, with all chunks before the samples."""
WAV_ENCODINGS = {(1, 16): "s16le", (0xFFFE, 16): "s16le", (6, 8): "alaw", (7, 8): "mulaw"}
"""Format tag and bits of a sample -> encoding."""
ALLOWED = "a WAV file of one channel with 16-bit, mu-law or A-law samples at 8 to 48 kHz, or Opus in Ogg"


class ContainerStreamDecoder:
    """Bytes of one caller, in order and cut anywhere, to samples as `LiveAudioDecoder` gives them.

    Raises  UnsupportedAudio for another container, and as LiveAudioDecoder does; it must not be used afterwards
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._decoder: LiveAudioDecoder | None = None

    @property
    def rate_hz(self) -> int:
        """Rate of the decoded samples; that of the output until it is known."""
        return RATE_HZ if self._decoder is None else self._decoder.rate_hz

    def decode(self, data: bytes | memoryview) -> np.ndarray:
        if self._decoder is not None:
            return self._decoder.decode(data)
        self._header += data
        if (opened := self._open()) is None:
            return np.zeros(0, np.float32)
        self._decoder, start = opened
        rest, self._header = bytes(self._header[start:]), bytearray()
        return self._decoder.decode(rest)

    def drain_resampler(self) -> np.ndarray:
        return np.zeros(0, np.float32) if self._decoder is None else self._decoder.drain_resampler()

    def finish(self) -> np.ndarray:
        return np.zeros(0, np.float32) if self._decoder is None else self._decoder.finish()

    def _open(self) -> tuple[LiveAudioDecoder, int] | None:
        """Decoder, and position of its first byte; None: the header goes on."""
        header = self._header
        if header[:4] == b"OggS":
            return create_live_decoder("ogg"), 0
        if header[:4] != b"RIFF"[: len(header)] and header[:4] != b"OggS"[: len(header)]:
            raise UnsupportedAudio(
                f"a stream that begins with {bytes(header[:8])!r}",
                ALLOWED,
                "or send samples, and their encoding and rate",
            )
        decoder: LiveAudioDecoder | None = None
        at = 12
        while at + 8 <= len(header):
            name, size = struct.unpack_from("<4sI", header, at)
            if name == b"data":
                if decoder is None:
                    raise UnsupportedAudio("a WAV header without a format", ALLOWED)
                return decoder, at + 8
            if name == b"fmt " and at + 24 <= len(header):
                decoder = _wav_decoder(*struct.unpack_from("<HHI6xH", header, at + 8))
            elif name == b"fmt ":
                return None
            at += 8 + size + size % 2
        if len(header) > MAX_HEADER_BYTES:
            raise UnsupportedAudio(f"a WAV header of over {MAX_HEADER_BYTES} bytes", "samples after a short header")
        return None


def _wav_decoder(tag: int, channels: int, rate_hz: int, bits: int) -> LiveAudioDecoder:
    encoding = WAV_ENCODINGS.get((tag, bits))
    if encoding is None or channels != 1 or not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        came = f"a WAV stream of format {tag} with {bits} bits, {channels} channels at {rate_hz} Hz"
        raise UnsupportedAudio(came, ALLOWED, "convert it")
    return create_live_decoder(encoding, rate_hz)
