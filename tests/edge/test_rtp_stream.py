"""One caller's stream: samples out are samples in, whatever changes in between."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rtp_sender import UNITS, l16_packets

from asr_serve.audio.encode.packet_encoder import PacketEncoder
from asr_serve.edge.audio_spool import BLOCK_SAMPLES, AudioSpool
from asr_serve.edge.edge_events import DigitPressed, LossTold, StreamBegun
from asr_serve.edge.payload_format import parse_payload_types
from asr_serve.edge.rtp import DropReason, RtpPacket, parse_rtp
from asr_serve.edge.rtp_stream import RtpStream
from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput

FORMATS = parse_payload_types(
    {"96": "opus/48000/2", "97": "L16/16000", "98": "L16/44100", "101": "telephone-event/8000"}
)


def samples(audio: list[GateOutput]) -> np.ndarray:
    parts = [each.samples if isinstance(each, GatedSpeech) else np.zeros(each.count, np.int16) for each in audio]
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def play(stream: RtpStream, packets: list[bytes], start_s: float = 0.0) -> list[GateOutput]:
    out: list[GateOutput] = []
    for number, datagram in enumerate(packets):
        packet = parse_rtp(datagram)
        assert isinstance(packet, RtpPacket)
        stream.push(packet, start_s + number * 0.02)
        out += stream.advance(start_s + number * 0.02)
    return out


def check_account(stream: RtpStream, out: np.ndarray) -> None:
    whole = stream.received_s + stream.concealed_s + stream.silent_s
    assert len(out) == stream.position
    assert len(out) - stream.adjusted_samples == pytest.approx(whole * 16_000, abs=2)


def test_clean_samples_come_out_as_they_were() -> None:
    pcm = np.random.default_rng(1).uniform(-0.5, 0.5, 50 * UNITS).astype(np.float32)
    stream = RtpStream(FORMATS)
    out = samples(play(stream, l16_packets(pcm, 1)) + stream.finish())
    assert out.tolist() == np.rint(pcm * 32_767).astype(np.int16).tolist()
    check_account(stream, out)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_sample_is_accounted_for(data: st.DataObject) -> None:
    """Codecs that alternate, losses, digits, comfort noise, sources that change, in any order within the window."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    stream = RtpStream(FORMATS)
    sequence, timestamp, ssrc, now_s = chance.randrange(2**16), chance.randrange(2**32), 5, 0.0
    sent: list[tuple[float, RtpPacket]] = []
    kinds = data.draw(st.lists(st.sampled_from([0, 8, 9, 97, 98, 13, 101, -1, -2]), min_size=1, max_size=60))
    for kind in kinds:
        now_s += 0.02
        if kind == -1:
            sequence += chance.randrange(1, 4)
            timestamp += 160 * chance.randrange(0, 5)
            continue
        if kind == -2:
            ssrc, sequence, timestamp = ssrc + 1, chance.randrange(2**16), chance.randrange(2**32)
            continue
        payload = chance.randbytes({0: 160, 8: 160, 9: 160, 97: 640, 98: 1_764, 13: 1, 101: 4}[kind])
        packet = RtpPacket(kind, False, sequence % 2**16, timestamp % 2**32, ssrc, payload)
        sent.append((now_s + chance.uniform(0, 0.1), packet))
        sequence, timestamp = sequence + 1, timestamp + {97: 320, 98: 882}.get(kind, 160)
    out: list[GateOutput] = []
    for arrival_s, packet in sorted(sent, key=lambda each: each[0]):
        stream.push(packet, arrival_s)
        out += stream.advance(arrival_s)
    out += stream.finish()
    check_account(stream, samples(out))


def test_another_ssrc_needs_two_packets_and_begins_a_stream() -> None:
    pcm = np.full(20 * UNITS, 0.25, np.float32)
    stream = RtpStream(FORMATS)
    play(stream, l16_packets(pcm, 1))
    first, second, *rest = l16_packets(pcm, 2, sequence=5)
    lonely = parse_rtp(l16_packets(pcm, 9, sequence=77)[0])
    assert isinstance(lonely, RtpPacket)
    assert stream.push(lonely, 0.4) is DropReason.JUMP
    for number, datagram in enumerate([first, second, *rest]):
        packet = parse_rtp(datagram)
        assert isinstance(packet, RtpPacket)
        reason = stream.push(packet, 0.4 + number * 0.02)
        assert reason is (DropReason.JUMP if number == 0 else None)
    out = samples(stream.finish())
    begun = [(event.ssrc, event.reason) for event in stream.take_events() if isinstance(event, StreamBegun)]
    assert begun == [(1, "first"), (2, "ssrc")]
    assert stream.packets == 40
    assert stream.position == 40 * UNITS
    assert set(out.tolist()) == {8_192}


@pytest.mark.parametrize("pause_s", [0.4, 1.0])
def test_a_pause_before_another_ssrc_is_silence(pause_s: float) -> None:
    pcm, stream = np.full(50 * UNITS, 0.25, np.float32), RtpStream(FORMATS)
    play(stream, l16_packets(pcm, 1))
    for tick in range(int(pause_s * 50)):
        stream.advance(1.0 + tick * 0.02)
    play(stream, l16_packets(pcm, 2), 1.0 + pause_s)
    stream.finish()
    begun = [event.position_s for event in stream.take_events() if isinstance(event, StreamBegun)]
    assert begun == [0.0, pytest.approx(1.0 + pause_s, abs=0.001)]
    assert stream.silent_s == pytest.approx(pause_s, abs=0.001)


def test_a_second_sender_in_between_does_not_take_a_stream_over() -> None:
    own, foreign = (l16_packets(np.full(20 * UNITS, level, np.float32), ssrc) for ssrc, level in ((1, 0.25), (2, 0.5)))
    stream = RtpStream(FORMATS)
    play(stream, [each for pair in zip(own, foreign, strict=True) for each in pair])
    assert set(samples(stream.finish()).tolist()) <= {8_192}
    assert [event.ssrc for event in stream.take_events() if isinstance(event, StreamBegun)] == [1]
    assert stream.packets == 20


def test_a_loss_is_told_at_its_place_in_the_output() -> None:
    packets = l16_packets(np.full(50 * UNITS, 0.25, np.float32), 1)
    del packets[10:12]
    stream = RtpStream(FORMATS)
    play(stream, packets)
    stream.finish()
    (loss,) = (event for event in stream.take_events() if isinstance(event, LossTold))
    assert (loss.start_s, loss.end_s, loss.packets) == (0.2, 0.24, 2)
    assert stream.lost_packets == 2


def test_a_damaged_packet_after_a_loss_conceals_both() -> None:
    """The packet may hold the lost one too, as Opus' error correction, and cannot be read for it."""
    packets = PacketEncoder("opus_call", 24_000).encode(
        np.random.default_rng(0).normal(0, 3_000, 2_400).astype(np.int16)
    )
    stream, out = RtpStream(FORMATS), []
    for number, payload in ((0, packets[0]), (1, packets[1]), (2, packets[2]), (4, b"\x0b\x41")):
        stream.push(RtpPacket(96, False, number, number * 960, 1, payload), number * 0.02)
    out += stream.advance(0.5)
    stream.push(RtpPacket(96, False, 5, 5 * 960, 1, packets[3]), 0.5)
    out += stream.advance(1.0) + stream.finish()
    assert stream.lost_packets == 1
    assert stream.concealed_s >= 0.04
    check_account(stream, samples(out))


def test_a_key_is_told_once() -> None:
    stream = RtpStream(FORMATS)
    for number in range(6):
        stream.push(RtpPacket(101, not number, number, 1_000, 1, bytes([5, 10, 0, number])), 0.02 * number)
    stream.push(RtpPacket(101, True, 6, 2_000, 1, bytes([11, 10, 0, 1])), 1.0)
    stream.advance(2.0)
    assert [event.digit for event in stream.take_events() if isinstance(event, DigitPressed)] == ["5", "#"]


def test_keys_whose_packets_are_reordered_are_told_once() -> None:
    stream = RtpStream(FORMATS)
    for number, (key, sequence) in enumerate([(1, 0), (1, 1), (2, 3), (1, 2), (2, 4), (2, 5)]):
        stream.push(RtpPacket(101, False, sequence, key * 1_000, 1, bytes([key, 10, 0, 1])), 0.02 * number)
    assert [event.digit for event in stream.take_events() if isinstance(event, DigitPressed)] == ["1", "2"]


def test_hostile_packets_are_dropped_with_a_reason() -> None:
    stream = RtpStream(FORMATS)
    assert stream.push(RtpPacket(55, False, 1, 1, 1, b"x"), 0.0) is DropReason.UNKNOWN_PAYLOAD_TYPE
    assert stream.push(RtpPacket(96, False, 1, 1, 1, b""), 0.0) is DropReason.BAD_PAYLOAD
    assert stream.push(RtpPacket(97, False, 1, 1, 1, b"abc"), 0.0) is DropReason.BAD_PAYLOAD
    assert samples(stream.advance(1.0) + stream.finish()).size == 0


def test_a_drifting_clock_is_followed() -> None:
    """Three minutes of a sender whose second is 200 ppm longer than ours."""
    stream = RtpStream(FORMATS)
    payload = (np.sin(np.arange(UNITS) / 5) * 8_000).astype(">i2").tobytes()
    count = 0
    for number in range(180 * 50):
        arrival_s = number * 0.02 * (1 + 200e-6)
        stream.push(RtpPacket(97, False, number % 2**16, number * UNITS, 1, payload), arrival_s)
        count += len(samples(stream.advance(arrival_s)))
    count += len(samples(stream.finish()))
    assert stream.drift_ppm == pytest.approx(200, abs=10)
    assert count == 180 * 50 * UNITS + stream.adjusted_samples
    assert stream.adjusted_samples == pytest.approx(150 * 16_000 * 200e-6, rel=0.1)


def test_the_spool_reads_what_was_appended_and_is_bounded() -> None:
    spool, rng = AudioSpool(20_000), np.random.default_rng(3)
    whole: list[np.ndarray] = []
    noises: list[bool] = []
    """Whether a position is silence with the noise of what is there before it."""
    for _ in range(60):
        pcm = rng.integers(1, 1_000, rng.integers(1, 900)).astype(np.int16)
        silence = int(rng.integers(0, 3_000))
        noise = bool(rng.random() < 0.5)
        dropped = spool.append(GatedSpeech(pcm)) + spool.append(GatedSilence(silence, noise))
        noises += [False] * len(pcm) + [noise and not dropped] * silence
        whole += [np.zeros(len(pcm), np.int16) if dropped else pcm, np.zeros(silence, np.int16)]
    expected = np.concatenate(whole)
    assert spool.end == len(expected)
    assert spool.discarded_samples == sum(len(part) for part in whole[::2] if not part.any())
    assert spool.discarded_samples > 0
    assert np.count_nonzero(expected) <= 20_000
    at, got = 0, []
    while at < spool.end:
        part = spool.read(at, int(rng.integers(1, 5_000)))
        if isinstance(part, bytes):
            got.append(np.frombuffer(part, "<i2"))
        else:
            got.append(np.zeros(part.samples, np.int16))
            assert noises[at : at + part.samples] == [part.noise] * part.samples
        at += len(got[-1])
    assert np.concatenate(got).tolist() == expected.tolist()
    spool.trim(spool.end // 2)
    assert spool.end // 2 - 2 * BLOCK_SAMPLES - 60_000 <= spool.start <= spool.end // 2
    spool.trim(spool.end)
    assert spool.append(GatedSpeech(np.ones(20_000, np.int16))) == 0
