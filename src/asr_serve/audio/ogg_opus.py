"""Ogg Opus stream, cut anywhere, to mono samples: pages, packets, pre-skip and end trimming.

Source  RFC 3533 (Ogg), RFC 7845 (Opus in it)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import Enum

import msgspec
import numpy as np

from asr_serve.audio import container_headers
from asr_serve.audio.opus_decoder import MAX_PACKET_BYTES, OpusDecoderState, OpusPacketDecoder
from asr_serve.errors import AudioError, CorruptAudio, UnsupportedAudio

HEAD_BYTES = 27
"""Length of a page's header, without its segment table."""
FULL_SEGMENT_BYTES = 255
"""Length of a segment after which its packet continues."""
CONTINUED, FIRST, LAST = 1, 2, 4

_BITS_TURNED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"\x01vorbis", "Vorbis"),
    (b"\x7fFLAC", "FLAC"),
    (b"Speex   ", "Speex"),
    (b"\x80theora", "Theora video"),
    (b"fishead\0", "a Skeleton index"),
)


class OggPage(msgspec.Struct, frozen=True):
    """One page with a valid checksum."""

    flags: int
    position: int
    """Granule position: samples at 48 kHz up to the end of the last packet that ends here; -1: none does."""
    stream: int
    number: int
    parts: tuple[tuple[bytes, bool], ...]
    """Packets or parts of them, and whether each ends in this page."""

    @property
    def begins_stream(self) -> bool:
        return bool(self.flags & FIRST)

    @property
    def ends_stream(self) -> bool:
        return bool(self.flags & LAST)

    @property
    def continues(self) -> bool:
        """Returns whether the first part continues a packet of the previous page."""
        return bool(self.flags & CONTINUED)


class OggPageReaderState(msgspec.Struct, frozen=True):
    """State of an OggPageReader."""

    buffer: bytes
    """Beginning of a page."""
    past_bytes: int


class OggPageReader:
    """Bytes to pages. Buffers less than one page, 65,307 bytes. Raises CorruptAudio, UnsupportedAudio."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._past_bytes = 0
        """Length of all pages returned so far."""

    def export_state(self) -> OggPageReaderState:
        return OggPageReaderState(bytes(self._buffer), self._past_bytes)

    def import_state(self, state: OggPageReaderState) -> None:
        """Continues there. Call before the first bytes."""
        self._buffer[:], self._past_bytes = state.buffer, state.past_bytes

    @property
    def has_pending_bytes(self) -> bool:
        """Returns whether part of a page waits for the rest."""
        return bool(self._buffer)

    def append_bytes(self, data: bytes | memoryview) -> Iterator[OggPage]:
        self._buffer += data
        at = 0
        try:
            while length := self._length(at):
                page = bytes(self._buffer[at : at + length])
                at += length
                yield self._read(page)
                self._past_bytes += length
        finally:
            del self._buffer[:at]

    def _length(self, at: int) -> int:
        """Bytes of the page at `at`; 0 while it is incomplete."""
        buffer = self._buffer
        if len(buffer) < at + HEAD_BYTES:
            return 0
        if buffer[at : at + 5] != b"OggS\0":
            raise self._no_page(bytes(buffer[at : at + HEAD_BYTES]))
        segments = buffer[at + HEAD_BYTES - 1]
        if len(buffer) < at + HEAD_BYTES + segments:
            return 0
        length = HEAD_BYTES + segments + sum(buffer[at + HEAD_BYTES : at + HEAD_BYTES + segments])
        return length if len(buffer) >= at + length else 0

    def _read(self, page: bytes) -> OggPage:
        _, _, flags, position, stream, number, checksum, segments = struct.unpack_from("<4sBBqIIIB", page)
        if checksum != ogg_crc(page[:22] + bytes(4) + page[26:]):
            raise CorruptAudio(
                f"the Ogg page at byte {self._past_bytes} has a wrong checksum",
                "every byte is needed, in order",
                "send the stream as it was written",
            )
        parts, at, length = [], HEAD_BYTES + segments, 0
        for index, segment in enumerate(page[HEAD_BYTES:at]):
            length += segment
            if segment < FULL_SEGMENT_BYTES or index == segments - 1:
                parts.append((page[at : at + length], segment < FULL_SEGMENT_BYTES))
                at, length = at + length, 0
        return OggPage(flags, position, stream, number, tuple(parts))

    def _no_page(self, head: bytes) -> AudioError:
        allowed, todo = "an Ogg stream with Opus in it is allowed", "send that, or decode it and send s16le"
        if self._past_bytes:
            return CorruptAudio(f"no Ogg page begins at byte {self._past_bytes}", "every byte is needed", todo)
        if head[:4] == b"OggS":
            return UnsupportedAudio(f"Ogg of version {head[4]} came", "version 0 is allowed", todo)
        return UnsupportedAudio(
            f"{container_headers.container_name(head) or 'something unknown'} came as ogg", allowed, todo
        )


def ogg_crc(data: bytes) -> int:
    """Ogg's checksum: zlib's polynomial with reversed bits, starting from 0."""
    crc = zlib.crc32(data.translate(_BITS_TURNED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int.from_bytes(crc.to_bytes(4, "big").translate(_BITS_TURNED), "little")


class OggOpusState(Enum):
    STREAM = "the page that begins a stream"
    TAGS = "OpusTags"
    MORE_TAGS = "the rest of the OpusTags"
    AUDIO = "audio"


class OggOpusDecoderState(msgspec.Struct, frozen=True):
    """State of an OggOpusDecoder, whose fields these are."""

    expects: OggOpusState
    stream: int
    next: int | None
    packet: bytes
    opus: OpusDecoderState
    skip: int
    past: int
    base: int | None


class OggOpusDecoder:
    """Pages of one Opus stream after another to samples.

    Out     (n,) float32, mono, 48 kHz, without each stream's pre-skip and the samples that its last page trims
    Raises  CorruptAudio, UnsupportedAudio
    """

    def __init__(self) -> None:
        self._expects = OggOpusState.STREAM
        self._stream = 0
        self._next: int | None = None
        """Number of the next page. None: any, since a stream may be joined in the middle."""
        self._packet = b""
        """Parts so far of a packet that continues."""
        self._opus = OpusPacketDecoder()
        self._skip = self._past = 0
        """Samples still to skip; samples decoded."""
        self._base: int | None = None
        """Position of the first decoded sample, from the first page of audio."""

    def export_state(self) -> OggOpusDecoderState:
        return OggOpusDecoderState(
            self._expects,
            self._stream,
            self._next,
            self._packet,
            self._opus.export_state(),
            self._skip,
            self._past,
            self._base,
        )

    def import_state(self, state: OggOpusDecoderState) -> None:
        """Continues there. Call before the first page. Raises CorruptAudio."""
        self._expects, self._stream, self._next, self._packet = state.expects, state.stream, state.next, state.packet
        self._opus = OpusPacketDecoder.of(state.opus)
        self._skip, self._past, self._base = state.skip, state.past, state.base

    @property
    def has_pending_packet(self) -> bool:
        """Returns whether part of a packet waits for the rest."""
        return bool(self._packet)

    def decode_page(self, page: OggPage) -> np.ndarray:
        if page.begins_stream:
            rest = self.finish()
            self._begin(page)
            return rest
        self._expect_next(page)
        if self._expects is not OggOpusState.AUDIO:
            self._skip_tags(page)
            return np.zeros(0, np.float32)
        audio = [self._opus.decode(packet) for packet in self._packets(page)]
        if page.ends_stream:
            audio.append(self._opus.finish())
        pcm = np.concatenate(audio) if audio else np.zeros(0, np.float32)
        if self._base is None and page.position >= 0:
            self._base = 0 if page.ends_stream else max(0, page.position - self._past - len(pcm))
        end = len(pcm)
        if page.ends_stream:
            if page.position >= 0:
                end = min(end, max(0, page.position - (self._base or 0) - self._past))
            self._expects = OggOpusState.STREAM
        self._past += len(pcm)
        skipped = min(self._skip, len(pcm))
        self._skip -= skipped
        return pcm[skipped:end]

    def finish(self) -> np.ndarray:
        """Remaining samples of the decoder, for a stream that was not ended."""
        if self._expects is not OggOpusState.AUDIO:
            return np.zeros(0, np.float32)
        self._expects = OggOpusState.STREAM
        return self._opus.finish()[self._skip :]

    def _begin(self, page: OggPage) -> None:
        head = page.parts[0][0] if page.parts else b""
        allowed = "an Ogg stream with nothing but Opus in it is allowed"
        todo = "record Opus, or decode it and send s16le"
        if self._expects is not OggOpusState.STREAM:
            raise UnsupportedAudio("Ogg with several streams in it came", allowed, "take the Opus out: ffmpeg -map")
        if not head.startswith(b"OpusHead"):
            came = next((name for magic, name in _OTHERS if head.startswith(magic)), "something unknown")
            raise UnsupportedAudio(f"Ogg with {came} in it came", allowed, todo)
        if len(head) < 19 or len(page.parts) != 1 or not page.parts[0][1]:
            raise CorruptAudio("the OpusHead is no whole one", "RFC 7845 says what one looks like", todo)
        version, channels, skip, _, gain, mapping = struct.unpack_from("<BBHIhB", head, 8)
        if version > 15 or mapping or channels not in (1, 2):
            raise UnsupportedAudio(
                f"Opus of {channels} channels, version {version}, mapping {mapping} came",
                "1 or 2 channels, version 1, mapping 0 are allowed",
                "mix it down",
            )
        self._expects, self._stream, self._next = OggOpusState.TAGS, page.stream, page.number + 1
        self._opus, self._packet = OpusPacketDecoder(channels, gain), b""
        self._skip, self._past, self._base = skip, 0, None

    def _expect_next(self, page: OggPage) -> None:
        """Raise CorruptAudio unless `page` follows the previous one."""
        if self._expects is OggOpusState.STREAM or page.stream != self._stream:
            why = f"a page of Ogg stream {page.stream} came"
        elif self._next is not None and page.number != self._next:
            why = f"Ogg page {page.number} came where {self._next} was to come"
        elif self._next is not None and page.parts and page.continues != self._open:
            why = f"Ogg page {page.number} and the one before it cut a packet in different places"
        else:
            self._next = page.number + 1 & 0xFFFF_FFFF
            return
        raise CorruptAudio(why, f"{self._expects.value} was expected", "send every page once, in order")

    @property
    def _open(self) -> bool:
        return bool(self._packet) or self._expects is OggOpusState.MORE_TAGS

    def _skip_tags(self, page: OggPage) -> None:
        """Skip a page of OpusTags without storing it: tags may be long, with a picture in them."""
        if self._expects is OggOpusState.TAGS and not (page.parts and page.parts[0][0].startswith(b"OpusTags")):
            raise CorruptAudio("no OpusTags follow the OpusHead", "RFC 7845 wants them", "write the stream again")
        self._expects = OggOpusState.MORE_TAGS
        if page.parts and page.parts[-1][1]:
            self._expects, self._next = OggOpusState.AUDIO, None

    def _packets(self, page: OggPage) -> Iterator[bytes]:
        parts = page.parts
        if page.continues and not self._packet:
            parts = parts[1:]  # the beginning of this packet was sent before we joined
        for part, ends in parts:
            self._packet += part
            if len(self._packet) > MAX_PACKET_BYTES:
                raise CorruptAudio(
                    f"an Opus packet of more than {MAX_PACKET_BYTES} bytes came",
                    "none is longer",
                    "write the stream again",
                )
            if ends:
                packet, self._packet = self._packet, b""
                yield packet
