"""RTP packets, parsed from datagrams of unknown origin. Source: RFC 3550, section 5.1 and appendix A; RFC 5761."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

HEADER_BYTES = 12
VERSION = 2
RTCP_TYPES = range(64, 96)
"""Payload types, without the marker bit, that RTCP on the same port looks like (RFC 5761, section 4)."""


class DropReason(StrEnum):
    """Reason why a datagram or packet was dropped, as metrics count it."""

    NOT_RTP = "not_rtp"
    """Too short, or of another version: STUN, DTLS, noise."""
    MALFORMED = "malformed"
    """Lengths within the header that go beyond the datagram."""
    RTCP = "rtcp"
    UNKNOWN_SOURCE = "unknown_source"
    """No session expects this source or SSRC."""
    OVER_RATE = "over_rate"
    """More packets per second than a source may send."""
    TRUNCATED = "truncated"
    """Longer than a receive buffer."""
    UNKNOWN_PAYLOAD_TYPE = "unknown_payload_type"
    BAD_PAYLOAD = "bad_payload"
    """Bytes that are not of the format that its payload type names."""
    DUPLICATE = "duplicate"
    LATE = "late"
    """Arrival after its place was concealed."""
    JUMP = "jump"
    """A sequence number or SSRC far from the stream's that nothing confirmed."""
    KERNEL = "kernel"
    """Dropped by the kernel, whose receive buffer was full."""


class RtpPacket(NamedTuple):
    """RTP packet. `payload` shares the datagram's memory until it is copied."""

    payload_type: int
    marker: bool
    sequence: int
    timestamp: int
    ssrc: int
    payload: memoryview | bytes


def parse_rtp(datagram: memoryview | bytes) -> RtpPacket | DropReason:
    """Parses one datagram; for anything but RTP, returns the reason to drop it. Never raises."""
    length = len(datagram)
    if length < HEADER_BYTES or datagram[0] >> 6 != VERSION:
        return DropReason.NOT_RTP
    first, second = datagram[0], datagram[1]
    if second & 0x7F in RTCP_TYPES:
        return DropReason.RTCP
    start = HEADER_BYTES + 4 * (first & 0x0F)
    if first & 0x10:
        if start + 4 > length:
            return DropReason.MALFORMED
        start += 4 + 4 * (datagram[start + 2] << 8 | datagram[start + 3])
    end = length
    if first & 0x20:
        padding = datagram[length - 1]
        if not padding:
            return DropReason.MALFORMED
        end -= padding
    if start > end:
        return DropReason.MALFORMED
    return RtpPacket(
        second & 0x7F,
        second >= 0x80,
        datagram[2] << 8 | datagram[3],
        int.from_bytes(datagram[4:8], "big"),
        int.from_bytes(datagram[8:12], "big"),
        datagram[start:end],
    )


def build_rtp(packet: RtpPacket) -> bytes:
    """Encodes a packet without CSRC, extension and padding."""
    head = bytes((VERSION << 6, packet.marker << 7 | packet.payload_type))
    numbers = packet.sequence.to_bytes(2, "big") + packet.timestamp.to_bytes(4, "big") + packet.ssrc.to_bytes(4, "big")
    return head + numbers + bytes(packet.payload)
