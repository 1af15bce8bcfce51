"""RTP packets, parsed from datagrams of unknown origin. Source: RFC 3550, section 5.1 and appendix A; RFC 5761."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from asr_serve import kernels

VERSION = 2


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
    UNKNOWN_TOKEN = "unknown_token"
    """RTCP with a name that is no session's token."""
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
    SRTP_AUTH = "srtp_auth"
    """Packet that was not encrypted with the session's key: another key, a forgery, plain RTP, or damage."""
    SRTP_REPLAY = "srtp_replay"
    """Encrypted packet that came before, or is older than those that are remembered."""
    CHECKSUM = "checksum"
    """Damaged on its way; found here where the kernel did not look (AF_XDP)."""
    KERNEL = "kernel"
    """Dropped by the kernel, whose receive buffer or ring was full."""


class RtpPacket(NamedTuple):
    """RTP packet."""

    payload_type: int
    marker: bool
    sequence: int
    timestamp: int
    ssrc: int
    payload: bytes


_parse = kernels.packets().RtpParser(RtpPacket, DropReason.NOT_RTP, DropReason.MALFORMED, DropReason.RTCP)


def parse_rtp(datagram: memoryview | bytes) -> RtpPacket | DropReason:
    """Parses one datagram; for anything but RTP, returns the reason to drop it. Never raises."""
    parsed: RtpPacket | DropReason = _parse(datagram)
    return parsed


def build_rtp(packet: RtpPacket) -> bytes:
    """Encodes a packet without CSRC, extension and padding."""
    head = bytes((VERSION << 6, packet.marker << 7 | packet.payload_type))
    numbers = packet.sequence.to_bytes(2, "big") + packet.timestamp.to_bytes(4, "big") + packet.ssrc.to_bytes(4, "big")
    return head + numbers + packet.payload
