"""Offers, answers, the inbox of a call and the ICE-lite agent: without a server, and without packets on a network."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.errors import AsrServeError, OptionError, UnsupportedOption
from asr_serve.server.realtime.openai.conversation import TrackMessage
from asr_serve.server.realtime.webrtc.call_inbox import MAX_AUDIO_SAMPLES, MAX_EVENTS, CallInbox
from asr_serve.server.realtime.webrtc.offer_answer import Answer, Candidate, Fingerprint, parse_offer, write_answer

FINGERPRINT = ":".join(["AB"] * 32)
OFFER = f"""v=0
o=- 4611 2 IN IP4 127.0.0.1
s=-
t=0 0
a=group:BUNDLE 0 1 2
a=ice-ufrag:abcd
a=ice-pwd:{"p" * 24}
a=fingerprint:sha-256 {FINGERPRINT}
m=video 9 UDP/TLS/RTP/SAVPF 96
a=mid:0
a=rtpmap:96 VP8/90000
m=audio 9 UDP/TLS/RTP/SAVPF 63 111 9 0 8
a=mid:1
a=setup:actpass
a=rtcp-mux
a=sendrecv
a=rtpmap:63 red/48000/2
a=rtpmap:111 opus/48000/2
m=application 9 UDP/DTLS/SCTP webrtc-datachannel
a=mid:2
a=sctp-port:5001
a=max-message-size:262144
"""
ANSWER = Answer(
    session_id=7,
    candidates=(Candidate("192.0.2.1", 8_000), Candidate("2001:db8::1", 8_000)),
    ice_ufrag="ufrag678",
    ice_pwd="q" * 24,
    fingerprints=(Fingerprint("sha-256", FINGERPRINT),),
    ssrc=None,
    cname="rtc_1",
)


def test_an_answer_takes_audio_and_events_and_rejects_the_rest():
    offer = parse_offer(OFFER)
    assert (offer.payload_type, offer.format.encoding, offer.sctp_port) == (111, "opus", 5_001)
    answer = write_answer(offer, ANSWER)
    session, video, audio, channel = answer.split("m=")
    assert "a=ice-lite\r\n" in session
    assert "a=group:BUNDLE 1 2\r\n" in session
    assert video.startswith("video 0 UDP/TLS/RTP/SAVPF 96\r\n")
    assert audio.startswith("audio 8000 UDP/TLS/RTP/SAVPF 111\r\nc=IN IP4 192.0.2.1\r\na=mid:1\r\n")
    for line in ("a=setup:passive", "a=recvonly", "a=rtcp-mux", "a=fmtp:111 minptime=10;useinbandfec=1"):
        assert f"{line}\r\n" in audio
    priorities = [int(line.split()[3]) for line in audio.splitlines() if line.startswith("a=candidate")]
    assert len(priorities) == 2
    assert priorities == sorted(priorities, reverse=True)
    assert channel.startswith("application 8000 UDP/DTLS/SCTP webrtc-datachannel\r\n")
    assert "a=sctp-port:5000\r\n" in channel


@pytest.mark.parametrize(
    ("old", "new", "encoding"),
    [("111 opus", "111 vorbis", "G722"), (" 63 111 9 0 8", " 0", "PCMU"), (" 63 111 9 0 8", " 8 0", "PCMU")],
)
def test_without_opus_the_best_of_the_others_is_taken(old: str, new: str, encoding: str):
    offer = parse_offer(OFFER.replace(old, new))
    assert offer.format.encoding == encoding
    assert f"a=rtpmap:{offer.payload_type} {encoding}/8000" in write_answer(offer, ANSWER)


def test_an_offer_of_one_who_waits_for_the_handshake_is_answered_actively():
    assert "a=setup:active" in write_answer(parse_offer(OFFER.replace("actpass", "passive")), ANSWER)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (" 63 111 9 0 8", " 63 101", UnsupportedOption),
        ("UDP/TLS/RTP/SAVPF 63", "RTP/AVP 63", UnsupportedOption),
        ("a=rtcp-mux", "a=rtcp:9", UnsupportedOption),
        ("a=sendrecv", "a=inactive", OptionError),
        ("a=ice-pwd:p", "a=ice-pwd:!", OptionError),
        ("sha-256", "md5", OptionError),
        ("a=setup:actpass", "a=setup:holdconn", OptionError),
        ("a=sctp-port:5001", "a=sctp-port:99999", OptionError),
        ("a=sctp-port:5001", f"a=sctp-port:{5_001:030}", OptionError),
        ("BUNDLE 0 1 2", "BUNDLE 0 1", UnsupportedOption),
        ("m=audio 9", "m=audio 0", OptionError),
    ],
)
def test_what_cannot_be_answered_is_refused(old: str, new: str, error: type[OptionError]):
    assert old in OFFER
    with pytest.raises(error) as refused:
        parse_offer(OFFER.replace(old, new, 1))
    assert refused.value.param == "sdp"


LINES = st.sampled_from([*OFFER.splitlines(), "", "m=audio", "a=", "x", "m=audio 9 UDP/TLS/RTP/SAVPF", "a=mid:\x0b1"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(LINES, st.text(max_size=40)), max_size=40), st.booleans())
def test_any_text_is_answered_or_refused(lines: list[str], begins: bool):
    with contextlib.suppress(AsrServeError):
        answer = write_answer(parse_offer("\n".join([*(["v=0"] if begins else []), *lines])), ANSWER)
        assert all(line[1:2] == "=" for line in answer.split("\r\n")[:-1])  # nothing of an offer breaks a line


# --- the inbox --------------------------------------------------------------------------------------------------------


async def drained(inbox: CallInbox) -> list[dict[str, object]]:
    inbox.put_end(1_000, finish=True)
    messages = []
    while (message := await asyncio.wait_for(inbox.receive(), 5))["type"] != "websocket.disconnect":
        messages.append(dict(message))
    return messages


def samples(messages: list[dict[str, object]]) -> int:
    return sum(len(bytes(each["audio"])) // 2 for each in messages if each["type"] == TrackMessage.AUDIO)  # type: ignore[call-overload]


async def test_audio_events_and_silence_come_out_in_order():
    inbox = CallInbox()
    inbox.put_audio(b"\x01\x00" * 320)
    inbox.put_audio(b"\x02\x00" * 320)
    assert inbox.put_event("commit")
    inbox.put_silence(40_000)
    inbox.put_loss(640, 960, 1)
    messages = await drained(inbox)
    kinds = [each["type"] for each in messages]
    audio, text = TrackMessage.AUDIO, "websocket.receive"
    assert kinds == [audio, text, audio, audio, audio, TrackMessage.LOSS, TrackMessage.ENDED]
    assert samples(messages) == inbox.position_samples == 40_640


async def test_audio_that_nobody_reads_keeps_its_length_and_not_its_bytes():
    inbox = CallInbox()
    for _ in range(3 * MAX_AUDIO_SAMPLES // 16_000):
        inbox.put_audio(b"\x01\x00" * 16_000)
    messages = await drained(inbox)
    told = [each for each in messages if each["type"] == TrackMessage.LOSS]
    assert samples(messages) == inbox.position_samples == 3 * MAX_AUDIO_SAMPLES
    assert sum(bytes(each["audio"]).count(b"\x01") for each in messages if "audio" in each) == MAX_AUDIO_SAMPLES  # type: ignore[call-overload]
    assert [(each["start_samples"], each["end_samples"], each["packets"]) for each in told] == [
        (MAX_AUDIO_SAMPLES, 3 * MAX_AUDIO_SAMPLES, 0)
    ]


async def test_events_are_bounded():
    inbox = CallInbox()
    taken = [inbox.put_event("x") for _ in range(MAX_EVENTS + 9)]
    assert Counter(taken) == {True: MAX_EVENTS, False: 9}
    assert not inbox.put_event("x" * (2 << 20))
    assert len(await drained(inbox)) == MAX_EVENTS + 1
    assert inbox.put_event("x")  # there is room again


# --- the ICE-lite agent ---------------------------------------------------------------------------------------------


async def test_a_port_knows_its_calls_by_their_checks_and_forgets_them():
    pytest.importorskip("aioice", reason="aiortc is not installed: pip install 'asr-serve[webrtc]'")
    from aioice import stun

    from asr_serve.server.realtime.webrtc.ice_lite import MAX_ADDRESSES, MAX_WAITING_DATAGRAMS, UdpPort

    dropped: Counter[str] = Counter()
    port = UdpPort(lambda reason: dropped.update([reason]))
    one, two = port.register(), port.register()
    one.remote_ufrag = "theirs"

    def check(ufrag: str, password: str, *flags: str) -> bytes:
        message = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
        message.attributes["USERNAME"] = f"{ufrag}:theirs"
        for flag in flags:
            message.attributes[flag] = None if flag == "USE-CANDIDATE" else 7
        message.add_message_integrity(password.encode())
        return bytes(message)

    home, away = ("192.0.2.7", 1_000), ("192.0.2.8", 2_000)
    port.datagram_received(b"\x80media", home)
    assert dropped == {"unknown_source": 1}
    port.datagram_received(check(one.ufrag, one.password), home)
    assert one.state == "new"
    port.datagram_received(check(one.ufrag, one.password, "USE-CANDIDATE"), away)
    assert (one.state, one.selected) == ("completed", away)
    port.datagram_received(b"\x80media", home)  # from where it was checked, whether or not that was nominated
    assert await one.recv() == b"\x80media"
    port.datagram_received(check(one.ufrag, two.password), home)
    port.datagram_received(check(two.ufrag, one.password), home)
    port.datagram_received(check("nobody", one.password), home)
    assert (dropped["bad_check"], dropped["unknown_call"]) == (2, 1)
    port.datagram_received(check(two.ufrag, two.password, "USE-CANDIDATE"), away)  # its owner proves it now
    assert (two.selected, one.selected) == (away, None)
    for number in range(2 * MAX_ADDRESSES):
        port.datagram_received(check(one.ufrag, one.password), ("192.0.2.9", 3_000 + number))
    assert port.addresses == MAX_ADDRESSES + 1
    for _ in range(MAX_WAITING_DATAGRAMS + 3):
        port.datagram_received(b"\x80media", away)
    assert dropped["full"] == 3
    one.close()
    two.close()
    assert (port.calls, port.addresses) == (0, 0)
    with pytest.raises(ConnectionError):
        await one.recv()
    with pytest.raises(ConnectionError):
        await two.send(b"late")


def test_addresses_of_a_port():
    pytest.importorskip("aioice", reason="aiortc is not installed: pip install 'asr-serve[webrtc]'")
    from asr_serve.server.realtime.webrtc.ice_lite import local_candidates

    assert local_candidates("127.0.0.1", 5, ()) == (Candidate("127.0.0.1", 5),)
    assert local_candidates("0.0.0.0", 5, ("203.0.113.7",)) == (Candidate("203.0.113.7", 5),)
    everywhere = local_candidates("0.0.0.0", 5, ())
    assert everywhere
    assert all(":" not in each.address for each in everywhere)
    assert Candidate("0.0.0.0", 5) not in everywhere
