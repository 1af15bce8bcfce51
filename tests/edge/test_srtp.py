"""SRTP: a vector of libsrtp's, keys as SDP has them, replays and forgeries, and ffmpeg as a sender."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pylibsrtp
import pytest
from children import Child
from hypothesis import given
from hypothesis import strategies as st
from rtp_sender import UNITS, RtpSender, l16_packets
from running_edge import RunningEdge
from running_server import WAIT_S, eventually
from test_edge_senders import signed

from asr_serve.audio import read_audio
from asr_serve.edge.rtp import DropReason
from asr_serve.edge.sdp import parse_sdp_key
from asr_serve.edge.srtp import MAX_SSRCS, SUITES, SrtpKey, SrtpReceiver, checked_key, parse_crypto
from asr_serve.errors import OptionError, UnsupportedOption

NOBODY = "http://127.0.0.1:9"
PROFILES = {
    "AES_CM_128_HMAC_SHA1_80": pylibsrtp.Policy.SRTP_PROFILE_AES128_CM_SHA1_80,
    "AES_CM_128_HMAC_SHA1_32": pylibsrtp.Policy.SRTP_PROFILE_AES128_CM_SHA1_32,
    "AEAD_AES_128_GCM": pylibsrtp.Policy.SRTP_PROFILE_AEAD_AES_128_GCM,
    "AEAD_AES_256_GCM": pylibsrtp.Policy.SRTP_PROFILE_AEAD_AES_256_GCM,
}
ENCODED = base64.b64encode(bytes(range(30))).decode()


def protector(key: SrtpKey) -> pylibsrtp.Session:
    policy = pylibsrtp.Policy(
        base64.b64decode(key.key), pylibsrtp.Policy.SSRC_ANY_OUTBOUND, srtp_profile=PROFILES[key.suite]
    )
    policy.allow_repeat_tx = True
    return pylibsrtp.Session(policy)


def packets(ssrc: int, count: int) -> list[bytes]:
    return l16_packets(np.linspace(-0.5, 0.5, count * UNITS, dtype=np.float32), ssrc)


def test_a_known_packet_is_decrypted() -> None:
    """Source: the validation of libsrtp's srtp_driver.c."""
    secret = bytes.fromhex("e1f97a0d3e018be0d64fa32c06de41390ec675ad498afeebb6960b3aabe6")
    encrypted = bytes.fromhex("800f1234decafbadcafebabe" + "4e55dc4ce79978d88ca4d215949d2402" + "b78d6acc99ea179b8dbb")
    receiver = SrtpReceiver(SrtpKey(key=base64.b64encode(secret).decode()))
    assert receiver.unprotect(encrypted) == bytes.fromhex("800f1234decafbadcafebabe") + b"\xab" * 16
    assert receiver.unprotect(encrypted) is DropReason.SRTP_REPLAY


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_in_any_order_and_once(suite: str, rng: np.random.Generator) -> None:
    key = checked_key(SrtpKey(suite=suite))
    plain = packets(5, 200)  # sequence numbers wrap around
    encrypted = [protector.protect(each) for protector in [protector(key)] for each in plain]
    order = np.argsort(np.arange(len(plain)) + rng.uniform(0, 20, len(plain)))
    receiver = SrtpReceiver(key)
    assert [receiver.unprotect(encrypted[n]) for n in order] == [plain[n] for n in order]
    assert {receiver.unprotect(each) for each in encrypted} == {DropReason.SRTP_REPLAY}
    other = SrtpReceiver(checked_key(SrtpKey(suite=suite)))
    assert {other.unprotect(each) for each in encrypted} == {DropReason.SRTP_AUTH}
    assert other.unprotect(plain[0]) is DropReason.SRTP_AUTH


@given(st.binary(max_size=60), st.integers(0, 255), st.integers(0, 255))
def test_no_datagram_raises(rest: bytes, first: int, second: int) -> None:
    assert isinstance(SrtpReceiver(SrtpKey(key=ENCODED)).unprotect(bytes([first, second]) + rest), DropReason)


def test_what_is_changed_is_no_packet_and_long_ones_are_none() -> None:
    key = SrtpKey(key=ENCODED)
    encrypted = protector(key).protect(packets(5, 1)[0])
    receiver = SrtpReceiver(key)
    for at in (1, 3, 8, 13, 300, len(encrypted) - 1):
        changed = encrypted[:at] + bytes([encrypted[at] ^ 1]) + encrypted[at + 1 :]
        assert receiver.unprotect(changed) is DropReason.SRTP_AUTH
    assert receiver.unprotect(encrypted + bytes(2_000)) is DropReason.MALFORMED
    assert receiver.unprotect(b"\x80\xc8" + encrypted[2:]) is DropReason.RTCP
    assert receiver.unprotect(encrypted) == packets(5, 1)[0]


def test_senders_within_a_session_are_bounded_and_strangers_take_no_place() -> None:
    key = SrtpKey(key=ENCODED)
    sending, receiver = protector(key), SrtpReceiver(key)
    for ssrc in range(100):
        assert isinstance(receiver.unprotect(packets(1_000 + ssrc, 1)[0]), DropReason)
    found = [receiver.unprotect(sending.protect(packets(ssrc, 1)[0])) for ssrc in range(MAX_SSRCS + 2)]
    assert [isinstance(each, bytes) for each in found] == [True] * MAX_SSRCS + [False] * 2
    assert found[-1] is DropReason.JUMP


def test_keys_are_checked_made_and_not_shown() -> None:
    for suite, size in SUITES.items():
        made = checked_key(SrtpKey(suite=suite))
        assert len(base64.b64decode(made.key)) == size
        assert made.key not in repr(made)
        assert checked_key(made) is made
    for wrong in (SrtpKey(key="x"), SrtpKey(key="!!!!"), SrtpKey(suite="AEAD_AES_256_GCM", key=ENCODED)):
        with pytest.raises(OptionError, match="bytes of key and salt"):
            checked_key(wrong)
    with pytest.raises(UnsupportedOption, match="AES_CM_128_HMAC_SHA1_80"):
        checked_key(SrtpKey(suite="AES_CM_128_HMAC_SHA1_8"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{ENCODED}", True),
        (f"a=crypto:1 AES_CM_128_HMAC_SHA1_32 inline:{ENCODED}|2^31", True),
        (f"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{ENCODED}|2^31|1:4", False),  # a master key identifier
        (f"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{ENCODED};inline:{ENCODED}", False),
        (f"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{ENCODED} UNENCRYPTED_SRTP", False),
        ("a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:short", False),
        (f"a=crypto:1 F8_128_HMAC_SHA1_80 inline:{ENCODED}", False),
    ],
)
def test_crypto_of_an_sdp(line: str, found: bool) -> None:
    key = parse_crypto(line)
    assert (key is not None and key.key == ENCODED) == found
    sdp = f"v=0\r\nm=audio 1 RTP/SAVP 0\r\na=crypto:9 NULL inline:{ENCODED}\r\n{line}\r\nm=video 2 RTP/AVP 9\r\n"
    if found:
        assert parse_sdp_key(sdp) == key
    else:
        with pytest.raises(OptionError, match="a=crypto"):
            parse_sdp_key(sdp)
    assert parse_sdp_key(f"v=0\nm=audio 1 RTP/AVP 0\nm=video 2 RTP/SAVP 9\n{line}\n") is None
    with pytest.raises(OptionError, match="a=crypto"):
        parse_sdp_key("m=audio 1 RTP/SAVPF 0")


@pytest.fixture
def edge() -> Iterator[RunningEdge]:
    made = RunningEdge(NOBODY)
    yield made
    for task in list(made.service._tasks.values()):
        made.call(task.cancel)
    made.close()


def test_a_session_is_encrypted_and_forgeries_do_not_become_its_source(edge: RunningEdge) -> None:
    created = edge.create(srtp=SrtpKey(suite="AEAD_AES_128_GCM"))
    assert created.srtp is not None
    assert created.ssrc is not None
    sending, forging = RtpSender(edge.driver.port), RtpSender(edge.driver.port)
    plain = packets(created.ssrc, 20)
    forging.send(plain)
    eventually(lambda: edge.describe(created.id).dropped.get("srtp_auth") == 20)
    session = protector(created.srtp)
    encrypted = [session.protect(each) for each in plain]
    sending.send([*encrypted, *encrypted[:5]])
    edge.taken(created.id, 20)
    state = edge.describe(created.id)
    eventually(lambda: edge.describe(created.id).dropped == {"srtp_auth": 20, "srtp_replay": 5})
    assert (state.encrypted, state.source, state.lost_packets) == (True, sending.source, 0)
    assert edge.metric("asr_serve_edge_dropped_packets_total", reason="srtp_auth") == 20
    sending.close()
    forging.close()


def test_an_edge_may_require_keys() -> None:
    edge = RunningEdge(NOBODY, require_srtp=True)
    with pytest.raises(OptionError, match="require_srtp"):
        edge.create()
    sdp = f"m=audio 1 RTP/SAVP 0\na=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{ENCODED}\n"
    assert edge.create(sdp=sdp).srtp == SrtpKey(key=ENCODED)
    with pytest.raises(OptionError, match="one of them"):
        edge.create(sdp=sdp, srtp=SrtpKey())
    edge.close()


@pytest.mark.parametrize("suite", ["AES_CM_128_HMAC_SHA1_80", "AES_CM_128_HMAC_SHA1_32"])
def test_ffmpeg_sends_srtp(edge: RunningEdge, cities: Path, suite: str) -> None:
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        pytest.skip("no ffmpeg: apt install ffmpeg")
    created = edge.create(srtp=SrtpKey(suite=suite))
    assert created.srtp is not None
    seconds = 2
    command = [ffmpeg, "-v", "error", "-re", "-t", str(seconds), "-i", str(cities), "-ac", "1", "-ar", "16000"]
    command += ["-c:a", "pcm_s16be", "-payload_type", "97", "-ssrc", signed(created.ssrc), "-f", "rtp"]
    command += ["-srtp_out_suite", suite, "-srtp_out_params", created.srtp.key]
    child = Child(
        [*command, f"srtp://127.0.0.1:{edge.driver.port}?pkt_size=600"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, errors = child.communicate(timeout=WAIT_S)
    assert child.returncode == 0, errors
    eventually(lambda: edge.describe(created.id).received_s == pytest.approx(seconds, abs=0.01))
    running = edge.service._by_id[created.id]
    edge.call(edge.service.end, created.id)
    heard = running.session.spool.read(0, 16_000)
    assert isinstance(heard, bytes)
    wanted = np.rint(read_audio(cities)[: len(heard) // 2] * 32_767)
    assert np.abs(np.frombuffer(heard, "<i2") - wanted).max() <= 2
