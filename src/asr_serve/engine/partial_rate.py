"""How often a caller may ask for a partial, and when no more callers are let in. Pure: no clock of its own.

A partial is asked for at most every `partial_ms`, and never oftener than every second turnaround of such a
request (`SPACING`): whatever the load, callers ask for less than the engine can answer, so the queue stays short
and what must be on time, the end of a sentence, is. When even the slowest cadence does not help, who is on line
keeps the line and whoever calls is told to try again.
"""

from __future__ import annotations

from asr_serve.errors import AtCapacity

MIN_INTERVAL_TURNAROUNDS = 2.0
"""Turnarounds between two partials of a caller."""
MAX_INTERVAL_FACTOR = 6.0
"""The slowest cadence, in cadences asked for."""
OVERLOADED_MS = 1_000.0
"""Mean turnaround of live requests beyond which no more callers are let in."""
EMA_WEIGHT = 1 / 32
"""Of the newest turnaround in the mean: about a second's worth of requests of a busy engine."""
STALE_AFTER_MS = 5_000
"""A mean that nothing was added to for so long says nothing."""
MIN_SAMPLES = 16
"""Answers before anybody is refused: the first ones after a silence may be slow for reasons of their own."""
RETRY_MS = 5_000


class PartialRateController:
    """The load that live callers make, as they feel it."""

    def __init__(self) -> None:
        self.turnaround_ms = 0.0
        self._at_ms = 0.0
        self._answers = 0
        """Since the last long silence."""

    def record_turnaround(self, turnaround_ms: float, now_ms: float) -> None:
        """A live request was answered so long after it was made."""
        if self._stale(now_ms):
            self.turnaround_ms, self._answers = turnaround_ms, 0
        self._answers += 1
        self.turnaround_ms += EMA_WEIGHT * (turnaround_ms - self.turnaround_ms)
        self._at_ms = now_ms

    def interval_ms(self, partial_ms: float, now_ms: float) -> float:
        """The least time between two partials of a caller who would like one every `partial_ms`."""
        if self._stale(now_ms):
            return partial_ms
        return min(
            MAX_INTERVAL_FACTOR * partial_ms, max(partial_ms, MIN_INTERVAL_TURNAROUNDS * self.turnaround_ms)
        )

    def check_overload(self, now_ms: float) -> None:
        """Raises AtCapacity when one more caller would spoil it for all."""
        enough = self._answers >= MIN_SAMPLES and not self._stale(now_ms)
        if enough and self.turnaround_ms > OVERLOADED_MS:
            raise AtCapacity(
                f"those on line wait {self.turnaround_ms:.0f} ms for their words",
                f"callers are let in while that is less than {OVERLOADED_MS:.0f} ms",
                RETRY_MS,
            )

    def _stale(self, now_ms: float) -> bool:
        return now_ms - self._at_ms > STALE_AFTER_MS
