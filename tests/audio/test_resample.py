"""The resampler's clock: exact length, no shift, any chunking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ, Resampler
from asr_serve.errors import UnsupportedAudio
from asr_serve.units import resampled_samples

RATES_HZ = (1_000, 7_919, 8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000)


def resample(samples: np.ndarray, rate_hz: int, cuts: list[int] | None = None) -> np.ndarray:
    resampler = Resampler(rate_hz)
    out = [resampler.resample(piece) for piece in np.split(samples, sorted(cuts or []))]
    return np.concatenate([*out, resampler.finish()])


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(RATES_HZ), st.integers(0, 6_000), st.integers(0, 2**32 - 1))
def test_any_chunking_gives_the_samples_of_one_piece(data, rate_hz, samples, seed):
    noise = np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)
    cuts = data.draw(st.lists(st.integers(0, samples), max_size=12))
    whole = resample(noise, rate_hz)
    assert len(whole) == resampled_samples(samples, rate_hz)
    np.testing.assert_array_equal(resample(noise, rate_hz, cuts), whole)


@settings(max_examples=60, deadline=None)
@given(st.integers(MIN_RATE_HZ, MAX_RATE_HZ), st.integers(0, 3_000), st.integers(0, 3_000))
def test_the_length_is_exact_at_every_rate(rate_hz, first, second):
    resampler = Resampler(rate_hz)
    given_early = len(resampler.resample(np.ones(first, np.float32))) + len(
        resampler.resample(np.ones(second, np.float32))
    )
    assert given_early <= (first + second) * 16_000 // rate_hz
    assert given_early + len(resampler.finish()) == resampled_samples(first + second, rate_hz)
    assert resampler.output_samples == resampled_samples(first + second, rate_hz)


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_an_impulse_stays_where_it_was(rate_hz):
    for at in (0, rate_hz // 7, rate_hz, 2 * rate_hz - 1):
        click = np.zeros(2 * rate_hz, np.float32)
        click[at] = 1.0
        found = int(np.abs(resample(click, rate_hz, [rate_hz // 3, rate_hz])).argmax())
        assert abs(found - at * 16_000 / rate_hz) <= 1


@pytest.mark.parametrize("rate_hz", [7_919, 11_025, 44_100])
def test_no_drift_over_half_an_hour(rate_hz):
    resampler = Resampler(rate_hz)
    second = np.zeros(rate_hz, np.float32)
    before = sum(len(resampler.resample(second)) for _ in range(1_799))
    second[rate_hz // 2] = 1.0
    tail = np.concatenate([resampler.resample(second), resampler.finish()])
    assert before + len(tail) == 1_800 * 16_000
    assert abs(before + int(tail.argmax()) - (1_799 * 16_000 + 8_000)) <= 1


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_a_tone_keeps_its_pitch_phase_and_level(rate_hz):
    def tone(hz: int) -> np.ndarray:
        return (0.5 * np.sin(2 * np.pi * 200 * np.arange(hz) / hz)).astype(np.float32)

    out, want = resample(tone(rate_hz), rate_hz), tone(16_000)
    np.testing.assert_allclose(out[2_000:-2_000], want[2_000:-2_000], atol=1e-4)


def test_the_last_sample_is_sound_not_padding():
    out = resample(np.ones(44_101, np.float32), 44_100)
    assert len(out) == 16_001
    assert out[-1] > 0.4


def test_16_khz_passes_through_without_a_copy():
    chunk = np.ones(100, np.float32)
    resampler = Resampler(16_000)
    assert resampler.resample(chunk) is chunk
    assert len(resampler.finish()) == 0


@pytest.mark.parametrize("rate_hz", [-8_000, 0, 1, MIN_RATE_HZ - 1, MAX_RATE_HZ + 1])
def test_a_rate_out_of_range_is_refused(rate_hz):
    with pytest.raises(UnsupportedAudio, match="Hz"):
        Resampler(rate_hz)
