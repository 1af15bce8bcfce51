"""How often partials come and who is let in: plain maths on a clock of our own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.engine.partial_rate import (
    EMA_WEIGHT,
    MAX_INTERVAL_FACTOR,
    MIN_INTERVAL_TURNAROUNDS,
    MIN_SAMPLES,
    OVERLOADED_MS,
    RETRY_MS,
    STALE_AFTER_MS,
    PartialRateController,
)
from asr_serve.errors import AtCapacity

turnarounds = st.floats(0, 60_000)
asked = st.integers(100, 10_000)


def loaded(turnaround_ms: float, now_ms: float = 10_000.0) -> PartialRateController:
    """One that has felt nothing else."""
    cadence = PartialRateController()
    for _ in range(MIN_SAMPLES):
        cadence.record_turnaround(turnaround_ms, now_ms)
    return cadence


def test_at_rest_every_session_is_admitted_with_the_cadence_it_requests():
    cadence = PartialRateController()
    assert cadence.interval_ms(480, 0.0) == 480
    cadence.check_overload(0.0)
    cadence.check_overload(1e12)


@given(turnarounds, asked)
def test_the_cadence_lies_between_two_turnarounds_and_the_slowest(turnaround, partial):
    interval = loaded(turnaround).interval_ms(partial, 10_000.0)
    assert partial <= interval <= MAX_INTERVAL_FACTOR * partial
    assert interval >= min(MIN_INTERVAL_TURNAROUNDS * turnaround, MAX_INTERVAL_FACTOR * partial)
    assert interval == partial or interval <= MIN_INTERVAL_TURNAROUNDS * turnaround


@given(st.lists(turnarounds, min_size=1, max_size=200))
def test_the_mean_lies_among_the_measured_values(felt):
    cadence = PartialRateController()
    for number, turnaround in enumerate(felt):
        cadence.record_turnaround(turnaround, 100_000.0 + number)
    assert min(felt) - 1e-6 <= cadence.turnaround_ms <= max(felt) + 1e-6


def test_each_answer_counts_for_its_weight():
    cadence = loaded(100)
    cadence.record_turnaround(200, 10_001.0)
    assert cadence.turnaround_ms == pytest.approx(100 + EMA_WEIGHT * 100)


def test_one_slow_answer_among_many_refuses_no_session():
    cadence = loaded(100)
    for number in range(50):
        cadence.record_turnaround(5 * OVERLOADED_MS if number == 20 else 100, 10_000.0 + number)
        cadence.check_overload(10_000.0 + number)
    assert cadence.interval_ms(480, 10_050.0) < MAX_INTERVAL_FACTOR * 480


def test_load_lengthens_the_cadence_long_before_it_refuses():
    cadence, intervals = loaded(50), []
    for now in range(10_000, 20_000):
        cadence.record_turnaround(OVERLOADED_MS, float(now))
        cadence.check_overload(float(now))  # not beyond the bound yet
        intervals.append(cadence.interval_ms(480, float(now)))
    assert intervals == sorted(intervals)
    assert intervals[0] == 480
    assert intervals[-1] == pytest.approx(MIN_INTERVAL_TURNAROUNDS * OVERLOADED_MS, rel=1e-3)


def test_overload_refuses_with_a_time_and_recovers():
    cadence, now = loaded(OVERLOADED_MS * 1.2), 10_000.0
    with pytest.raises(AtCapacity, match=r"1200 ms .* less than 1000 ms") as refused:
        cadence.check_overload(now)
    assert refused.value.retry_after_ms == RETRY_MS
    for _ in range(200):
        now += 10
        cadence.record_turnaround(100.0, now)
    cadence.check_overload(now)
    assert cadence.interval_ms(480, now) == 480


def test_old_answers_do_not_count():
    cadence = loaded(10 * OVERLOADED_MS, 10_000.0)
    with pytest.raises(AtCapacity):
        cadence.check_overload(10_000.0 + STALE_AFTER_MS)
    cadence.check_overload(10_000.0 + STALE_AFTER_MS + 1)
    cadence.record_turnaround(80.0, 10_000.0 + STALE_AFTER_MS + 2)
    assert cadence.turnaround_ms == 80.0, "the next answer stands for itself"


def test_a_long_silence_restores_the_requested_cadence():
    cadence = loaded(10 * OVERLOADED_MS, 10_000.0)
    assert cadence.interval_ms(480, 10_000.0) == MAX_INTERVAL_FACTOR * 480
    assert cadence.interval_ms(480, 10_000.0 + STALE_AFTER_MS + 1) == 480


def test_a_few_slow_answers_after_a_silence_refuse_no_session():
    cadence = PartialRateController()
    for _ in range(MIN_SAMPLES - 1):
        cadence.record_turnaround(10 * OVERLOADED_MS, 10_000.0)
    cadence.check_overload(10_000.0)
    cadence.record_turnaround(10 * OVERLOADED_MS, 10_000.0)
    with pytest.raises(AtCapacity):
        cadence.check_overload(10_000.0)


def test_updates_are_pure():
    code = "import sys, asr_serve.engine.partial_rate; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
