"""Decoders of live audio that continue where another one stopped."""

from __future__ import annotations

import io
import itertools

import av
import msgspec
import numpy as np
import pytest
from test_stream_decoder import encoded

from asr_serve.audio.stream_decoder import LiveDecoderState, create_live_decoder


@pytest.mark.parametrize(
    ("encoding", "rate_hz"),
    [("s16le", 16_000), ("s16le", 8_000), ("s16le", 44_100), ("mulaw", 8_000), ("alaw", 11_025)],
)
def test_a_decoder_continues_at_the_same_sample(encoding: str, rate_hz: int):
    chance = np.random.default_rng(rate_hz)
    data = chance.integers(0, 255, 2 * rate_hz).astype(np.uint8).tobytes()
    flushed = 2 * (rate_hz // 3) + 1  # in the middle of a sample
    alone = create_live_decoder(encoding, rate_hz)
    wanted = [alone.decode(data[:flushed]), alone.drain_resampler(), alone.decode(data[flushed:]), alone.finish()]
    decoder, found, at = create_live_decoder(encoding, rate_hz), [], 0
    while at < len(data):
        end = min(len(data), at + int(chance.integers(1, 3_000)))
        end = flushed if at < flushed < end else end
        found.append(decoder.decode(data[at:end]))
        if end == flushed:
            found.append(decoder.drain_resampler())
        at, state = end, msgspec.msgpack.encode(decoder.export_state())
        assert len(state) < 32_768
        decoder = create_live_decoder(encoding, rate_hz)
        decoder.import_state(msgspec.msgpack.decode(state, type=LiveDecoderState))
    found.append(decoder.finish())
    if decoder.is_pcm16:
        assert np.array_equal(np.concatenate(found), np.concatenate(wanted))
    else:
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), atol=2e-6)


@pytest.mark.parametrize("encoding", ["opus", "ogg"])
@pytest.mark.parametrize(("channels", "frame_ms", "kbit"), [(1, 20, 24), (2, 60, 64), (1, 2.5, 128), (1, 120, 8)])
def test_an_opus_decoder_continues_after_the_last_packets(encoding: str, channels: int, frame_ms: float, kbit: int):
    """At the same sample, and with the same values."""
    options = {"frame_duration": f"{frame_ms:g}", "b": f"{kbit}k", "vbr": "off"}
    data = encoded("libopus", "ogg", 48_000, 3.0, channels, 100_000, **options)
    if encoding == "opus":
        with av.open(io.BytesIO(data)) as container:
            pieces = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    else:
        cuts = [0, *sorted(np.random.default_rng(1).integers(1, len(data), 40)), len(data)]
        pieces = [data[start:end] for start, end in itertools.pairwise(cuts)]
    alone, decoder = create_live_decoder(encoding), create_live_decoder(encoding)
    wanted, found = [alone.decode(piece) for piece in pieces], []
    for number, piece in enumerate(pieces):
        found.append(decoder.decode(piece))
        if number % 7 == 0:
            state = msgspec.msgpack.encode(decoder.export_state())
            assert len(state) < 65_536
            decoder = create_live_decoder(encoding)
            decoder.import_state(msgspec.msgpack.decode(state, type=LiveDecoderState))
    found.append(decoder.finish())
    wanted.append(alone.finish())
    assert sum(map(len, found)) == sum(map(len, wanted))
    difference = np.concatenate(found) - np.concatenate(wanted)
    assert np.abs(difference).max() < 1e-4


@pytest.mark.parametrize(("encoding", "other"), [("opus", "ogg"), ("ogg", "s16le")])
def test_a_state_of_another_encoding_is_refused(encoding: str, other: str):
    with pytest.raises(ValueError, match=encoding):
        create_live_decoder(encoding).import_state(create_live_decoder(other).export_state())
