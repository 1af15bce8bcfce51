"""The reader of session descriptions that all of them share."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.edge.payload_format import STATIC_FORMATS, PayloadFormat
from asr_serve.edge.sdp import MalformedSdp, parse_sdp, read_formats, read_rtpmaps, read_sdp
from asr_serve.errors import OptionError

TEXT = """v=0\r
c=IN IP4 10.0.0.7\r
a=sendonly\r
m=audio 5004/2 RTP/AVP 0 111 18 72 300 x\r
c=IN IP4 10.0.0.8\r
a=rtpmap:111\topus/48000/2 \r
a=rtpmap:18 G729/8000\r
a=rtpmap:72 L16/16000\r
a=rtcp-mux\r
m=nonsense\r
a=sendrecv\r
m=video 0 RTP/SAVPF 98\r
"""


def test_lines_belong_to_their_section() -> None:
    whole = read_sdp(TEXT)
    audio, broken, video = whole.sections
    assert (whole.connections, list(whole.attributes)) == (["IN IP4 10.0.0.7"], ["sendonly"])
    assert (audio.kind, audio.port, audio.protocol, audio.connections) == (
        "audio",
        5_004,
        "RTP/AVP",
        ["IN IP4 10.0.0.8"],
    )
    assert "rtcp-mux" in audio.attributes
    assert (broken.kind, broken.media, list(broken.attributes)) == ("", "nonsense", ["sendrecv"])
    assert (video.is_secure, video.rejected, audio.is_secure, audio.rejected) == (True, True, False, False)


def test_formats_are_those_that_can_come_and_be_decoded() -> None:
    """72 would look like RTCP, 18 is not decoded, 300 is none."""
    audio = read_sdp(TEXT).sections[0]
    assert read_rtpmaps(audio) == {111: "opus/48000/2", 18: "G729/8000", 72: "L16/16000"}
    assert read_formats(audio) == {0: STATIC_FORMATS[0], 111: PayloadFormat("opus", 48_000)}


@pytest.mark.parametrize(
    "text", ["", "v=1", "v=0\nmedia", "v=0\nm=audio 1", "v=0\nm=audio 70000 RTP/AVP 0", "v=0\nm=au(dio 1 RTP/AVP 0"]
)
def test_a_strict_reader_refuses_what_a_lenient_one_passes_over(text: str) -> None:
    assert all(not section.kind or section.kind == "au(dio" for section in read_sdp(text).sections)
    with pytest.raises(MalformedSdp):
        read_sdp(text, strict=True)


def test_bounds() -> None:
    for text in ("v=0\n" + "m=audio 1 RTP/AVP 0\n" * 17, "x" * 20_000):
        with pytest.raises(MalformedSdp):
            read_sdp(text)
        with pytest.raises(OptionError) as refused:
            parse_sdp(text)
        assert refused.value.param == "sdp"


LINES = st.sampled_from([*TEXT.splitlines(), "m=", "a=", "c=", "a=rtpmap:", "a=crypto:1 x", "m=audio 1 RTP/SAVP 0"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(LINES, st.text(max_size=30)), max_size=30), st.booleans())
def test_any_text_is_read_or_refused(lines: list[str], strict: bool) -> None:
    with contextlib.suppress(MalformedSdp):
        for section in read_sdp("\n".join(lines), strict=strict).sections:
            assert set(read_formats(section)) <= set(range(64)) | set(range(96, 128))
