"""Comfort noise: the level and the spectrum of what was heard, the same however it is cut, and zeros where nothing is
known."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import soxr

from asr_serve.audio.comfort_noise import TAIL_S, WHITE_SAMPLES, ComfortNoise, ComfortNoiseState
from asr_serve.audio.stream_decoder import LiveDecoderState, create_live_decoder

TAIL_SAMPLES = round(TAIL_S * 16_000)


def line(level: float, samples: int = 16_000) -> np.ndarray:
    """Noise of a telephone line at 16 kHz: nothing above 4 kHz."""
    narrow = np.random.default_rng(3).standard_normal(samples // 2)
    return np.rint(32_768 * level * soxr.resample(narrow, 8_000, 16_000)).astype(np.float32) / 32_768


def band_levels_db(noise: np.ndarray) -> tuple[float, float]:
    """Levels below and above 4 kHz."""
    power = np.abs(np.fft.rfft(noise)) ** 2
    middle = len(power) // 2
    low, high = power[:middle].sum(), power[middle:].sum()
    return 10 * float(np.log10(low)), 10 * float(np.log10(high))


@pytest.mark.parametrize("level", [0.003, 0.03])
def test_it_has_the_level_and_the_band_of_the_line(level: float) -> None:
    heard, noise = line(level), ComfortNoise(16_000)
    noise.hear(heard)
    (low, high), (heard_low, heard_high) = band_levels_db(noise.make(16_000)), band_levels_db(heard)
    assert low == pytest.approx(heard_low, abs=1.5)
    assert high < heard_low - 10
    assert heard_high < heard_low - 10


def test_it_is_the_same_however_it_is_cut_and_where_it_was_exported() -> None:
    heard = line(0.01)
    whole = ComfortNoise(16_000)
    whole.hear(heard)
    expected = whole.make(WHITE_SAMPLES + 10_000)  # around the end of what it is made of
    assert np.array_equal(expected, np.rint(expected * 32_768) / 32_768)
    cut = ComfortNoise(16_000)
    for part in np.array_split(heard, 77):
        cut.hear(part)
    got, sizes = [], iter(np.random.default_rng(5).integers(1, 3_000, 1_000).tolist())
    while (rest := len(expected) - sum(map(len, got))) > 0:
        got.append(cut.make(min(rest, next(sizes))))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(cut.export_state()), type=ComfortNoiseState)
        cut = ComfortNoise(16_000)
        cut.import_state(state)
    assert np.array_equal(np.concatenate(got), expected)


def test_nothing_is_made_of_too_little_or_of_digital_silence() -> None:
    noise = ComfortNoise(16_000)
    assert not noise.make(500).any()
    noise.hear(line(0.1)[: TAIL_SAMPLES - 1])
    assert not noise.make(500).any()
    noise.hear(line(0.1)[:1])
    assert noise.make(500).any()
    noise.hear(np.zeros(TAIL_SAMPLES, np.float32))
    assert not noise.make(500).any()
    assert len(noise.make(0)) == 0


def test_a_session_goes_on_with_the_noise_that_it_heard() -> None:
    """Silence with noise, silence without, and a decoder that takes over between them."""
    decoder, other = create_live_decoder("s16le"), create_live_decoder("s16le")
    data = np.random.default_rng(3).integers(-300, 300, 16_000).astype("<i2").tobytes()
    decoder.decode(data)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(decoder.export_state()), type=LiveDecoderState)
    other.import_state(state)
    for noise in (True, False, True):
        made, again = decoder.decode_silence(4_000, noise=noise), other.decode_silence(4_000, noise=noise)
        assert np.array_equal(made, again)
        assert made.any() == noise
