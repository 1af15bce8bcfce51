"""What the tiers have done: totals for `describe`, and the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from asr_serve.engine.tiers.shelves import Shelves
    from asr_serve.metrics import EngineMetrics

Tier = Literal["device", "host", "disk"]
Lost = Literal["room", "torn", "failed"]
"""Given up for others; not what was written; the disk could not read it."""


class Tally:
    """Written under the tiers' lock."""

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self.metrics = metrics
        self.counts: Counter[str] = Counter()

    def watch(self, shelves: Shelves) -> None:
        """What lies there is read when somebody asks for the metrics."""
        if self.metrics is not None:
            for tier in ("host", "disk"):
                self.metrics.tier_bytes[tier].set_function(partial(_one, shelves.nbytes, tier))
                self.metrics.tier_entries[tier].set_function(partial(_one, shelves.count, tier))

    def moved(self, source: Tier, to: Tier) -> None:
        self.counts[f"{source}_to_{to}"] += 1
        if self.metrics is not None:
            self.metrics.tier_moves[source, to].inc()

    def lost(self, reason: Lost) -> None:
        self.counts[f"lost_{reason}"] += 1
        if self.metrics is not None:
            self.metrics.tier_lost[reason].inc()

    def spent(self, work: Literal["read", "write"], seconds: float) -> None:
        if self.metrics is not None:
            self.metrics.tier_seconds[work].observe(seconds)

    def not_written(self) -> None:
        self.counts["failed_writes"] += 1
        if self.metrics is not None:
            self.metrics.tier_failed_writes.inc()


def _one(figures: Callable[[], dict[str, int]], tier: str) -> float:
    return figures()[tier]
