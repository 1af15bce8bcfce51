"""Drift of a sender's clock: measured through jitter, and taken out sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from asr_serve.edge.clock_drift import MAX_PPM, ClockDriftMeter, DriftCorrector


def measure(ppm: float, rng: np.random.Generator, seconds: int = 120) -> float:
    """Packets each 20 ms of a sender whose seconds are so much longer than ours, through a queue."""
    meter = ClockDriftMeter()
    for number in range(seconds * 50):
        sent_s = number * 0.02
        meter.append(1_000 + sent_s * (1 + ppm * 1e-6) + rng.exponential(0.01), 77 + sent_s)
    return meter.ppm


@pytest.mark.parametrize("ppm", [-200, -40, 0, 40, 300])
def test_drift_is_found_through_jitter(ppm: float, rng: np.random.Generator) -> None:
    assert measure(ppm, rng) == pytest.approx(ppm, abs=15)


def test_a_step_of_the_delay_is_no_drift(rng: np.random.Generator) -> None:
    meter = ClockDriftMeter()
    for number in range(120 * 50):
        step_s = 0.05 if number > 100 * 50 else 0.0
        meter.append(number * 0.02 + step_s + rng.exponential(0.005), number * 0.02)
    assert abs(meter.ppm) < 60


def test_drift_is_unknown_at_first_and_a_wrong_speed_is_none(rng: np.random.Generator) -> None:
    assert measure(100, rng, seconds=20) == 0
    assert measure(MAX_PPM * 2, rng) == 0


@pytest.mark.parametrize("ppm", [-150.0, 150.0])
def test_samples_follow_the_drift_and_are_counted(ppm: float) -> None:
    corrector, total, made = DriftCorrector(), 0, []
    tone = np.sin(2 * np.pi * 300 * np.arange(16_000 * 30) / 16_000).astype(np.float32)
    for at in range(0, len(tone), 320):
        made.append(corrector.correct(tone[at : at + 320], ppm))
        total += 320
    whole = np.concatenate(made)
    assert len(whole) == total + corrector.adjusted_samples
    assert corrector.adjusted_samples == pytest.approx(total * ppm * 1e-6, abs=1)
    assert whole.dtype == np.float32
    # No click: a sample more or less does not make a step.
    assert float(np.abs(np.diff(whole)).max()) < 1.2 * float(np.abs(np.diff(tone)).max())


def test_without_drift_blocks_stay_themselves() -> None:
    block = np.ones(320, np.float32)
    assert DriftCorrector().correct(block, 0.0) is block
