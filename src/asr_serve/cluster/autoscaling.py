"""Autoscaling of a model's replicas: settings, and a decision that depends on nothing but its arguments.

Replicas are added when callers wait, and removed when the rest would still be idle. Signals are what engines report
(`engine/process/messages.EngineLoad`). docs/scaling.md explains the thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asr_serve.errors import OptionError

MAX_REPLICAS = 128
"""Replicas of a model. Each costs every ingress three threads: for its call, and for what it sends and is sent."""
Replicas = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Share = Annotated[float, Meta(gt=0, le=1)]

SignalName = Literal["ingress_queue", "queue_s", "backlog_s", "occupancy", "sessions", "accelerator", "collectives"]
NEEDED: tuple[SignalName, ...] = ("occupancy", "queue_s", "sessions", "backlog_s", "ingress_queue")
"""Signals without which no replica is removed: an unknown load is not a low one."""
NEEDED_WITHOUT_INGRESS: tuple[SignalName, ...] = ("occupancy", "queue_s")
"""The same, for replicas that encode for others: no ingress is connected to them."""


class ScaleOutRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule that adds replicas."""

    above: Annotated[float, Meta(gt=0, le=86_400)]
    """Value of the signal above which it holds."""
    add: Annotated[int, Meta(ge=1, le=64)] = 1
    """Replicas that are added at once."""


class ScaleOutRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules that add replicas, by their signal. One that holds is enough; None: no such rule."""

    ingress_queue: ScaleOutRule | None = ScaleOutRule(above=0.8, add=2)
    """Used share of the fullest queue of an ingress."""
    queue_s: ScaleOutRule | None = ScaleOutRule(above=0.5)
    """Mean queue time of requests that somebody waits for."""
    backlog_s: ScaleOutRule | None = ScaleOutRule(above=60.0)
    """Seconds of audio of each replica that are not answered."""
    occupancy: ScaleOutRule | None = ScaleOutRule(above=0.9)
    """Used share of the capacity of steps."""
    sessions: ScaleOutRule | None = ScaleOutRule(above=0.8)
    """Used share of the places for live sessions and streams."""
    collectives: ScaleOutRule | None = ScaleOutRule(above=0.9)
    """Share of time in collectives (NCCL) of a model that is split over processes."""


class ScaleInRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule that removes replicas: all of its conditions hold for the replicas that would be left."""

    occupancy_below: Share | None = 0.4
    """Used share of the capacity of steps; None: it does not matter."""
    sessions_below: Share = 0.4
    """Used share of the places for live sessions and streams."""
    accelerator_below: Share | None = 0.2
    """Utilization of the accelerator as it is, where it is measured; None: it does not matter."""
    queue_s_below: Seconds = 0.1
    """Mean queue time as it is."""
    remove: Annotated[int, Meta(ge=1, le=64)] = 1
    """Replicas that are removed at once."""


class AutoscaleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a model's autoscaling."""

    min_replicas: Replicas = 1
    """Fewest replicas, and their number at the start."""
    max_replicas: Replicas
    """Most replicas."""
    scale_out: ScaleOutRules = ScaleOutRules()
    """Rules that add replicas."""
    scale_in: ScaleInRule | None = ScaleInRule()
    """Rule that removes replicas; None: none are removed."""
    out_after_s: Seconds = 5.0
    """Time for which a rule must hold before replicas are added."""
    in_after_s: Seconds = 300.0
    """Time for which the rule must hold before replicas are removed."""
    cool_down_s: Seconds = 30.0
    """Least time between a change, or the start of its last replica, and the next addition."""
    start_s: Seconds = 600.0
    """Time that a new replica has to start. Until then none is removed; after it, those for which there is no room go
    first."""
    report_s: Annotated[float, Meta(ge=0.5, le=60)] = 5.0
    """Time between two reports of a replica."""
    stale_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    """Age from which a report does not count."""

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise OptionError(
                f"autoscale: min_replicas={self.min_replicas} and max_replicas={self.max_replicas}",
                "min_replicas up to max_replicas",
                param="models",
            )
        if self.stale_s < 2 * self.report_s:
            raise OptionError(
                f"autoscale: stale_s={self.stale_s:g} and report_s={self.report_s:g}",
                "stale_s of two reports or more: one may be late",
                param="models",
            )
        if (out := self.scale_out) == ScaleOutRules(**dict.fromkeys(ScaleOutRules.__struct_fields__)):
            raise OptionError("autoscale: scale_out without a rule", "one rule or more", param="models")
        if self.scale_in is None:
            return
        for name, below in (
            ("occupancy", self.scale_in.occupancy_below),
            ("sessions", self.scale_in.sessions_below),
            ("queue_s", self.scale_in.queue_s_below),
        ):
            rule: ScaleOutRule | None = getattr(out, name)
            if rule is not None and below is not None and below >= rule.above:
                raise OptionError(
                    f"autoscale: scale_in.{name}_below={below:g} and scale_out.{name}.above={rule.above:g}",
                    "less than scale_out's: replicas would be added and removed in turn",
                    param="models",
                )


class Sample(NamedTuple):
    """Value of a signal of one replica."""

    at_s: float
    value: float


class Situation(NamedTuple):
    """Replicas of a model as they are now. Times are seconds of one clock."""

    now_s: float
    running: int
    """Running replicas."""
    target: int
    """Wanted replicas: those that start and stop included."""
    signals: Mapping[SignalName, Sequence[Sample]]
    """Last value of each running replica that reported one, by signal."""
    needed: Sequence[SignalName] = NEEDED
    """Signals that every replica must report before one is removed."""


class ScalingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """State between decisions."""

    hot_since_s: float | None = None
    """Time since when a rule of `scale_out` holds."""
    idle_since_s: float | None = None
    """Time since when the rule of `scale_in` holds."""
    unsettled_s: float | None = None
    """Last time when replicas were changed, started or stopped."""
    changed_s: float | None = None
    """Time of the last change."""


class ScalingDecision(NamedTuple):
    """Number of replicas, and why."""

    replicas: int
    reason: str
    """Empty where nothing changes."""
    memory: ScalingMemory


def decide(settings: AutoscaleSettings, now: Situation, memory: ScalingMemory) -> ScalingDecision:
    """Decides how many replicas there should be. Called again and again, with the memory of the last decision."""
    target = min(max(now.target, settings.min_replicas), settings.max_replicas)
    if target != now.target:
        reason = f"limits: {settings.min_replicas} to {settings.max_replicas} replicas"
        return ScalingDecision(target, reason, _changed(now))
    fresh = {
        name: values
        for name, samples in now.signals.items()
        if (values := [each.value for each in samples if now.now_s - each.at_s <= settings.stale_s])
    }
    settled = now.running == target
    if not settled:
        memory = msgspec.structs.replace(memory, unsettled_s=now.now_s)
    hot = _hot_rules(settings.scale_out, fresh)
    if hot:
        hot_since_s = now.now_s if memory.hot_since_s is None else memory.hot_since_s
        memory = msgspec.structs.replace(memory, hot_since_s=hot_since_s, idle_since_s=None)
        # What is starting is not counted again: its work is still in the queues of the others.
        cooled = memory.unsettled_s is None or now.now_s - memory.unsettled_s >= settings.cool_down_s
        if settled and cooled and now.now_s - hot_since_s >= settings.out_after_s:
            wanted = min(settings.max_replicas, target + max(rule.add for _, rule, _ in hot))
            if wanted > target:
                reason = ", ".join(f"{name} {value:.3g} > {rule.above:g}" for name, rule, value in hot)
                return ScalingDecision(wanted, reason, _changed(now))
        return ScalingDecision(target, "", memory)
    memory = msgspec.structs.replace(memory, hot_since_s=None)
    left = max(settings.min_replicas, target - settings.scale_in.remove) if settings.scale_in else target
    starting = now.running < target and memory.changed_s is not None and now.now_s - memory.changed_s < settings.start_s
    unchanged = left == target or starting or not 0 < now.running <= target
    if settings.scale_in is None or unchanged or not _idle(settings, now, fresh, min(left, now.running)):
        return ScalingDecision(target, "", msgspec.structs.replace(memory, idle_since_s=None))
    idle_since_s = now.now_s if memory.idle_since_s is None else memory.idle_since_s
    if now.now_s - idle_since_s < settings.in_after_s:
        return ScalingDecision(target, "", msgspec.structs.replace(memory, idle_since_s=idle_since_s))
    reason = f"idle for {settings.in_after_s:g} s: occupancy {fmean(fresh['occupancy']):.3g}"
    return ScalingDecision(left, reason, _changed(now))


def _changed(now: Situation) -> ScalingMemory:
    return ScalingMemory(unsettled_s=now.now_s, changed_s=now.now_s)


def _hot_rules(
    rules: ScaleOutRules, fresh: Mapping[SignalName, Sequence[float]]
) -> list[tuple[str, ScaleOutRule, float]]:
    """Rules that hold, with the value of their signal: the fullest queue of all ingresses, else the mean of the
    replicas that report it. A signal that nobody reports says nothing."""
    found = []
    for name in ScaleOutRules.__struct_fields__:
        rule: ScaleOutRule | None = getattr(rules, name)
        if rule is None or not (values := fresh.get(name)):  # type: ignore[call-overload]
            continue
        value = max(values) if name == "ingress_queue" else fmean(values)
        if value > rule.above:
            found.append((name, rule, value))
    return found


def _idle(settings: AutoscaleSettings, now: Situation, fresh: Mapping[SignalName, Sequence[float]], left: int) -> bool:
    """Returns whether `left` of the running replicas would do. An unknown load is not a low one: every replica must
    have reported, and have an ingress."""
    rule = settings.scale_in
    assert rule is not None
    if any(len(fresh.get(name, ())) < now.running for name in now.needed):
        return False
    mean = {name: fmean(values) for name, values in fresh.items()}
    more = now.running / left
    below: list[tuple[float, float | None]] = [
        (more * mean["occupancy"], rule.occupancy_below),
        (more * mean.get("sessions", 0.0), rule.sessions_below),
        (mean.get("accelerator", 0.0), rule.accelerator_below),
    ]
    if (backlog := settings.scale_out.backlog_s) is not None:
        below.append((more * mean.get("backlog_s", 0.0), backlog.above / 2))
    quick = mean["queue_s"] <= rule.queue_s_below
    return quick and all(limit is None or value < limit for value, limit in below)
