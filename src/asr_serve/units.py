"""Exact time: positions are integer samples since session start, and only this file divides by a rate."""

from __future__ import annotations

from fractions import Fraction

RATE_HZ = 16_000
"""The only rate inside the engine. Audio of any other rate is resampled on input (`audio/`)."""


def samples_to_s(samples: int, rate_hz: int = RATE_HZ) -> float:
    """Seconds for a number of samples, as a float for people and for JSON."""
    return samples / rate_hz


def samples_to_ms(samples: int, rate_hz: int = RATE_HZ) -> int:
    """Whole milliseconds for a number of samples, halves rounded up."""
    return (samples * 2_000 + rate_hz) // (2 * rate_hz)


def ms_to_samples(ms: float, rate_hz: int = RATE_HZ) -> int:
    """Samples for a time in milliseconds, halves rounded up."""
    if isinstance(ms, int):
        return (ms * rate_hz * 2 + 1_000) // 2_000
    exact = Fraction(ms).limit_denominator(1_000_000) * rate_hz / 1_000
    return int(exact + Fraction(1, 2))


def s_to_samples(seconds: float, rate_hz: int = RATE_HZ) -> int:
    """Samples for a time in seconds, halves rounded up."""
    return ms_to_samples(seconds * 1_000, rate_hz)


def resampled_samples(samples: int, from_hz: int, to_hz: int = RATE_HZ) -> int:
    """Number of samples that `samples` at `from_hz` become at `to_hz`, rounded up to keep the last one."""
    return -(-samples * to_hz // from_hz)
