"""Opus by libopus itself, for what ffmpeg's decoder does not do: packets that are lost, and forward error correction.

The library is the system's, or the one that PyAV brings with it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from pathlib import Path

import numpy as np

from asr_serve.audio.opus_decoder import MAX_PACKET_BYTES, OPUS_RATE_HZ
from asr_serve.errors import CorruptAudio, ProgramMissing
from asr_serve.units import RATE_HZ

MAX_FRAME_MS = 120
MAX_SAMPLES = RATE_HZ * MAX_FRAME_MS // 1_000
GRANULE_SAMPLES = RATE_HZ // 400
"""2.5 ms: what is concealed is a multiple of it."""
_FRAME_UNITS = ((480, 960, 1_920, 2_880), (480, 960), (120, 240, 480, 960))
"""Samples at 48 kHz of a frame: SILK, hybrid, CELT (RFC 6716, table 2)."""


def opus_packet_units(packet: bytes | memoryview) -> int | None:
    """Length of a packet in samples at 48 kHz, by its first bytes; None for one that RFC 6716, section 3 forbids."""
    if not 0 < len(packet) <= MAX_PACKET_BYTES:
        return None
    config, code = packet[0] >> 3, packet[0] & 3
    if config < 12:
        units = _FRAME_UNITS[0][config % 4]
    elif config < 16:
        units = _FRAME_UNITS[1][config % 2]
    else:
        units = _FRAME_UNITS[2][config % 4]
    if code == 3:
        frames = packet[1] & 0x3F if len(packet) > 1 else 0
    else:
        frames = (1, 2, 2)[code]
    total = frames * units
    return total if 0 < total <= OPUS_RATE_HZ * MAX_FRAME_MS // 1_000 else None


@functools.cache
def _library() -> ctypes.CDLL:
    """Loads libopus. Raises ProgramMissing."""
    names = [name] if (name := ctypes.util.find_library("opus")) else []
    if (spec := importlib.util.find_spec("av")) is not None and spec.origin is not None:
        beside = Path(spec.origin).parent.parent / "av.libs"
        names += sorted(str(path) for path in beside.glob("libopus-*.so*"))
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.opus_decoder_create.restype = ctypes.c_void_p
        library.opus_decoder_create.argtypes = [ctypes.c_int32, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        library.opus_decoder_destroy.argtypes = [ctypes.c_void_p]
        library.opus_decoder_destroy.restype = None
        library.opus_decode_float.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
        ]
        return library
    raise ProgramMissing(
        "libopus is not on this machine", "the edge decodes Opus with it", "install it: apt install libopus0"
    )


class LibopusDecoder:
    """Decoder of one stream, mono, at 16 kHz: no samples are made that are then thrown away.

    Out     (n,) float32, the length that `opus_packet_units` says, at 16 kHz
    Raises  CorruptAudio; ProgramMissing without libopus
    Source  RFC 6716; RFC 7587 for its use in RTP
    """

    def __init__(self) -> None:
        self._library, failed = _library(), ctypes.c_int(0)
        self._handle = self._library.opus_decoder_create(RATE_HZ, 1, ctypes.byref(failed))
        if not self._handle:
            raise ProgramMissing(f"libopus makes no decoder: error {failed.value}", "one that decodes to 16 kHz")
        self._pcm = np.zeros(MAX_SAMPLES, np.float32)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.opus_decoder_destroy(self._handle)
            self._handle = None

    def decode(self, packet: bytes) -> np.ndarray:
        if opus_packet_units(packet) is None:
            raise CorruptAudio(f"an Opus packet of {len(packet)} bytes is none", "RFC 6716 says what one looks like")
        return self._decode(packet, MAX_SAMPLES, fec=False)

    def conceal(self, samples: int, next_packet: bytes | None = None) -> np.ndarray:
        """Samples in place of lost packets. `next_packet`: the one behind them, whose forward error correction holds
        its predecessor, where the sender adds it."""
        parts: list[np.ndarray] = []
        fec_samples = 0
        if next_packet is not None and (units := opus_packet_units(next_packet)) is not None:
            usual = units * RATE_HZ // OPUS_RATE_HZ
            # The correction is of the one packet before, 10 ms at least, and in whole granules.
            fec_samples = usual if usual <= samples and usual >= RATE_HZ // 100 else 0
        left = samples - fec_samples
        while left >= GRANULE_SAMPLES:
            step = min(left, MAX_SAMPLES) // GRANULE_SAMPLES * GRANULE_SAMPLES
            parts.append(self._decode(None, step, fec=False))
            left -= step
        if left:
            parts.append(np.zeros(left, np.float32))
        if fec_samples:
            parts.append(self._decode(next_packet, fec_samples, fec=True))
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _decode(self, packet: bytes | None, room: int, *, fec: bool) -> np.ndarray:
        size = 0 if packet is None else len(packet)
        made = self._library.opus_decode_float(self._handle, packet, size, self._pcm.ctypes.data, room, fec)
        if made < 0:
            raise CorruptAudio(f"an Opus packet of {size} bytes cannot be decoded: error {made}", "RFC 6716")
        return self._pcm[:made].copy()
