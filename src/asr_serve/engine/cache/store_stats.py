"""Counters of the tiered store: totals for `describe`, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from asr_serve.engine.cache.store_index import StoreIndex
    from asr_serve.metrics import EngineMetrics

Tier = Literal["device", "host", "disk"]
Lost = Literal["room", "corrupted", "failed"]
"""Reasons for a loss: evicted for others; not what was written; not readable from the disk."""


class TieredStoreStats:
    """Counters, written under the store's lock."""

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self.metrics = metrics
        self.counts: Counter[str] = Counter()

    def observe_index(self, shelves: StoreIndex) -> None:
        """Sets the gauges to read the index whenever metrics are collected."""
        if self.metrics is not None:
            for tier in ("host", "disk"):
                self.metrics.tier_bytes[tier].set_function(partial(_tier_value, shelves.nbytes, tier))
                self.metrics.tier_entries[tier].set_function(partial(_tier_value, shelves.count, tier))

    def record_move(self, source: Tier, to: Tier) -> None:
        self.counts[f"{source}_to_{to}"] += 1
        if self.metrics is not None:
            self.metrics.tier_moves[source, to].inc()

    def record_loss(self, reason: Lost) -> None:
        self.counts[f"lost_{reason}"] += 1
        if self.metrics is not None:
            self.metrics.tier_lost[reason].inc()

    def record_time(self, work: Literal["read", "write"], seconds: float) -> None:
        if self.metrics is not None:
            self.metrics.tier_seconds[work].observe(seconds)

    def record_unwritten(self) -> None:
        self.counts["failed_writes"] += 1
        if self.metrics is not None:
            self.metrics.tier_failed_writes.inc()


def _tier_value(figures: Callable[[], dict[str, int]], tier: str) -> float:
    return figures()[tier]
