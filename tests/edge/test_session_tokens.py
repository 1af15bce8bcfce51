"""Sessions whose senders tell a token by RTCP: RTCP of any origin, tokens, and real senders."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from children import Child
from hypothesis import given
from hypothesis import strategies as st
from rtp_sender import UNITS, RtpSender, l16_packets
from running_edge import RunningEdge
from running_server import eventually

from asr_serve.edge import edge_service, session_tokens
from asr_serve.edge.edge_service import EdgeSessionCreated
from asr_serve.edge.rtcp import MAX_NAMES, SourceName, build_source_description, read_source_names
from asr_serve.edge.session_tokens import SessionTokens
from asr_serve.errors import OptionError

AUDIO = np.full(20 * UNITS, 0.25, np.float32)
NOBODY = "http://127.0.0.1:9"


# --- RTCP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"", b"a", b"ab", b"abc", b"abcd", bytes(range(1, 256))])
def test_a_name_is_read_as_it_was_written(name: bytes) -> None:
    packet = build_source_description(7, name)
    assert len(packet) % 4 == 0
    assert read_source_names(packet) == [SourceName(7, name)]


def test_names_of_other_senders() -> None:
    """ffmpeg's first packet of a stream; a chunk with other items and without any; one with too many names."""
    ffmpeg = "80c800063e97b0d5eeb35d3c92b020c407da11e1000000000000000081ca00043e97b0d50109544f4b454e2d61626300"
    assert read_source_names(bytes.fromhex(ffmpeg)) == [SourceName(0x3E97B0D5, b"TOKEN-abc")]
    chunks = b"\0\0\0\1\2\1n\1\3abc\0\0\0\0" + b"\0\0\0\2\0\0\0\0" + b"\0\0\0\3\1\1x\0"
    packet = b"\x83\xca" + (len(chunks) // 4).to_bytes(2, "big") + chunks
    assert read_source_names(packet) == [SourceName(1, b"abc"), SourceName(3, b"x")]
    assert len(read_source_names(build_source_description(1, b"a") * 9)) == MAX_NAMES


def test_what_is_broken_ends_the_reading() -> None:
    packet = build_source_description(7, b"token")
    for end in range(len(packet)):
        assert read_source_names(packet[:end]) == []
    assert read_source_names(packet + b"\x80") == [SourceName(7, b"token")]


@given(st.binary(max_size=80))
def test_any_bytes_are_read(data: bytes) -> None:
    assert all(len(name) <= 255 for _, name in read_source_names(b"\x9f\xca\0\x03" + data))
    read_source_names(data)


# --- tokens ------------------------------------------------------------------------------------------------


def test_tokens_are_good_for_one_sender_and_known_while_their_session_is() -> None:
    tokens = SessionTokens()
    one, other = tokens.issue(1), tokens.issue(2)
    assert one != other
    assert len(one) >= 32
    assert tokens.find(one.encode()) == 1
    assert tokens.find(one.encode()[:-1]) is None
    assert (tokens.use(1), tokens.use(1), tokens.are_awaited) == (True, False, True)
    assert tokens.find(one.encode()) == 1
    tokens.withdraw(1)
    tokens.withdraw(2)
    assert (tokens.find(one.encode()), tokens.are_awaited) == (None, False)


def test_addresses_that_are_wrong_too_often_are_not_listened_to_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_tokens, "MAX_WRONG", 3)
    monkeypatch.setattr(session_tokens, "MAX_ADDRESSES", 2)
    tokens = SessionTokens()
    for _ in range(3):
        assert tokens.allows(b"a", 0.0)
        tokens.note_wrong(b"a", 0.0)
    assert not tokens.allows(b"a", session_tokens.WRONG_S - 1)
    assert tokens.allows(b"a", session_tokens.WRONG_S)
    assert tokens.allows(b"b", 0.0)
    for address in (b"b", b"c"):
        tokens.note_wrong(address, 0.0)
    assert len(tokens._wrong) == 2


# --- sessions ----------------------------------------------------------------------------------------------


@pytest.fixture
def edge() -> Iterator[RunningEdge]:
    made = RunningEdge(NOBODY)
    yield made
    for task in list(made.service._tasks.values()):
        task.cancel()
    made.close()


def tell(sender: RtpSender, ssrc: int, session: EdgeSessionCreated) -> None:
    assert session.token is not None
    sender.send([build_source_description(ssrc, session.token.encode())])


def test_a_token_opens_its_session_to_one_sender(edge: RunningEdge) -> None:
    session, other = edge.create(token=True), edge.create(token=True)
    assert (session.ssrc, session.source) == (None, None)
    assert edge.describe(session.id).awaits_token
    sender, reports, thief = (RtpSender(edge.driver.port) for _ in range(3))
    elsewhere = RtpSender(edge.driver.port, "127.0.0.2", to="127.0.0.1")
    sender.send(l16_packets(AUDIO, 5))  # of nobody yet
    tell(reports, 5, session)  # from another port, as ffmpeg
    eventually(lambda: not edge.describe(session.id).awaits_token)
    elsewhere.send(l16_packets(AUDIO[:UNITS], 5))  # the SSRC is known, and the address is another
    sender.send(l16_packets(AUDIO, 5))
    edge.taken(session.id, 20)
    tell(thief, 6, session)  # it was used
    tell(reports, 5, session)
    tell(sender, 5, other)  # that SSRC is taken
    thief.send(l16_packets(AUDIO, 6))
    tell(thief, 7, other)
    eventually(lambda: not edge.describe(other.id).awaits_token)
    state = edge.describe(session.id)
    assert (state.ssrc, state.source, state.packets, state.dropped) == (5, sender.source, 20, {})
    assert edge.describe(other.id).packets == 0
    told = edge.events(session.id)[0]
    assert told == {"type": "token", "session": session.id, "ssrc": 5, "address": "127.0.0.1"}
    for each in (sender, reports, thief, elsewhere):
        each.close()


def test_wrong_tokens_are_counted_bounded_and_open_nothing(edge: RunningEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_tokens, "MAX_WRONG", 3)
    session = edge.create(token=True)
    guesser, caller = RtpSender(edge.driver.port, "127.0.0.3", to="127.0.0.1"), RtpSender(edge.driver.port)
    for number in range(5):
        guesser.send([build_source_description(9, b"%032d" % number)])
    tell(guesser, 9, session)  # too late
    metric = "asr_serve_edge_dropped_packets_total"
    eventually(lambda: edge.metric(metric, reason="unknown_token") == 6)
    assert edge.describe(session.id).awaits_token
    tell(caller, 9, session)
    eventually(lambda: not edge.describe(session.id).awaits_token)
    before = edge.metric(metric, reason="unknown_source")
    guesser.send([build_source_description(9, b"nobody waits any more")])
    eventually(lambda: edge.metric(metric, reason="unknown_source") == before + 1)
    guesser.close()
    caller.close()


def test_rtcp_of_a_flood_keeps_no_other_sender_out(edge: RunningEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than all may send together, from many ports. One of the callers may have the flood's hash."""
    for name, value in (("RTCP_PER_S", 0.001), ("RTCP_BURST", 20.0), ("RTCP_SOURCE_BURST", 5.0)):
        monkeypatch.setattr(edge_service, name, value)
    monkeypatch.setattr(edge_service, "RTCP_SOURCE_PER_S", 0.001)
    sessions = [edge.create(token=True) for _ in range(2)]
    flood = [RtpSender(edge.driver.port, "127.0.0.3", to="127.0.0.1") for _ in range(4)]
    for number in range(10):
        for each in flood:
            each.send([build_source_description(9, b"%032d" % number)])
    metric = "asr_serve_edge_dropped_packets_total"
    eventually(lambda: edge.metric(metric, reason="unknown_token") == 5)
    edge.call(edge.service.render_metrics)
    assert edge.metric(metric, reason="over_rate") == 35
    callers = [RtpSender(edge.driver.port, f"127.0.0.{4 + number}", to="127.0.0.1") for number in range(2)]
    for ssrc, (caller, session) in enumerate(zip(callers, sessions, strict=True)):
        tell(caller, ssrc, session)
    eventually(lambda: not all(edge.describe(session.id).awaits_token for session in sessions))
    for each in (*flood, *callers):
        each.close()


def test_a_session_that_ends_takes_its_token_along(edge: RunningEdge) -> None:
    session, sender = edge.create(token=True), RtpSender(edge.driver.port)
    edge.call(edge.service.end, session.id)
    waiting = edge.create(token=True)
    tell(sender, 5, session)
    eventually(lambda: edge.metric("asr_serve_edge_dropped_packets_total", reason="unknown_token") == 1)
    assert edge.describe(waiting.id).awaits_token
    for wrong in ({"ssrc": 1}, {"source": "127.0.0.1"}):
        with pytest.raises(OptionError) as refused:
            edge.create(token=True, **wrong)
        assert refused.value.param == "token"
    sender.close()


def ffmpeg(port: int, token: str) -> list[str]:
    tone = [
        "-v",
        "error",
        "-re",
        "-f",
        "lavfi",
        "-i",
        "sine",
        "-t",
        "2",
        "-ac",
        "1",
        "-ar",
        "8000",
        "-c:a",
        "pcm_mulaw",
    ]
    return ["ffmpeg", *tone, "-cname", token, "-f", "rtp", f"rtp://127.0.0.1:{port}?rtcpport={port}"]


def gstreamer(port: int, token: str) -> list[str]:
    """Four seconds: the first report comes after up to three."""
    source = "audiotestsrc num-buffers=200 samplesperbuffer=160 is-live=true ! audio/x-raw,rate=8000,channels=1"
    description = f'rtpbin name=rtp sdes="application/x-rtp-source-sdes,cname=(string){token}"'
    pipeline = (
        f"{description} {source} ! mulawenc ! rtppcmupay ! rtp.send_rtp_sink_0 "
        f"rtp.send_rtp_src_0 ! udpsink host=127.0.0.1 port={port} "
        f"rtp.send_rtcp_src_0 ! udpsink host=127.0.0.1 port={port} sync=false async=false"
    )
    return ["gst-launch-1.0", "-q", *pipeline.replace('"', "").split()]


@pytest.mark.parametrize("command", [ffmpeg, gstreamer])
def test_real_senders_tell_their_token(edge: RunningEdge, command: object) -> None:
    assert callable(command)
    session = edge.create(token=True)
    words = command(edge.driver.port, session.token)
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]}: apt install ffmpeg gstreamer1.0-tools gstreamer1.0-plugins-good")
    with Child(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            edge.taken(session.id, 30)
        finally:
            child.kill()  # gst-launch now and then never ends by itself
    state = edge.describe(session.id)
    assert state.ssrc is not None
    assert not state.awaits_token
