"""Load of an engine over its last seconds, from totals that only grow."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW_S = 10.0
"""Time over which rates are measured."""
SAMPLE_S = 1.0
"""Least time between two samples of the window."""


class LoadTotals(NamedTuple):
    """Totals of an engine since its start."""

    occupied_s: float
    """Time of its steps, each times the used share of its capacity."""
    waited_s: float
    """Queue time of all requests that were started."""
    started: int
    """Number of requests that were started."""
    collectives_s: float | None = None
    """Time of collectives; None for an engine in one process."""


class LoadRates(NamedTuple):
    """Rates of an engine over the window."""

    occupancy: float
    """Used share of the capacity of its steps, 0..1."""
    queue_s: float
    """Mean queue time of the requests that were started; where requests wait and none was started, the length of the
    window, which is less than they wait."""
    collectives: float | None
    """Share of time in collectives, 0..1; None for an engine in one process."""


class LoadWindow:
    """Samples of the totals of an engine. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, LoadTotals]] = deque()

    def sample(self, now_s: float, totals: LoadTotals) -> None:
        """Adds the totals of now, where the last sample is old enough."""
        if self._samples and now_s - self._samples[-1][0] < SAMPLE_S:
            return
        self._samples.append((now_s, totals))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def rates(self, now_s: float, totals: LoadTotals, waiting: int) -> LoadRates | None:
        """Rates up to now; None until there is a sample that is old enough. `waiting`: requests that wait."""
        if not self._samples or now_s - self._samples[0][0] < SAMPLE_S:
            return None
        since_s, first = self._samples[0]
        span_s = now_s - since_s
        started = totals.started - first.started
        if started:
            queue_s = (totals.waited_s - first.waited_s) / started
        else:
            queue_s = span_s if waiting else 0.0
        collectives = None
        if totals.collectives_s is not None and first.collectives_s is not None:
            collectives = _share(totals.collectives_s - first.collectives_s, span_s)
        return LoadRates(_share(totals.occupied_s - first.occupied_s, span_s), queue_s, collectives)


def _share(part_s: float, span_s: float) -> float:
    return min(1.0, max(0.0, part_s / span_s))
