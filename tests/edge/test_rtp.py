"""RTP parsing and payload formats: what the RFCs say, and datagrams that obey nothing."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve import kernels
from asr_serve.edge.payload_format import STATIC_FORMATS, PayloadFormat, parse_format, parse_payload_types
from asr_serve.edge.rtp import DropReason, RtpPacket, build_rtp, parse_rtp
from asr_serve.edge.sdp import parse_sdp
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.kernels import packets_reference


def header(first: int = 0x80, second: int = 0) -> bytes:
    return struct.pack(">BBHII", first, second, 7, 8, 9)


def test_a_plain_packet() -> None:
    assert parse_rtp(header(second=0x80 | 8) + b"abc") == RtpPacket(8, True, 7, 8, 9, b"abc")


def test_sources_extension_and_padding_are_no_payload() -> None:
    packet = header(0x80 | 0x20 | 0x10 | 2) + bytes(8) + struct.pack(">HH", 0xBEDE, 1) + bytes(4) + b"abc" + b"\0\0\3"
    parsed = parse_rtp(packet)
    assert isinstance(parsed, RtpPacket)
    assert parsed.payload == b"abc"


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", DropReason.NOT_RTP),
        (header()[:11], DropReason.NOT_RTP),
        (header(0x00) + b"abc", DropReason.NOT_RTP),  # STUN begins with zero bits
        (header(second=200) + bytes(20), DropReason.RTCP),
        (header(0x8F) + bytes(59), DropReason.MALFORMED),
        (header(0x90) + bytes(3), DropReason.MALFORMED),
        (header(0x90) + b"\0\0\xff\xff" + bytes(100), DropReason.MALFORMED),
        (header(0xA0) + b"\0", DropReason.MALFORMED),
        (header(0xA0) + b"\x02", DropReason.MALFORMED),
    ],
)
def test_what_is_no_packet_is_dropped_with_its_reason(datagram: bytes, reason: DropReason) -> None:
    assert parse_rtp(datagram) is reason


NATIVE, REFERENCE = (
    module.RtpParser(RtpPacket, DropReason.NOT_RTP, DropReason.MALFORMED, DropReason.RTCP)
    for module in (kernels.packets(), packets_reference)
)


@given(st.binary(max_size=40), st.integers(0x80, 0xBF), st.integers(0, 255))
def test_both_parsers_agree(rest: bytes, first: int, second: int) -> None:
    datagram = bytes([first, second]) + rest
    assert NATIVE(datagram) == REFERENCE(datagram)
    assert type(NATIVE(datagram)) is type(REFERENCE(datagram))


@given(st.binary(max_size=100), st.integers(0, 255))
def test_no_datagram_raises_or_reads_beyond_its_end(rest: bytes, first: int) -> None:
    datagram = bytes([first]) + rest
    parsed = parse_rtp(memoryview(datagram))
    if isinstance(parsed, RtpPacket):
        assert bytes(parsed.payload) in datagram[12:]


@given(
    st.integers(0, 63), st.booleans(), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
)
def test_what_is_built_is_parsed(kind: int, marker: bool, sequence: int, timestamp: int, ssrc: int) -> None:
    packet = RtpPacket(kind, marker, sequence, timestamp, ssrc, b"xyz")
    assert parse_rtp(build_rtp(packet)) == packet


def test_dynamic_types_are_added_to_the_static_ones() -> None:
    formats = parse_payload_types({"96": "opus/48000/2", "97": "L16/16000", "101": "telephone-event/8000"})
    assert formats[96] == PayloadFormat("opus", 48_000)
    assert (formats[96].rate_hz, formats[96].granule, formats[96].samples(960)) == (16_000, 3, 320)
    assert (formats[9].rate_hz, formats[9].samples(160)) == (16_000, 320)
    assert formats[97] == PayloadFormat("L16", 16_000)
    assert not formats[101].is_audio
    assert formats[0] == STATIC_FORMATS[0]


@pytest.mark.parametrize(
    "table",
    [
        {"96": "opus/16000"},
        {"96": "PCMU/16000"},
        {"96": "L16/1"},
        {"96": "L16"},
        {"96": "PCMA/8000/2"},
        {"128": "opus/48000"},
        {"72": "opus/48000"},
        {"x": "opus/48000"},
        {str(kind): "L16/8000" for kind in range(40)},
    ],
)
def test_wrong_payload_types_are_refused(table: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        parse_payload_types(table)


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UnsupportedOption, match="G722"):
        parse_format("G7222/8000")


def test_an_sdp_names_payload_types() -> None:
    sdp = "\r\n".join(
        [
            *("v=0", "m=video 9 RTP/AVP 98", "a=rtpmap:98 H264/90000"),
            *("m=audio 5004 RTP/AVP 0 111 101 99", "a=rtpmap:111 opus/48000/2", "a=rtpmap:99 G729/8000"),
            *("a=rtpmap:101 telephone-event/8000", "m=audio 6 RTP/AVP 8"),
        ]
    )
    assert parse_sdp(sdp) == {
        0: STATIC_FORMATS[0],
        111: PayloadFormat("opus", 48_000),
        101: PayloadFormat("telephone-event", 8_000),
    }
    with pytest.raises(OptionError, match="m=audio"):
        parse_sdp("v=0\r\nm=audio 1 RTP/AVP 99\r\na=rtpmap:99 G729/8000")
