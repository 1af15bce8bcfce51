"""Containers of encoded packets: headers, pages, tags. Nothing is rewritten later: all bytes can be streamed."""

from __future__ import annotations

import struct

from asr_serve.audio.ogg_opus import FIRST, FULL_SEGMENT_BYTES, LAST, ogg_crc

UNKNOWN_BYTES = 0xFFFF_FFFF
"""Length in a RIFF header of a stream of unknown length."""
OPUS_RATE_HZ = 48_000
"""Rate at which Opus counts samples, whatever its input rate."""
PROGRAM = "asr-serve"


class RawWriter:
    """Raw samples without a container; the interface of all writers."""

    def __init__(self, mark: str) -> None:
        """`mark`: a comment on the content, written where the format has a place for it."""
        self.mark = mark

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        """Bytes before the first packet. `samples`: total length, if known."""
        return b""

    def packet(self, packet: bytes) -> bytes:
        return packet

    def end(self, packets: list[bytes], samples: int) -> bytes:
        """Bytes of the last packets and of the end. `samples`: total length of the stream."""
        return b"".join(map(self.packet, packets))


class WavWriter(RawWriter):
    """RIFF, 16-bit mono, with a LIST chunk for the comment. Without a known length both sizes are the largest
    number: players then play to the end of the stream."""

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        texts = _chunk(b"ICMT", self.mark.encode() + b"\0") + _chunk(b"ISFT", PROGRAM.encode() + b"\0")
        inner = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, rate_hz, 2 * rate_hz, 2, 16))
        inner += _chunk(b"LIST", b"INFO" + texts)
        data_bytes = UNKNOWN_BYTES if samples is None else 2 * samples
        riff_bytes = UNKNOWN_BYTES if samples is None else 4 + len(inner) + 8 + data_bytes
        return b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVE" + inner + b"data" + struct.pack("<I", data_bytes)


class Mp3Writer(RawWriter):
    """ID3v2.3 and frames. The stream starts with 1105 samples of encoder and decoder delay, which players cannot
    know without a Xing frame. At low rates (MPEG-2) the first frame of 576 samples holds only delay: it is left
    out.

    Source  id3.org, ID3v2.3.0
    """

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self._begun = False

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        comment = b"\0eng\0" + self.mark.encode("latin-1", "replace")
        frames = _id3(b"TSSE", b"\0" + PROGRAM.encode()) + _id3(b"COMM", comment)
        return b"ID3\x03\0\0" + _synchsafe(len(frames)) + frames

    def packet(self, packet: bytes) -> bytes:
        begun, self._begun = self._begun, True
        mpeg1 = packet[1] & 0b1000
        return packet if begun or mpeg1 else b""


class AdtsWriter(RawWriter):
    """ADTS: a header of 7 bytes before each packet of AAC, without a place for comments.

    Source  ISO/IEC 13818-7, 6.2
    """

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        config = int.from_bytes(extradata[:2], "big")  # AudioSpecificConfig
        self._profile, self._rate_index, self._channels = (config >> 11) - 1, config >> 7 & 15, config >> 3 & 15
        return b""

    def packet(self, packet: bytes) -> bytes:
        bits = 0xFFF << 44 | 1 << 40  # MPEG-4, layer 0, no checksum
        bits |= self._profile << 38 | self._rate_index << 34 | self._channels << 30
        bits |= (7 + len(packet)) << 13 | 0x7FF << 2  # variable rate, one block
        return bits.to_bytes(7, "big") + packet


class FlacWriter(RawWriter):
    """FLAC: STREAMINFO, comments, frames. Source  RFC 9639"""

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        info = bytearray(extradata[:34])
        total = int.from_bytes(info[10:18], "big") & ~(2**36 - 1) | (samples or 0)
        info[10:18] = total.to_bytes(8, "big")
        comments = _comments(self.mark)
        return b"fLaC\0" + len(info).to_bytes(3, "big") + info + b"\x84" + len(comments).to_bytes(3, "big") + comments


class OggOpusWriter(RawWriter):
    """Ogg Opus with a page for each packet, so that no packet waits for another. Source  RFC 3533, RFC 7845"""

    STREAM = 1

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self._pages = self._position = 0

    def header(self, rate_hz: int, samples: int | None, extradata: bytes) -> bytes:
        self._skip = int.from_bytes(extradata[10:12], "little")
        self._rate_hz = rate_hz
        return self._page(extradata, 0, FIRST) + self._page(b"OpusTags" + _comments(self.mark), 0, 0)

    def packet(self, packet: bytes) -> bytes:
        self._position += _opus_samples(packet)
        return self._page(packet, self._position, 0)

    def end(self, packets: list[bytes], samples: int) -> bytes:
        """Pages of the last packets. The last page carries the end flag and the exact length; because the encoder
        looks ahead, there is always a packet left for it."""
        if not packets:
            return self._page(b"", self._position, LAST)
        before = b"".join(map(self.packet, packets[:-1]))
        return before + self._page(packets[-1], self._skip + -(-samples * OPUS_RATE_HZ // self._rate_hz), LAST)

    def _page(self, packet: bytes, position: int, flags: int) -> bytes:
        full, rest = divmod(len(packet), FULL_SEGMENT_BYTES)
        segments = bytes([FULL_SEGMENT_BYTES] * full + [rest])
        head = struct.pack("<4sBBqII", b"OggS", 0, flags, position, self.STREAM, self._pages)
        tail = bytes([len(segments)]) + segments + packet
        self._pages += 1
        return head + struct.pack("<I", ogg_crc(head + bytes(4) + tail)) + tail


def _opus_samples(packet: bytes) -> int:
    """Length of a packet in samples at 48 kHz. Source  RFC 6716, 3.1"""
    config, count = packet[0] >> 3, packet[0] & 3
    if config < 12:
        frame = (480, 960, 1_920, 2_880)[config & 3]
    elif config < 16:
        frame = (480, 960)[config & 1]
    else:
        frame = 120 << (config & 3)
    return frame * (packet[1] & 63 if count == 3 else (1, 2, 2)[count])


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def _id3(name: bytes, body: bytes) -> bytes:
    return name + len(body).to_bytes(4, "big") + bytes(2) + body


def _synchsafe(number: int) -> bytes:
    """ID3's synchsafe integer: 28 bits in four bytes, none of which looks like the start of a frame."""
    return bytes(number >> shift & 0x7F for shift in (21, 14, 7, 0))


def _comments(mark: str) -> bytes:
    """Vorbis comments, with little-endian lengths."""
    program, comment = (
        struct.pack("<I", len(text)) + text for text in (PROGRAM.encode(), b"DESCRIPTION=" + mark.encode())
    )
    return program + struct.pack("<I", 1) + comment
