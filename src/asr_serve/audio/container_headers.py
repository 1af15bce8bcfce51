"""Parsers for the first bytes of audio files. Pure functions over bytes; decoding is PyAV's."""

from __future__ import annotations

import struct

import msgspec

from asr_serve.units import resampled_samples

# A writer that cannot seek back leaves a RIFF size of 0, or the largest number it can write, less its own
# headers (ffmpeg 2^32-1, sox 2^31-4096, others 2^31). A real file is mistaken for a streamed one only if its
# length is within 4 KiB of 2 or 4 GiB.
_STREAMED_SLACK_BYTES = 4_096

_MAGICS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"RIFF", "wav"),
    (0, b"RF64", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1aE\xdf\xa3", "webm/matroska"),
    (4, b"ftyp", "mp4"),
    (0, b"FORM", "aiff"),
    (0, b"caff", "caf"),
    (0, b".snd", "au"),
)


class WavHeader(msgspec.Struct, frozen=True):
    """The format and data chunk of a RIFF or RF64 file."""

    channels: int
    rate_hz: int
    bytes_per_s: int
    data_start_bytes: int
    data_bytes: int | None
    """Length of the data chunk; None: unknown, from a streaming writer."""


def container_name(head: bytes) -> str | None:
    """Name of the container that the first bytes identify; None where they identify none."""
    for offset, magic, name in _MAGICS:
        if head[offset : offset + len(magic)] == magic:
            return name
    return None


def read_wav_header(head: bytes) -> WavHeader | None:
    """Parse a WAV header; None where `head` is no WAV or the header is incomplete."""
    if head[:4] not in (b"RIFF", b"RF64") or head[8:12] != b"WAVE":
        return None
    at, fmt, long_bytes = 12, None, None
    while at + 8 <= len(head):
        name, size = head[at : at + 4], int.from_bytes(head[at + 4 : at + 8], "little")
        body = head[at + 8 : at + 8 + 40]
        if name == b"fmt " and len(body) >= 16:
            fmt = struct.unpack_from("<HHIIHH", body)
        elif name == b"ds64" and len(body) >= 16:
            long_bytes = struct.unpack_from("<QQ", body)[1]
        elif name == b"data" and fmt is not None:
            tag, channels, rate_hz, bytes_per_s, block_bytes, _ = fmt
            if tag in (1, 3, 0xFFFE):  # for PCM it is computed, which is safer than the announced value
                bytes_per_s = rate_hz * block_bytes
            announced = long_bytes if long_bytes and size == 0xFFFFFFFF else _unless_streamed(size)
            return WavHeader(channels, rate_hz, bytes_per_s, at + 8, announced)
        at += 8 + size + size % 2
    return None


def _unless_streamed(size: int) -> int | None:
    near_2_gib = abs(size - 2**31) <= _STREAMED_SLACK_BYTES
    near_4_gib = 2**32 - size <= _STREAMED_SLACK_BYTES
    return None if not size or near_2_gib or near_4_gib else size


def mp4_needs_seeking(head: bytes) -> bool:
    """Returns whether `head` is an mp4 whose index (moov) does not come before its audio (mdat) within `head`."""
    if container_name(head) != "mp4":
        return False
    at = 0
    while at + 8 <= len(head):
        size, name = int.from_bytes(head[at : at + 4], "big"), head[at + 4 : at + 8]
        if name == b"moov":
            return False
        if name == b"mdat" or size < 8:
            break
        at += size
    return True


def mp3_announced_samples(head: bytes) -> int | None:
    """Samples at 16 kHz that the Xing/Info header of an mp3 announces; None where there is none.

    Without this header an mp3 announces no length: ffmpeg's duration is then an estimate from the bit rate.
    """
    at = 0
    if head[:3] == b"ID3" and len(head) >= 10:
        a, b, c, d = (byte & 0x7F for byte in head[6:10])
        at = 10 + (a << 21 | b << 14 | c << 7 | d)
    first = head[at : at + 200]
    tag = max(first.find(b"Xing"), first.find(b"Info"))
    if tag < 0 or len(first) < tag + 12 or first[0] != 0xFF or not first[tag + 7] & 1:
        return None
    version, rate_index = first[1] >> 3 & 3, first[2] >> 2 & 3
    if version == 1 or rate_index == 3:
        return None
    rate_hz = (44_100, 48_000, 32_000)[rate_index] // {3: 1, 2: 2, 0: 4}[version]
    frames = int.from_bytes(first[tag + 8 : tag + 12], "big")
    return resampled_samples(frames * (1_152 if version == 3 else 576), rate_hz)
