"""SIP messages: parsed as they are written, whatever their order and case, and nonsense is dropped, never believed."""

from __future__ import annotations

import random

import pytest

from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.sip.digest import DigestVerifier, answer_challenge, digest_response, find_challenge
from asr_serve.edge.sip.message import (
    MalformedSip,
    SipFrameSplitter,
    SipRequest,
    SipResponse,
    parse_address,
    parse_sip,
    parse_uri,
    respond_to,
    split_list,
)
from asr_serve.edge.sip.session_description import (
    UnusableSdp,
    build_answer,
    build_offer,
    choose_format,
    offered_formats,
    parse_audio,
)
from asr_serve.edge.srtp import SrtpKey, checked_key

INVITE = (
    b"INVITE sip:7001@10.0.0.5:5060 SIP/2.0\r\n"
    b"v: SIP/2.0/UDP 10.0.0.7:5060;rport;branch=z9hG4bK1, SIP/2.0/TCP [fd00::1];branch=z9hG4bK0\r\n"
    b'FROM: "O\\"Hara, Ann" <sip:ann@10.0.0.7>;tag=a1\r\n'
    b"t: <sip:7001@10.0.0.5>\r\n"
    b"i: abc@10.0.0.7\r\n"
    b"CSeq: 3\r\n INVITE\r\n"
    b"Record-Route: <sip:p1;lr>, <sip:p2;lr>\r\n"
    b"m: <sip:ann@10.0.0.7:5062;transport=udp>;expires=60\r\n"
    b"Subject: caf\xc3\xa9\r\n"
    b"l: 4\r\n\r\nv=0\nrest that is not of it"
)


def test_a_request_is_read_in_every_spelling_and_written_in_one() -> None:
    request = parse_sip(INVITE)
    assert isinstance(request, SipRequest)
    assert (request.method, request.uri, request.cseq) == ("INVITE", "sip:7001@10.0.0.5:5060", (3, "INVITE"))
    assert [str(via) for via in request.get_all("via")] == [
        "SIP/2.0/UDP 10.0.0.7:5060;rport;branch=z9hG4bK1",
        "SIP/2.0/TCP [fd00::1];branch=z9hG4bK0",
    ]
    assert (request.via.host, request.via.port, request.via.branch) == ("10.0.0.7", 5_060, "z9hG4bK1")
    assert (request.sender.name, request.sender.tag) == ('O"Hara, Ann', "a1")
    assert request.get_all("record-route") == ["<sip:p1;lr>", "<sip:p2;lr>"]
    assert parse_uri(parse_address(request.get("contact")).uri).transport == "udp"
    assert (request.get("subject"), request.body) == ("café", b"v=0\n")
    again = parse_sip(request.encode())
    assert isinstance(again, SipRequest)
    assert [header for header in again.headers if header[0] != "content-length"] == [
        header for header in request.headers if header[0] != "content-length"
    ]
    response = respond_to(request, 180, "b2")
    assert response.recipient.tag == "b2"
    read = parse_sip(response.encode())
    assert isinstance(read, SipResponse)
    assert (read.status, read.reason, read.get_all("via")) == (180, "Ringing", request.get_all("via"))


@pytest.mark.parametrize(
    ("change", "by"),
    [
        (b"INVITE sip:7001@10.0.0.5:5060 SIP/2.0", b"INVITE sip:7001@10.0.0.5:5060 HTTP/1.1"),
        (b"INVITE sip:7001@10.0.0.5:5060 SIP/2.0", b"INVITE  SIP/2.0"),
        (b"CSeq: 3\r\n INVITE", b"CSeq: 3 BYE"),
        (b"CSeq: 3\r\n INVITE", b"CSeq: 99999999999 INVITE"),
        (b"i: abc@10.0.0.7\r\n", b""),
        (b"i: abc@10.0.0.7\r\n", b"i: a\r\ni: b\r\n"),
        (b";tag=a1", b""),
        (b"l: 4", b"l: 40000"),
        (b"l: 4", b"l: 4\r\nContent-Length: 5"),
        (b"l: 4", b"l: -1"),
        (b"Subject: caf\xc3\xa9", b"Subject: caf\xe9"),
        (b"Subject: caf\xc3\xa9", b"Subject: a\x00b"),
        (b"Subject: caf\xc3\xa9", b"Subject: " + b"a" * 5_000),
        (b"Subject: caf\xc3\xa9\r\n", b"X: y\r\n" * 200),
        (b"Subject: caf\xc3\xa9\r\n", b"Route: <sip:a>" + b",<sip:a>" * 200 + b"\r\n"),
        (b"SIP/2.0/UDP 10.0.0.7:5060", b"SIP/2.0/UDP 10.0.0.7:99999"),
        (b"SIP/2.0/UDP 10.0.0.7:5060", b"SIP/2.0/UDP"),
        (b"t: <sip:7001@10.0.0.5>", b"t: <sip:7001"),
    ],
)
def test_a_message_that_is_none_is_refused(change: bytes, by: bytes) -> None:
    assert change in INVITE
    with pytest.raises(MalformedSip):
        parse_sip(INVITE.replace(change, by))


def test_mutilated_messages_raise_nothing_else() -> None:
    random_ = random.Random(26)
    parsed = 0
    for _ in range(3_000):
        data = bytearray(INVITE)
        for _ in range(random_.randrange(1, 6)):
            at = random_.randrange(len(data))
            match random_.randrange(4):
                case 0:
                    data[at] = random_.randrange(256)
                case 1:
                    del data[at : at + random_.randrange(1, 30)]
                case 2:
                    data[at:at] = random_.choice(
                        [b'"', b"<", b">", b",", b";", b"\r\n", b"\\", b"=", bytes([at % 256])]
                    )
                case 3:
                    data[at:at] = data[at : at + random_.randrange(1, 60)]
        try:
            message = parse_sip(bytes(data))
        except MalformedSip:
            continue
        parsed += 1
        assert parse_sip(message.encode()).headers[0][0] == message.headers[0][0]
        respond_to(message, 200, "t") if isinstance(message, SipRequest) else None
    assert 300 < parsed < 2_900


def test_a_stream_is_cut_where_messages_end() -> None:
    whole = parse_sip(INVITE).encode()
    data = b"\r\n\r\n" + whole + b"\r\n" + whole + whole
    for size in (1, 7, 100, len(data)):
        splitter = SipFrameSplitter()
        found = [message for at in range(0, len(data), size) for message in splitter.feed(data[at : at + size])]
        assert found == [whole] * 3
    with pytest.raises(MalformedSip):
        SipFrameSplitter().feed(b"A" * 70_000)
    with pytest.raises(MalformedSip):
        SipFrameSplitter().feed(b"INVITE sip:a SIP/2.0\r\nVia: x\r\n\r\n")
    with pytest.raises(MalformedSip):
        SipFrameSplitter().feed(b"INVITE sip:a SIP/2.0\r\nContent-Length: 999999\r\n\r\n")


@pytest.mark.parametrize(
    "wrong",
    [
        *("sip:bob@10.0.0.9?x\r\nX-Evil:1", "sip:bo\r\nb@10.0.0.9", "sip:b ob@10.0.0.9", "sip:b<o>b@10.0.0.9"),
        *("sip:bob@10.0.0.9;a=1\nX:1", 'sip:bob@10.0.0.9;a="x>"', "sip:bob@10.0.0.9;a b=1", "sip:a@b@10.0.0.9"),
        *("sip:bob@10.0.0.9?x@10.0.0.8", "sip:@10.0.0.9", "sip:b\u2028b@10.0.0.9", "sip:bob@10.0.0.9;a=\x7f"),
    ],
)
def test_a_uri_injects_nothing(wrong: str) -> None:
    with pytest.raises(MalformedSip):
        parse_uri(wrong)


def test_a_uri_is_written_as_it_was_read_without_its_headers() -> None:
    assert str(parse_uri("sip:*21?x;y=1@[::1]:5070;transport=tcp;lr?Subject=a%20b")) == (
        "sip:*21?x;y=1@[::1]:5070;transport=tcp;lr"
    )


def test_commas_in_quotes_and_brackets_separate_nothing() -> None:
    assert split_list('"a, b" <sip:x,y>;q="1,2", <sip:z> ,') == ['"a, b" <sip:x,y>;q="1,2"', "<sip:z>"]


def test_digests_are_those_of_the_standard() -> None:
    """Source: RFC 7616, section 3.9.1."""
    given = {
        "realm": "http-auth@example.org",
        "nonce": "7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v",
        "qop": "auth",
        "cnonce": "f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ",
        "nc": "00000001",
    }
    asked = ("Mufasa", "Circle of Life", "GET", "/dir/index.html")
    assert digest_response(*asked, algorithm="MD5", **given) == "8ca523f5e9506fed4657c9700eebdbec"
    wanted = "753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"
    assert digest_response(*asked, algorithm="SHA-256", **given) == wanted


@pytest.mark.parametrize("algorithm", ["SHA-256", "MD5"])
def test_credentials_are_verified_once_while_they_are_fresh(algorithm: str) -> None:
    verifier = DigestVerifier("desk", {"ann": "secret"})
    request = parse_sip(INVITE)
    assert isinstance(request, SipRequest)
    assert verifier.verify(request, 100.0) is False
    response = respond_to(request, 401, "x")
    response.headers += [("www-authenticate", each) for each in verifier.challenges(100.0) if algorithm in each]
    challenge = find_challenge(response)
    assert challenge is not None
    assert challenge.algorithm == algorithm

    def signed(user: str, password: str, count: int = 1) -> SipRequest:
        again = SipRequest(request.method, request.uri, request.headers, request.body)
        answer_challenge(again, challenge, user, password, count)
        return again

    good = signed("ann", "secret")
    assert verifier.verify(good, 101.0) == "ann"
    assert verifier.verify(good, 101.0) is True  # the same once more: a replay
    assert verifier.verify(signed("ann", "secret", 2), 101.0) == "ann"
    assert verifier.verify(signed("ann", "secret", 3), 300.0) is True  # stale
    assert verifier.verify(signed("ann", "wrong"), 101.0) is False
    assert verifier.verify(signed("bob", "secret"), 101.0) is False
    other = DigestVerifier("desk", {"ann": "secret"})
    assert other.verify(signed("ann", "secret"), 101.0) is True  # its nonce is of another process: ask again
    rewritten = signed("ann", "secret", 4)  # by a proxy
    rewritten.uri = "sip:9@10.0.0.5"
    assert verifier.verify(rewritten, 101.0) == "ann"
    forged = signed("ann", "secret", 5)
    forged.set("authorization", forged.get("authorization").replace('uri="sip:7001', 'uri="sip:7002'))
    assert verifier.verify(forged, 101.0) is False


def test_the_best_challenge_is_answered() -> None:
    request = parse_sip(INVITE)
    assert isinstance(request, SipRequest)
    response = respond_to(request, 407)
    response.add("proxy-authenticate", 'Basic realm="a"').add("proxy-authenticate", "Digest nonsense")
    assert find_challenge(response) is None
    response.add("proxy-authenticate", 'Digest realm="a, b", nonce="1", algorithm=SHA-512-256, qop="auth"')
    response.add("proxy-authenticate", 'Digest realm="a, b", nonce="2", qop="auth,auth-int"')
    response.add("proxy-authenticate", 'Digest realm="a, b", nonce="3", algorithm=SHA-256, stale=TRUE, opaque="o"')
    found = find_challenge(response)
    assert found == ("a, b", "3", "SHA-256", "", "o", True, "proxy-authorization")


OFFER = """v=0
o=- 1 1 IN IP4 10.0.0.7
s=-
c=IN IP4 10.0.0.7
t=0 0
m=video 6000 RTP/AVP 31
m=audio 5004/2 RTP/AVP 0 18 111 9 101
c=IN IP4 10.0.0.8
a=rtpmap:111 opus/48000/2
a=rtpmap:18 G729/8000
a=rtpmap:101 telephone-event/8000
a=ptime:30
a=sendrecv
m=audio 7000 RTP/SAVP 8
"""


def test_an_offer_is_answered_section_by_section() -> None:
    offer = parse_audio(OFFER)
    assert (offer.host, offer.port, offer.direction, offer.ptime_ms) == ("10.0.0.8", 5_004, "sendrecv", 30)
    assert list(offer.formats) == [0, 111, 9, 101]
    chosen = choose_format(offer)
    assert (chosen.payload_type, chosen.form.encoding, chosen.digits_type) == (111, "opus", 101)
    assert choose_format(offer, ("PCMA", "G722", "PCMU")).payload_type == 9
    with pytest.raises(UnusableSdp, match="PCMA"):
        choose_format(offer, ("PCMA",))
    answer = build_answer(offer, choose_format(offer, ("PCMU",)), "10.0.0.5", 5_004, session=1, version=2)
    sections = [line for line in answer.splitlines() if line.startswith("m=")]
    assert sections == ["m=video 0 RTP/AVP 31", "m=audio 5004 RTP/AVP 0 101", "m=audio 0 RTP/SAVP 8"]
    read = parse_audio(answer)
    assert (read.host, read.port) == ("10.0.0.5", 5_004)
    assert read.formats == {0: PayloadFormat("PCMU", 8_000), 101: PayloadFormat("telephone-event", 8_000)}


@pytest.mark.parametrize(
    ("direction", "answered", "held"),
    [
        ("sendrecv", "sendrecv", False),
        ("sendonly", "recvonly", True),
        ("recvonly", "sendonly", False),
        ("inactive", "inactive", True),
    ],
)
def test_hold_is_told_by_the_direction(direction: str, answered: str, held: bool) -> None:
    offer = parse_audio(OFFER.replace("a=sendrecv", f"a={direction}"))
    assert offer.is_held is held
    answer = build_answer(offer, choose_format(offer), "10.0.0.5", 5_004, session=1, version=1)
    assert parse_audio(answer).direction == answered
    assert parse_audio(OFFER.replace("10.0.0.8", "0.0.0.0")).is_held  # of RFC 2543


def test_our_offer_can_be_read_and_nonsense_cannot() -> None:
    offer = build_offer("fd00::5", 5_004, session=1, version=1)
    read = parse_audio(offer)
    assert read.host == "fd00::5"
    assert read.formats == offered_formats()
    for broken in (
        "",
        "v=0",
        OFFER.replace("m=audio", "m=image"),
        OFFER.replace("10.0.0.8", "pbx.example.org").replace("10.0.0.7", "224.0.0.1"),
        OFFER.replace("0 18 111 9 101", "18"),
        OFFER.replace("5004/2", "0"),
        OFFER + "m=audio 1 RTP/AVP 0\n" * 9,
        "x" * 20_000,
    ):
        with pytest.raises(UnusableSdp):
            parse_audio(broken)


def test_a_key_in_the_offer_is_answered_by_one_of_ours() -> None:
    theirs, ours = checked_key(SrtpKey()), checked_key(SrtpKey())
    other = "a=crypto:1 F8_128_HMAC_SHA1_80 inline:MTIzNDU2Nzg5QUJDREUwMTIzNDU2Nzg5QUJjZGVm"
    secure = OFFER.replace("5004/2 RTP/AVP", "5004 RTP/SAVP").replace(
        "a=ptime:30", f"{other}\na=crypto:7 {theirs.suite} inline:{theirs.key}|2^31"
    )
    offer = parse_audio(secure)
    assert (offer.key, offer.key_tag) == (theirs, "7")
    answer = build_answer(offer, choose_format(offer), "10.0.0.5", 5_004, session=1, version=1, key=ours)
    assert "m=audio 5004 RTP/SAVP 111 101\r\n" in answer
    assert parse_audio(answer).key == ours
    assert parse_audio(build_offer("10.0.0.5", 5_004, session=1, version=1, key=ours)).key == ours
    assert parse_audio(OFFER.replace("a=ptime:30", f"a=crypto:1 {theirs.suite} inline:{theirs.key}")).key is None
    with pytest.raises(UnusableSdp):
        parse_audio(secure.replace("a=crypto:7", "b=crypto:7"))
