"""Samples of any numeric type and channel count, and raw PCM bytes, to mono float32 in -1..1."""

from __future__ import annotations

import struct

import numpy as np

from asr_serve.errors import AudioError, UnsupportedAudio
from asr_serve.units import RATE_HZ

SAMPLE_BYTES = 2
"""Bytes of a 16-bit sample."""
UNKNOWN_WAV_SIZE = 0xFFFFFFFF
"""Size in a WAV header that means an unknown one."""
MAX_LEVEL = 8.0
"""Highest absolute float sample. Floats slightly above full scale come from mixing or lossy codecs and are clipped
on input; far larger ones are really integers, and clipping them would leave square waves."""

# dtype kind and bytes -> (value that means silence, value that means full scale)
_SCALES: dict[tuple[str, int], tuple[float, float]] = {
    ("u", 1): (128.0, 128.0),
    ("i", 2): (0.0, 32_768.0),
    ("i", 4): (0.0, 2.0**31),
    ("f", 4): (0.0, 1.0),
    ("f", 8): (0.0, 1.0),
}


def wav_header(
    rate_hz: int = RATE_HZ, *, format_tag: int = 1, sample_bytes: int = SAMPLE_BYTES, channels: int = 1
) -> bytes:
    """Header of samples of unknown number. `format_tag`: 1 for integers, 3 for floating point, 6 for A-law, 7 for
    mu-law. `sample_bytes`: of one channel."""
    frame_bytes = sample_bytes * channels
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", UNKNOWN_WAV_SIZE, b"WAVE", b"fmt ", 16, format_tag, channels),
        *(rate_hz, rate_hz * frame_bytes, frame_bytes, 8 * sample_bytes, b"data", UNKNOWN_WAV_SIZE),
    )


def is_wav_header(data: bytes | memoryview) -> bool:
    """Returns whether bytes begin with the header of a WAV file."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def to_mono(planes: np.ndarray, bad: type[AudioError] = UnsupportedAudio) -> np.ndarray:
    """Mean over channels, scaled to full scale 1.

    In      planes (channels, n) or (n,): uint8 around 128, int16, int32, float32 or float64
    Out     (n,) float32, contiguous; a contiguous float32 mono input is returned itself, not copied
    Raises  `bad` for samples that are NaN, infinite or beyond +-MAX_LEVEL; UnsupportedAudio for another
            type or no channel
    """
    dtype = planes.dtype
    if (dtype.kind, dtype.itemsize) not in _SCALES:
        raise UnsupportedAudio(
            f"samples of type {dtype} came",
            "uint8, int16, int32, float32 and float64 are allowed",
            "convert the samples first",
        )
    if planes.ndim == 2:
        if not planes.shape[0]:
            raise UnsupportedAudio("audio with 0 channels came", "at least one is needed", "check the shape")
        if planes.shape[0] == 1:
            planes = planes[0]
    zero, full = _SCALES[dtype.kind, dtype.itemsize]
    with np.errstate(over="ignore", invalid="ignore"):
        mono: np.ndarray = np.ascontiguousarray(planes, dtype=np.float32)
        if mono.ndim == 2:
            mono = mono.mean(axis=0, dtype=np.float32)
    if zero:
        mono = (mono - np.float32(zero)) / np.float32(full)
    elif full != 1.0:
        mono = mono * np.float32(1.0 / full)
    if dtype.kind == "f" and len(mono):
        # This form also catches NaN, which fails every comparison.
        low, high = float(mono.min()), float(mono.max())
        if not (low >= -MAX_LEVEL and high <= MAX_LEVEL):
            raise bad(
                f"float samples from {low:g} to {high:g} came",
                f"full scale is -1 to 1, anything finite within {MAX_LEVEL:g} is clipped to it",
                "drop NaN and infinite values; divide samples that were 16-bit integers by 32768",
            )
    return mono


def clipped(chunk: np.ndarray) -> np.ndarray:
    """`chunk` itself where it lies in -1..1, else a clipped copy."""
    if len(chunk) and (chunk.max() > 1.0 or chunk.min() < -1.0):
        chunk = np.clip(chunk, -1.0, 1.0)
    return chunk


class Pcm16Assembler:
    """Frames cut anywhere to whole samples: an odd last byte waits for the other half in the next frame."""

    def __init__(self) -> None:
        self._pending_byte = b""

    @property
    def pending_byte(self) -> bytes:
        """The buffered half of a sample, or nothing."""
        return self._pending_byte

    @pending_byte.setter
    def pending_byte(self, value: bytes) -> None:
        self._pending_byte = value

    @property
    def has_pending_byte(self) -> bool:
        """Returns whether half a sample is buffered."""
        return bool(self._pending_byte)

    def take_whole_samples(self, frame: bytes | memoryview) -> bytes | memoryview:
        """All whole samples so far."""
        if self._pending_byte:
            frame = self._pending_byte + frame
        if len(frame) % SAMPLE_BYTES:
            self._pending_byte = bytes(frame[-1:])
            return frame[:-1]
        self._pending_byte = b""
        return frame


def decode_pcm16(pcm: bytes | memoryview) -> np.ndarray:
    """Whole little-endian 16-bit samples to float32 (n,) in -1..1."""
    return np.frombuffer(pcm, "<i2") * np.float32(1 / 32_768)


def to_int16(pcm: np.ndarray) -> np.ndarray:
    """(n,) float32, clipped to -1..1, to (n,) int16; int16 is returned as it is."""
    if pcm.dtype == np.int16:
        return pcm
    return np.asarray(np.clip(np.rint(pcm * 32_768), -32_768, 32_767).astype(np.int16))


def to_float32(pcm: np.ndarray) -> np.ndarray:
    """(n,) int16 to (n,) float32 in -1..1; float32 is returned as it is."""
    return pcm * np.float32(1 / 32_768) if pcm.dtype == np.int16 else pcm


def mulaw_table() -> np.ndarray:
    """Decoded value of each byte of G.711 mu-law, (256,) float32. Source  ITU-T G.711, table 2."""
    code = ~np.arange(256) & 0xFF  # mu-law is sent with all bits inverted
    magnitude = ((code & 0x0F) * 2 + 33 << (code >> 4 & 7)) - 33
    return (np.where(code & 0x80, -magnitude, magnitude) / 8_192).astype(np.float32)


def alaw_table() -> np.ndarray:
    """Decoded value of each byte of G.711 A-law, (256,) float32. Source  ITU-T G.711, table 1."""
    code = np.arange(256) ^ 0x55  # A-law is sent with every other bit inverted
    step, exponent = (code & 0x0F) * 2 + 1, code >> 4 & 7
    magnitude = np.where(exponent > 0, step + 32 << np.maximum(exponent - 1, 0), step)
    return (np.where(code & 0x80, magnitude, -magnitude) / 4_096).astype(np.float32)


def companding_codes(decoded: np.ndarray) -> np.ndarray:
    """Code of each 16-bit sample, (65,536,) uint8 by its value as unsigned: that of the nearest value in `decoded`, a
    table of G.711."""
    order = np.argsort(decoded, kind="stable")
    values = decoded[order]
    samples = np.arange(65_536).astype(np.uint16).view(np.int16) / 32_768
    codes: np.ndarray = order[np.searchsorted((values[1:] + values[:-1]) / 2, samples)].astype(np.uint8)
    return codes
