"""What a loop has done: totals for `describe` and the benches, and each step's figures for whoever measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asr_serve import units

if TYPE_CHECKING:
    from asr_serve.metrics import EngineMetrics


class Stats:
    """Written by the loop, but for the stage `turn`, which is its runner's; read by anybody."""

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self.metrics = metrics
        self.steps = self.step_rows = self.fallbacks = self.samples = 0
        self.drafted = self.held = 0
        self.found_before = {"answer": 0, "audio": 0, "none": 0}
        self.positions_reused = self.evictions = 0
        self.spoken_s = 0.0
        stages = ("vad", "chunk", "encode", "verify", "decode", "hotwords", "speak", "turn", "speakers")
        self.spent_s = dict.fromkeys(stages, 0.0)

    def step(self, stage: str, seconds: float, rows: int, fill: float) -> None:
        """One step of a stage: its rows, and the share of the room it had that was used."""
        self.spent_s[stage] += seconds
        if stage == "decode":
            self.steps += 1
            self.step_rows += rows
        if self.metrics is not None:
            self.metrics.step[stage].observe(seconds)
            self.metrics.batch_rows[stage].observe(rows)
            self.metrics.batch_fill[stage].observe(fill)

    def failed(self, stage: str) -> None:
        if self.metrics is not None:
            self.metrics.failed_steps[stage].inc()

    def queued(self, priority: str, seconds: float) -> None:
        if self.metrics is not None:
            self.metrics.queue[priority].observe(seconds)

    def recognised(self, samples: int, tokens: int) -> None:
        self.samples += samples
        if self.metrics is not None:
            self.metrics.audio_seconds.inc(units.samples_to_s(samples))
            self.metrics.tokens.inc(tokens)

    def verified(self, drafted: int, held: int) -> None:
        """Tokens of drafts, and how many of them the model says too."""
        self.drafted += drafted
        self.held += held
        if self.metrics is not None:
            self.metrics.draft_tokens["held"].inc(held)
            self.metrics.draft_tokens["dropped"].inc(drafted - held)

    def fell_back(self) -> None:
        self.fallbacks += 1
        if self.metrics is not None:
            self.metrics.fallbacks.inc()

    def found(self, what: str) -> None:
        """Of an utterance that was answered, what was there already: answer, audio or none."""
        self.found_before[what] += 1
        if self.metrics is not None:
            self.metrics.prefix_requests[what].inc()

    def reused(self, positions: int) -> None:
        """Of tokens, whose keys and values were there."""
        self.positions_reused += positions
        if self.metrics is not None:
            self.metrics.prefix_tokens.inc(positions)

    def evicted(self) -> None:
        """Audio that was kept gave way."""
        self.evictions += 1
        if self.metrics is not None:
            self.metrics.prefix_evictions.inc()

    def sounded(self, seconds: float) -> None:
        """A sentence, for the first time, so long after it came."""
        if self.metrics is not None:
            self.metrics.first_sound.observe(seconds)

    def spoke(self, seconds: float) -> None:
        """So much sound was made, and told."""
        self.spoken_s += seconds
        if self.metrics is not None:
            self.metrics.spoken_seconds.inc(seconds)

    def slept(self) -> None:
        """A stream."""
        if self.metrics is not None:
            self.metrics.sleeps.inc()

    def asleep(self, streams: int) -> None:
        if self.metrics is not None:
            self.metrics.streams_asleep.set(streams)

    def woke(self, seconds: float) -> None:
        """A stream has a slot again, so long after its audio came."""
        if self.metrics is not None:
            self.metrics.wake.observe(seconds)

    def lost(self) -> None:
        """What a sleeping stream knew."""
        if self.metrics is not None:
            self.metrics.recomputed.inc()

    def describe(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "rows_per_step": round(self.step_rows / max(1, self.steps), 2),
            "fallbacks": self.fallbacks,
            "draft_tokens": self.drafted,
            "draft_tokens_held": self.held,
            **{f"reused_{what}": count for what, count in self.found_before.items() if what != "none"},
            "reused_positions": self.positions_reused,
            "audio_s": round(units.samples_to_s(self.samples), 2),
            "spoken_s": round(self.spoken_s, 2),
            **{f"{stage}_s": round(seconds, 4) for stage, seconds in self.spent_s.items()},
        }
