"""The decision to scale, on a virtual clock: steps, limits, cool-down, hysteresis, signals that are missing or old."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asr_serve.cluster.autoscaling import (
    NEEDED,
    NEEDED_WITHOUT_INGRESS,
    AutoscaleSettings,
    Sample,
    ScalingMemory,
    Situation,
    decide,
)
from asr_serve.cluster.cluster_config import from_mapping
from asr_serve.errors import OptionError

IDLE = {"occupancy": 0.0, "queue_s": 0.0, "sessions": 0.0, "backlog_s": 0.0, "ingress_queue": 0.0}
"""What an engine without work reports."""
EVERY_S = 1.0


class Replicas:
    """Replicas whose number the policy decides. They start and stop at once, but for `room`."""

    def __init__(self, count: int = 1, room: int = 99, **settings: Any) -> None:
        self.settings = msgspec.convert({"max_replicas": 8, **settings}, AutoscaleSettings)
        self.now_s, self.target, self.room = 1_000.0, count, room
        self.memory, self.reasons = ScalingMemory(), []
        self.silent_from: int | None = None
        """Replicas from this one on report nothing."""
        self.late_s = 0.0
        self.unreported: set[str] = set()

    @property
    def running(self) -> int:
        return min(self.target, self.room)

    def run(self, seconds: float, **signals: float) -> list[int]:
        """Replicas after each second under that load of each replica."""
        found = []
        for _ in range(round(seconds / EVERY_S)):
            self.now_s += EVERY_S
            reporting = self.running if self.silent_from is None else min(self.running, self.silent_from)
            values = {name: value for name, value in (IDLE | signals).items() if name not in self.unreported}
            samples = {name: [Sample(self.now_s - self.late_s, value)] * reporting for name, value in values.items()}
            decision = decide(self.settings, Situation(self.now_s, self.running, self.target, samples), self.memory)
            # The state is kept as plain data, as Ray Serve does.
            self.memory = msgspec.convert(msgspec.to_builtins(decision.memory), ScalingMemory)
            assert (decision.replicas != self.target) == bool(decision.reason)
            self.target = decision.replicas
            self.reasons += [decision.reason] if decision.reason else []
            found.append(self.target)
        return found


@pytest.mark.parametrize(
    ("signal", "value", "added"),
    [
        ("ingress_queue", 0.81, 2),
        ("queue_s", 0.6, 1),
        ("backlog_s", 61.0, 1),
        ("occupancy", 0.95, 1),
        ("sessions", 0.9, 1),
        ("collectives", 0.95, 1),
    ],
)
def test_each_signal_adds_its_step(signal: str, value: float, added: int):
    replicas = Replicas(2, out_after_s=3)
    assert replicas.run(3, **{signal: value}) == [2, 2, 2]
    assert replicas.run(1, **{signal: value}) == [2 + added]
    assert replicas.reasons[0].startswith(f"{signal} ")


def test_the_largest_of_several_steps_is_taken_and_not_their_sum():
    replicas = Replicas(1, out_after_s=0)
    assert replicas.run(1, ingress_queue=0.9, queue_s=3.0, occupancy=1.0) == [3]


@pytest.mark.parametrize("signal", ["queue_s", "ingress_queue"])
def test_a_value_at_its_threshold_adds_nothing(signal: str):
    threshold = {"queue_s": 0.5, "ingress_queue": 0.8}[signal]
    assert set(Replicas(2).run(100, **{signal: threshold})) == {2}


def test_a_short_peak_adds_nothing():
    replicas = Replicas(1, out_after_s=5)
    for _ in range(20):
        assert set(replicas.run(4, queue_s=9.0) + replicas.run(1)) == {1}


def test_replicas_are_added_one_cool_down_apart_and_up_to_the_limit():
    replicas = Replicas(1, max_replicas=4, out_after_s=0, cool_down_s=10)
    found = replicas.run(60, ingress_queue=1.0)
    assert found[0] == 3
    assert found[:10] == [3] * 10
    assert found[10] == 4
    assert set(found[10:]) == {4}


def test_what_still_starts_is_not_added_again():
    replicas = Replicas(1, room=1, out_after_s=0, cool_down_s=10)
    assert set(replicas.run(100, queue_s=5.0)) == {2}
    replicas.room = 2  # it has started: its cool-down begins
    found = replicas.run(12, queue_s=5.0)
    assert found[:9] == [2] * 9
    assert found[-1] == 3


def test_replicas_without_room_go_when_nobody_needs_them():
    replicas = Replicas(2, room=2, out_after_s=0, in_after_s=10, start_s=60, scale_in={"remove": 2})
    assert replicas.run(1, ingress_queue=1.0) == [4]
    assert set(replicas.run(59)) == {4}, "they may be starting"
    assert replicas.run(20)[-1] == 2
    assert replicas.running == 2


def test_idle_replicas_go_step_by_step_down_to_the_limit():
    replicas = Replicas(5, min_replicas=2, in_after_s=10, scale_in={"remove": 2})
    found = replicas.run(60)
    assert found[9:11] == [5, 3]
    assert found[20:23] == [3, 2, 2]
    assert found[-1] == 2


@pytest.mark.parametrize("signal", ["occupancy", "sessions"])
def test_nothing_goes_where_the_rest_would_have_too_much(signal: str):
    """0.25 of each of two is 0.5 of one, and above 0.4; 0.19 is 0.38."""
    assert set(Replicas(2, in_after_s=10).run(60, **{signal: 0.25})) == {2}
    assert Replicas(2, in_after_s=10).run(60, **{signal: 0.19})[-1] == 1
    assert Replicas(3, in_after_s=10).run(60, **{signal: 0.25})[-1] == 2


@pytest.mark.parametrize("load", [{"queue_s": 0.2}, {"accelerator": 0.3}, {"backlog_s": 40.0}])
def test_nothing_goes_while_callers_wait_or_the_accelerator_computes(load: dict[str, float]):
    assert set(Replicas(2, in_after_s=10).run(60, **load)) == {2}


def test_an_idle_accelerator_is_no_reason_to_add_a_replica():
    """The rule of the first design, under 20 % utilization: one more, would never end."""
    assert Replicas(2, in_after_s=10).run(60, accelerator=0.0)[-1] == 1


def test_a_moment_of_load_begins_the_wait_again():
    replicas = Replicas(2, in_after_s=10)
    for _ in range(10):
        assert set(replicas.run(9) + replicas.run(1, occupancy=0.5)) == {2}


def test_one_load_never_adds_and_removes_in_turn():
    """Whatever the load of all replicas together, their number settles."""
    for load in range(1, 80):
        replicas = Replicas(3, out_after_s=0, cool_down_s=5, in_after_s=5)
        for _ in range(60):
            replicas.run(10, occupancy=min(1.0, load / 10 / replicas.target))
        assert len(set(replicas.run(100, occupancy=min(1.0, load / 10 / replicas.target)))) == 1, load


@pytest.mark.parametrize("name", sorted(IDLE))
def test_nothing_goes_on_a_signal_that_is_missing(name: str):
    replicas = Replicas(3, in_after_s=10)
    replicas.unreported = {name}
    assert set(replicas.run(100)) == {3}


def test_replicas_that_encode_for_others_need_no_ingress():
    for needed, left in ((NEEDED, 2), (NEEDED_WITHOUT_INGRESS, 1)):
        signals = {name: [Sample(0.0, 0.0)] * 2 for name in ("occupancy", "queue_s")}
        settings = AutoscaleSettings(max_replicas=2, in_after_s=0)
        assert decide(settings, Situation(0.0, 2, 2, signals, needed), ScalingMemory()).replicas == left


def test_nothing_goes_while_one_replica_is_silent():
    replicas = Replicas(3, in_after_s=10)
    replicas.silent_from = 2
    assert set(replicas.run(100)) == {3}
    replicas.silent_from = None
    assert replicas.run(11)[-1] == 2


def test_those_that_report_are_enough_to_add():
    replicas = Replicas(3, out_after_s=0)
    replicas.silent_from = 1
    assert replicas.run(1, queue_s=2.0) == [4]


def test_without_any_report_nothing_changes():
    replicas = Replicas(3, in_after_s=10, out_after_s=0)
    replicas.silent_from = 0
    assert set(replicas.run(100, queue_s=9.0)) == {3}


def test_old_reports_do_not_count():
    for load in ({"queue_s": 9.0}, {}):
        replicas = Replicas(3, in_after_s=10, out_after_s=0, stale_s=20)
        replicas.late_s = 21.0
        assert set(replicas.run(100, **load)) == {3}


def test_the_fullest_queue_of_an_ingress_counts_and_not_the_mean():
    settings = AutoscaleSettings(max_replicas=8, out_after_s=0)
    queues = [Sample(0.0, fill) for fill in (0.0, 0.0, 0.0, 0.9)]
    assert decide(settings, Situation(0.0, 4, 4, {"ingress_queue": queues}), ScalingMemory()).replicas == 6


def test_limits_hold_whatever_somebody_else_set():
    assert Replicas(20, max_replicas=8).run(1) == [8]
    assert Replicas(1, min_replicas=3).run(1) == [3]


def test_rules_can_be_left_out():
    replicas = Replicas(2, out_after_s=0, in_after_s=1, scale_out={"queue_s": None}, scale_in=None)
    assert set(replicas.run(20, queue_s=9.0) + replicas.run(20)) == {2}


@pytest.mark.parametrize(
    ("autoscale", "told"),
    [
        ({}, "max_replicas"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas up to max_replicas"),
        ({"max_replicas": 2, "stale_s": 5}, "two reports or more"),
        ({"max_replicas": 2, "scale_out": {"queue_s": {"above": 0}}}, "queue_s.above"),
        ({"max_replicas": 2, "scale_out": {"rx_queue": {"above": 0.8}}}, "rx_queue"),
        ({"max_replicas": 2, "scale_out": {"queue_s": {"above": 1, "add": 0}}}, "queue_s.add"),
        ({"max_replicas": 2, "scale_in": {"occupancy_below": 0.9}}, "added and removed in turn"),
        ({"max_replicas": 2, "scale_in": {"queue_s_below": 1.0}}, "added and removed in turn"),
        (
            {
                "max_replicas": 2,
                "scale_out": dict.fromkeys(
                    ("ingress_queue", "queue_s", "backlog_s", "occupancy", "sessions", "collectives")
                ),
            },
            "without a rule",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(autoscale: dict[str, Any], told: str):
    with pytest.raises(OptionError, match="the file") as refused:
        from_mapping({"models": [{"model": "a", "autoscale": autoscale}]}, "the file")
    assert told in str(refused.value)


def test_a_number_of_replicas_and_a_policy_exclude_each_other():
    model = {"model": "a", "autoscale": {"min_replicas": 2, "max_replicas": 4}}
    config = from_mapping({"models": [model]}, "the file")
    assert config.autoscales
    assert config.models[0].first_replicas == 2
    with pytest.raises(OptionError, match=r"autoscale\.min_replicas"):
        from_mapping({"models": [model | {"replicas": 3}]}, "the file")


def test_the_page_has_the_defaults():
    page = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
    settings = AutoscaleSettings(max_replicas=2)
    rules = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+ \| \d+) \|", page, re.MULTILINE))
    defaults = {name: getattr(settings.scale_out, name) for name in settings.scale_out.__struct_fields__}
    assert rules == {name: f"{rule.above:g} | {rule.add}" for name, rule in defaults.items()}
    described = dict(re.findall(r"^\| `(?:scale_in\.)?(\w+)`[^|]*\| [^|]* \| ([\d.]+) \|$", page, re.MULTILINE))
    for name in settings.scale_in.__struct_fields__:
        assert float(described[name]) == getattr(settings.scale_in, name)
    for name in ("out_after_s", "in_after_s", "cool_down_s", "start_s"):
        assert float(described[name]) == getattr(settings, name)
    assert f"| {settings.report_s:g}, {settings.stale_s:g} |" in page
