"""Counters of a loop: totals for `describe` and the benches, and metrics of each step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asr_serve import units

if TYPE_CHECKING:
    from asr_serve.metrics import EngineMetrics


class EngineStats:
    """Totals and metrics of an engine. Written by the loop, except for the stage `turn`, which its runner writes;
    read from any thread."""

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self.metrics = metrics
        self.steps = self.step_rows = self.fallbacks = self.samples = 0
        self.draft_tokens = self.accepted_tokens = 0
        self.cache_hits = {"answer": 0, "audio": 0, "none": 0}
        self.positions_reused = self.evictions = 0
        self.spoken_s = 0.0
        self.waited_s, self.waited = 0.0, 0
        """Total queue time of requests that somebody waits for, and their number: all but bulk ones."""
        self.filled_s = 0.0
        """Total time of steps, each times the used share of its capacity."""
        self._work: tuple[float, float | None] = (0.0, None)
        """Total time with work until the loop waited last, and since when it has had some: one attribute, for other
        threads."""
        stages = ("vad", "chunk", "encode", "verify", "decode", "hotwords", "speak", "turn", "speakers")
        self.spent_s = dict.fromkeys(stages, 0.0)

    def record_step(self, stage: str, seconds: float, rows: int, fill: float) -> None:
        """Records one step of a stage: its rows, and the used share of its capacity."""
        self.spent_s[stage] += seconds
        self.filled_s += seconds * fill
        if stage == "decode":
            self.steps += 1
            self.step_rows += rows
        if self.metrics is not None:
            self.metrics.step[stage].observe(seconds)
            self.metrics.batch_rows[stage].observe(rows)
            self.metrics.batch_fill[stage].observe(fill)

    def record_rows_beside(self, rows: int, fill: float) -> None:
        """Records rows that decoded a token in a pass of the stage `verify`, which has its time: they count as a
        decoding step without time of its own."""
        self.steps += 1
        self.step_rows += rows
        if self.metrics is not None:
            self.metrics.batch_rows["decode"].observe(rows)
            self.metrics.batch_fill["decode"].observe(fill)

    def begin_work(self) -> None:
        """Records that the loop has work from now on. Idempotent."""
        worked_s, since_s = self._work
        if since_s is None:
            self._work = worked_s, time.monotonic()

    def end_work(self) -> None:
        """Records that the loop has no work from now on, and waits. Idempotent."""
        self._work = self.worked_s, None

    @property
    def worked_s(self) -> float:
        """Total time in which the loop had work, up to now: a step may take seconds."""
        worked_s, since_s = self._work
        return worked_s if since_s is None else worked_s + time.monotonic() - since_s

    def record_failed_step(self, stage: str) -> None:
        if self.metrics is not None:
            self.metrics.failed_steps[stage].inc()

    def record_queue_time(self, priority: str, seconds: float) -> None:
        if priority != "bulk":
            self.waited_s += seconds
            self.waited += 1
        if self.metrics is not None:
            self.metrics.queue[priority].observe(seconds)

    def record_recognition(self, samples: int, tokens: int) -> None:
        self.samples += samples
        if self.metrics is not None:
            self.metrics.audio_seconds.inc(units.samples_to_s(samples))
            self.metrics.tokens.inc(tokens)

    def record_verification(self, drafted: int, held: int) -> None:
        """Records draft tokens, and how many of them the model accepted."""
        self.draft_tokens += drafted
        self.accepted_tokens += held
        if self.metrics is not None:
            self.metrics.draft_tokens["held"].inc(held)
            self.metrics.draft_tokens["dropped"].inc(drafted - held)

    def record_fallback(self) -> None:
        self.fallbacks += 1
        if self.metrics is not None:
            self.metrics.fallbacks.inc()

    def record_cache_lookup(self, what: str) -> None:
        """Records what the cache had for an answered utterance: answer, audio or none."""
        self.cache_hits[what] += 1
        if self.metrics is not None:
            self.metrics.prefix_requests[what].inc()

    def record_reused_positions(self, positions: int) -> None:
        """Records token positions whose keys and values were cached."""
        self.positions_reused += positions
        if self.metrics is not None:
            self.metrics.prefix_tokens.inc(positions)

    def record_eviction(self) -> None:
        """Records that cached audio was evicted."""
        self.evictions += 1
        if self.metrics is not None:
            self.metrics.prefix_evictions.inc()

    def record_first_audio(self, seconds: float) -> None:
        """Records the time from a sentence's arrival to its first audio."""
        if self.metrics is not None:
            self.metrics.first_sound.observe(seconds)

    def record_synthesis(self, seconds: float) -> None:
        """Records synthesized and delivered audio."""
        self.spoken_s += seconds
        if self.metrics is not None:
            self.metrics.spoken_seconds.inc(seconds)

    def record_offload(self) -> None:
        """Records that a stream was offloaded."""
        if self.metrics is not None:
            self.metrics.offloads.inc()

    def set_offloaded(self, streams: int) -> None:
        if self.metrics is not None:
            self.metrics.streams_offloaded.set(streams)

    def record_restore(self, seconds: float) -> None:
        """Records the time from new audio of an offloaded stream until it has a slot again."""
        if self.metrics is not None:
            self.metrics.restore.observe(seconds)

    def record_recompute(self) -> None:
        """Records that the state of an offloaded stream was lost."""
        if self.metrics is not None:
            self.metrics.recomputed.inc()

    def describe(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "rows_per_step": round(self.step_rows / max(1, self.steps), 2),
            "fallbacks": self.fallbacks,
            "draft_tokens": self.draft_tokens,
            "draft_tokens_held": self.accepted_tokens,
            **{f"reused_{what}": count for what, count in self.cache_hits.items() if what != "none"},
            "reused_positions": self.positions_reused,
            "audio_s": round(units.samples_to_s(self.samples), 2),
            "spoken_s": round(self.spoken_s, 2),
            **{f"{stage}_s": round(seconds, 4) for stage, seconds in self.spent_s.items()},
        }
