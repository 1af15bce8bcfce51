"""Rate of partials and overload of live callers. Pure: no clock of its own.

A partial is requested at most every `partial_ms`, and at most once per MIN_INTERVAL_TURNAROUNDS turnarounds of
such a request: at any load, callers request less than the engine can compute, so the queue stays short and the end
of a sentence, which is urgent, is on time. When even the longest interval does not help, connected callers are
served and new ones are told to try again.
"""

from __future__ import annotations

from asr_serve.errors import AtCapacity

MIN_INTERVAL_TURNAROUNDS = 2.0
"""Minimum turnarounds between two partials of a caller."""
MAX_INTERVAL_FACTOR = 6.0
"""Longest interval between partials, as a multiple of the requested one."""
OVERLOADED_MS = 1_000.0
"""Mean turnaround of live requests above which no more callers are admitted."""
EMA_WEIGHT = 1 / 32
"""Weight of the newest turnaround in the mean: the mean covers about a second of requests of a busy engine."""
STALE_AFTER_MS = 5_000
"""Age at which a mean without new measurements is discarded."""
MIN_SAMPLES = 16
"""Measurements before any caller is refused: the first ones after a silence may be slow for other reasons."""
RETRY_MS = 5_000


class PartialRateController:
    """Load measured as the mean turnaround of live requests."""

    def __init__(self) -> None:
        self.turnaround_ms = 0.0
        self._at_ms = 0.0
        self._answers = 0
        """Answers since the last long silence."""

    def record_turnaround(self, turnaround_ms: float, now_ms: float) -> None:
        """Adds the turnaround of one live request."""
        if self._stale(now_ms):
            self.turnaround_ms, self._answers = turnaround_ms, 0
        self._answers += 1
        self.turnaround_ms += EMA_WEIGHT * (turnaround_ms - self.turnaround_ms)
        self._at_ms = now_ms

    def interval_ms(self, partial_ms: float, now_ms: float) -> float:
        """Minimum time between two partials of a caller who requests one every `partial_ms`."""
        if self._stale(now_ms):
            return partial_ms
        return min(
            MAX_INTERVAL_FACTOR * partial_ms, max(partial_ms, MIN_INTERVAL_TURNAROUNDS * self.turnaround_ms)
        )

    def check_overload(self, now_ms: float) -> None:
        """Raises AtCapacity when the engine is too loaded for another caller."""
        enough = self._answers >= MIN_SAMPLES and not self._stale(now_ms)
        if enough and self.turnaround_ms > OVERLOADED_MS:
            raise AtCapacity(
                f"those on line wait {self.turnaround_ms:.0f} ms for their words",
                f"callers are let in while that is less than {OVERLOADED_MS:.0f} ms",
                RETRY_MS,
            )

    def _stale(self, now_ms: float) -> bool:
        return now_ms - self._at_ms > STALE_AFTER_MS
