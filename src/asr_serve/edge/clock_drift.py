"""Drift of a sender's clock against ours: measured by arrival times, and taken out of its samples."""

from __future__ import annotations

from collections import deque

import numpy as np

BIN_S = 2.0
"""Time in which the fastest packet counts: queues only ever delay."""
MAX_BINS = 60
MIN_BINS = 15
"""Bins before the drift counts as measured: half a minute."""
MAX_PPM = 1_000.0
"""Largest drift that is a clock's. Beyond it a sender does not send in real time, and nothing is corrected."""
MIN_BLOCK = 80
"""Fewest samples over which one sample more or less is spread."""


class ClockDriftMeter:
    """Meter of one stream: the slope of the least delays over time, robust against steps of the network's delay.

    In      `append`: arrival time, and the timestamp as seconds of the sender's clock
    Out     `ppm`: how much longer the sender's second is than ours, in millionths; 0 until it is known
    State   MAX_BINS delays
    Source  Theil-Sen estimator over minimum-filtered one-way delays, as for NTP (RFC 5905, section 10)
    """

    def __init__(self) -> None:
        self.ppm = 0.0
        self._bins: deque[tuple[float, float]] = deque(maxlen=MAX_BINS)
        """Arrival time and delay of each bin's fastest packet."""
        self._end_s: float | None = None
        self._fastest = (0.0, float("inf"))

    def append(self, arrival_s: float, sent_s: float) -> None:
        delay_s = arrival_s - sent_s
        if self._end_s is None:
            self._end_s = arrival_s + BIN_S
        elif arrival_s >= self._end_s:
            self._bins.append(self._fastest)
            self._fastest = (0.0, float("inf"))
            self._end_s = arrival_s + BIN_S
            self._estimate()
        if delay_s < self._fastest[1]:
            self._fastest = (arrival_s, delay_s)

    def restart(self) -> None:
        """Forgets the delays, not the drift: the timestamps have begun anew."""
        self._bins.clear()
        self._end_s, self._fastest = None, (0.0, float("inf"))

    def _estimate(self) -> None:
        if len(self._bins) < MIN_BINS:
            return
        times, delays = np.array(self._bins).T
        first, second = np.triu_indices(len(times), len(times) // 3)  # near pairs say little
        slope = float(np.median((delays[second] - delays[first]) / (times[second] - times[first])))
        self.ppm = slope * 1e6 if abs(slope) * 1e6 <= MAX_PPM else 0.0


class DriftCorrector:
    """Corrector that adds or drops single samples, each spread over its block by interpolation.

    In      blocks (n,) float32, and the drift in ppm
    Out     the block, or one of n + 1 or n - 1 samples. `adjusted_samples` is the sum of these, so that every sample
            stays accounted for
    """

    def __init__(self) -> None:
        self.adjusted_samples = 0
        self._due = 0.0

    def correct(self, pcm: np.ndarray, ppm: float) -> np.ndarray:
        count = len(pcm)
        self._due += count * ppm * 1e-6
        if abs(self._due) < 1 or count < MIN_BLOCK:
            return pcm
        step = 1 if self._due > 0 else -1
        self._due -= step
        self.adjusted_samples += step
        at = np.linspace(0, count - 1, count + step)
        stretched: np.ndarray = np.interp(at, np.arange(count), pcm).astype(np.float32)
        return stretched
