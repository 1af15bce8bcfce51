"""How high: of signals, exactly; of a voice whose pitch is known, nearly always."""

from __future__ import annotations

import numpy as np
import pytest
from spoken_by_heart import spoken

from asr_serve.cloning.pitch_tracking import HIGH_HZ, LOW_HZ, track_pitch
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ


def buzz(hz: np.ndarray, rng: np.random.Generator, noise: float = 0.0) -> np.ndarray:
    """As many harmonics as fit, weaker and weaker; `hz` of each sample."""
    phase = np.cumsum(hz) / RATE_HZ
    sound = np.zeros(len(hz))
    for harmonic in range(1, 30):
        sound += np.where(harmonic * hz < 5_000, np.sin(2 * np.pi * harmonic * phase) / harmonic, 0)
    return 0.1 * sound + noise * rng.standard_normal(len(hz))


@pytest.mark.parametrize("hz", [70.0, 98.5, 131.0, 220.0, 333.3, 480.0])
def test_a_steady_tone(rng, hz):
    found = track_pitch(buzz(np.full(RATE_HZ, hz), rng, 0.003))
    assert len(found) == RATE_HZ // HOP
    inner = found[4:-4]
    assert (inner > 0).all()
    np.testing.assert_allclose(inner, hz, rtol=0.005)


def test_a_glide_is_followed_at_the_middle_of_each_frame(rng):
    hz = np.geomspace(100, 300, 2 * RATE_HZ)
    found = track_pitch(buzz(hz, rng))
    middles = hz[HOP // 2 :: HOP][: len(found)]
    np.testing.assert_allclose(found[4:-4], middles[4:-4], rtol=0.01)


def test_the_fundamental_is_found_where_it_is_missing(rng):
    seconds = np.arange(RATE_HZ) / RATE_HZ
    sound = sum(np.sin(2 * np.pi * 120 * harmonic * seconds) for harmonic in (2, 3, 4, 5, 6))
    np.testing.assert_allclose(track_pitch(0.1 * np.asarray(sound))[4:-4], 120, rtol=0.005)


def test_noise_and_silence_have_no_voice(rng):
    assert not track_pitch(np.zeros(RATE_HZ)).any()
    assert (track_pitch(0.1 * rng.standard_normal(2 * RATE_HZ)) > 0).mean() < 0.05
    assert len(track_pitch(np.zeros(0))) == 0
    assert len(track_pitch(np.zeros(100))) == 0


def test_voicing_begins_and_ends_with_the_voice(rng):
    silence = 0.0005 * rng.standard_normal(RATE_HZ // 2)
    sound = np.concatenate([silence, buzz(np.full(RATE_HZ // 2, 150.0), rng), silence])
    voiced = np.flatnonzero(track_pitch(sound) > 0)
    quarter = RATE_HZ // 2 / HOP
    assert abs(voiced[0] - quarter) < 4
    assert abs(voiced[-1] - 2 * quarter) < 4
    assert len(voiced) == voiced[-1] - voiced[0] + 1


def test_loudness_changes_nothing(rng):
    sound = buzz(np.full(RATE_HZ, 180.0), rng)
    np.testing.assert_allclose(track_pitch(0.01 * sound), track_pitch(sound), rtol=1e-3)


def test_pitch_of_a_known_voice():
    """Gross errors: over a fifth off, of frames that both call voiced. What has voice is a matter of taste: the
    voice's own pitch goes on through many a consonant."""
    gross = both = 0
    off = []
    for known in spoken():
        found = track_pitch(known.pcm, len(known.f0))
        assert len(found) == len(known.f0)
        assert ((found == 0) | ((found >= LOW_HZ * 0.99) & (found <= HIGH_HZ * 1.01))).all()
        voiced = (found > 0) & (known.f0 > 0)
        error = np.abs(found[voiced] / known.f0[voiced] - 1)
        gross, both = gross + int((error > 0.2).sum()), both + int(voiced.sum())
        off += error[error <= 0.2].tolist()
    assert both > 500
    assert gross / both < 0.03
    assert np.median(off) < 0.015
