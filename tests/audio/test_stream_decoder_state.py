"""Decoders of live audio that continue where another one stopped."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

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
