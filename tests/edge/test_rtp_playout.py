"""Audio that is sent to callers: encoders undo the decoders, packets have an exact clock, and a stop is a stop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest
from running_server import WAIT_S

from asr_serve.audio.pcm import alaw_table, companding_codes, mulaw_table
from asr_serve.edge.payload_decoder import create_payload_decoder, payload_units
from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.rtp import RtpPacket, parse_rtp
from asr_serve.edge.rtp_playout import MAX_WAITING_PLAYS, CallPlayout, RtpSendStream
from asr_serve.errors import AtCapacity, SessionExpired, UnsupportedAudio

FORMATS = [PayloadFormat("PCMU", 8_000), PayloadFormat("PCMA", 8_000), PayloadFormat("G722", 8_000)]
FORMATS.append(PayloadFormat("opus", 48_000))


@pytest.mark.parametrize("table", [mulaw_table(), alaw_table()], ids=["mulaw", "alaw"])
def test_each_sample_gets_the_code_of_the_nearest_value(table: np.ndarray) -> None:
    codes = companding_codes(table)
    samples = np.arange(-32_768, 32_768).astype(np.int16)
    decoded = table[codes[samples.view(np.uint16)]]
    nearest = np.abs(table[None, :] - samples[::17, None] / 32_768).min(axis=1)
    assert np.allclose(np.abs(decoded[::17] - samples[::17] / 32_768), nearest, atol=1e-7)
    exact = np.rint(table * 32_768).clip(-32_768, 32_767).astype(np.int16)
    assert np.array_equal(table[codes[exact.view(np.uint16)]], table)


def packet_of(data: bytes) -> RtpPacket:
    packet = parse_rtp(data)
    assert isinstance(packet, RtpPacket)
    return packet


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.encoding)
def test_packets_of_20_ms_are_decoded_to_what_was_sent(form: PayloadFormat) -> None:
    stream, decoder = RtpSendStream(96, form), create_payload_decoder(form)
    seconds = np.arange(50 * stream.packet_samples) / stream.rate_hz
    tone = (8_000 * np.sin(2 * np.pi * 440 * seconds)).astype(np.int16)
    packets = [packet_of(stream.build_packet(part)) for part in np.split(tone, 50)]
    assert {payload_units(form, packet.payload) for packet in packets} == {form.clock_hz // 50}
    steps = {(after.timestamp - before.timestamp) % 2**32 for before, after in itertools.pairwise(packets)}
    assert steps == {form.clock_hz // 50}
    assert [packet.marker for packet in packets] == [True] + [False] * 49
    heard = np.concatenate([decoder.decode(bytes(packet.payload)) for packet in packets])
    assert len(heard) == form.rate_hz
    spectrum = np.abs(np.fft.rfft(heard[form.rate_hz // 4 : form.rate_hz // 4 * 3]))
    assert abs(np.argmax(spectrum) * 2 - 440) <= 2
    assert np.sqrt((heard**2).mean()) == pytest.approx(8_000 / 32_768 / np.sqrt(2), rel=0.1)


def test_a_pause_is_as_long_as_it_was_and_numbers_wrap_around() -> None:
    stream = RtpSendStream(0, FORMATS[0])
    stream._sequence, stream._timestamp = 65_535, 2**32 - 160
    first = packet_of(stream.build_packet(np.ones(30, np.int16)))  # a short one is filled up
    second = packet_of(stream.build_packet(np.ones(160, np.int16)))
    stream.skip(5)
    third = packet_of(stream.build_packet(np.ones(160, np.int16)))
    assert len(first.payload) == 160
    assert [(packet.sequence, packet.timestamp) for packet in (first, second, third)] == [
        *((65_535, 2**32 - 160), (0, 0), (1, 6 * 160))
    ]
    assert (second.marker, third.marker) == (False, True)


class Wire:
    def __init__(self) -> None:
        self.packets: list[RtpPacket] = []
        self.playout = CallPlayout(0, FORMATS[0], lambda data: self.packets.append(packet_of(data)))


async def pieces(*parts: np.ndarray) -> AsyncIterator[bytes]:
    for part in parts:
        yield part.astype("<i2").tobytes()


async def test_audio_is_played_in_turn_and_to_its_end() -> None:
    wire = Wire()
    loud, quiet = np.full(1_600, 8_000), np.full(800, 1_000)
    results = await asyncio.gather(
        wire.playout.play(pieces(loud[:7], loud[7:]), 8_000), wire.playout.play(pieces(quiet), 8_000)
    )
    await wire.playout.close()
    assert [(result.played_s, result.interrupted) for result in results] == [(0.2, False), (0.1, False)]
    levels = [float(mulaw_table()[np.frombuffer(packet.payload, np.uint8)].mean()) for packet in wire.packets[:15]]
    assert levels == pytest.approx([8_000 / 32_768] * 10 + [1_000 / 32_768] * 5, rel=0.05)


async def test_a_stop_drops_what_is_played_and_what_waits_and_later_audio_is_played() -> None:
    wire = Wire()
    endless = asyncio.create_task(wire.playout.play(pieces(*[np.full(8_000, 8_000)] * 60), 8_000))
    waiting = asyncio.create_task(wire.playout.play(pieces(np.full(800, 1_000)), 8_000))
    while not wire.packets:
        await asyncio.sleep(0.005)
    wire.playout.stop()
    first, second = await asyncio.gather(endless, waiting)
    sent = len(wire.packets)
    assert first.interrupted
    assert first.played_s == sent * 0.02
    assert (second.played_s, second.interrupted) == (0.0, True)
    later = await wire.playout.play(pieces(np.full(160, 500)), 8_000)
    assert (later.played_s, later.interrupted) == (0.02, False)
    assert len(wire.packets) == sent + 1
    await wire.playout.close()


async def test_a_source_that_fails_interrupts_only_itself() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield np.full(80_000, 8_000).astype("<i2").tobytes()
        raise ConnectionError

    wire, told = Wire(), []
    with pytest.raises(ConnectionError):
        await wire.playout.play(broken(), 8_000, told.append)
    assert [result.interrupted for result in told] == [True]
    with pytest.raises(UnsupportedAudio):
        await wire.playout.play(pieces(np.zeros(1)), 10)
    assert (await wire.playout.play(pieces(np.full(160, 500)), 16_000)).played_s == 0.01
    await wire.playout.close()


async def test_nothing_is_sent_while_the_other_side_does_not_listen() -> None:
    wire = Wire()
    wire.playout.is_paused = True
    playing = asyncio.create_task(wire.playout.play(pieces(np.full(1_600, 8_000)), 8_000))
    await asyncio.sleep(0.1)
    assert wire.packets == []
    wire.playout.resume()
    assert (await playing).played_s == 0.2
    wire.playout.change_stream(RtpSendStream(9, FORMATS[2]))
    assert (await wire.playout.play(pieces(np.full(320, 500)), 16_000)).played_s == 0.02
    assert wire.packets[-1].payload_type == 9
    await wire.playout.close()


async def quiet() -> AsyncIterator[bytes]:
    """Body that begins, and says nothing more."""
    yield np.full(160, 8_000).astype("<i2").tobytes()
    await asyncio.Event().wait()


async def test_a_quiet_body_is_ended_by_a_stop_and_by_the_end_of_the_call() -> None:
    wire = Wire()
    for end in (wire.playout.stop, wire.playout.close):
        playing = [asyncio.create_task(wire.playout.play(quiet(), 8_000)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert wire.playout.is_playing
        if (closing := end()) is not None:
            await closing
        assert [result.interrupted for result in await asyncio.wait_for(asyncio.gather(*playing), WAIT_S)] == [True] * 3
    with pytest.raises(SessionExpired):
        await wire.playout.play(quiet(), 8_000)


async def test_a_playout_that_fails_ends_what_it_plays() -> None:
    def fail(data: bytes) -> None:
        raise ValueError

    playout = CallPlayout(0, FORMATS[0], fail)
    result = await asyncio.wait_for(playout.play(pieces(np.full(80_000, 8_000)), 8_000), WAIT_S)
    assert result.interrupted
    with pytest.raises(SessionExpired):
        await playout.play(pieces(np.full(160, 500)), 8_000)
    await playout.close()


async def test_few_audios_wait_for_their_turn() -> None:
    wire = Wire()
    playing = [asyncio.create_task(wire.playout.play(quiet(), 8_000)) for _ in range(MAX_WAITING_PLAYS + 1)]
    await asyncio.sleep(0)
    with pytest.raises(AtCapacity):
        await wire.playout.play(quiet(), 8_000)
    wire.playout.stop()
    await asyncio.wait_for(asyncio.gather(*playing), WAIT_S)
    await wire.playout.close()
