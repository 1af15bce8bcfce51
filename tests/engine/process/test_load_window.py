"""Rates of an engine over its last seconds, on a virtual clock."""

from __future__ import annotations

import pytest

from asr_serve.engine.process.load_window import WINDOW_S, LoadTotals, LoadWindow


class Engine:
    """Totals of an engine under a load that is told."""

    def __init__(self) -> None:
        self.window, self.now_s = LoadWindow(), 50.0
        self.occupied_s = self.waited_s = self.collectives_s = 0.0
        self.started = 0

    @property
    def totals(self) -> LoadTotals:
        return LoadTotals(self.occupied_s, self.waited_s, self.started, self.collectives_s)

    def run(self, seconds: float, *, occupancy: float = 0.0, wait_s: float | None = None, every_s: float = 0.5) -> None:
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.occupied_s += occupancy * every_s
            self.collectives_s += occupancy * every_s / 2
            if wait_s is not None:
                self.started += 1
                self.waited_s += wait_s
            self.window.sample(self.now_s, self.totals)

    def rates(self, waiting: int = 0):
        return self.window.rates(self.now_s, self.totals, waiting)


def test_a_new_engine_has_no_rates():
    engine = Engine()
    assert engine.rates() is None
    engine.run(0.5, occupancy=1.0)
    assert engine.rates() is None


def test_rates_are_those_of_the_last_seconds_alone():
    engine = Engine()
    engine.run(100, occupancy=1.0, wait_s=4.0)
    found = engine.rates()
    assert (found.occupancy, found.queue_s, found.collectives) == pytest.approx((1.0, 4.0, 0.5))
    engine.run(WINDOW_S + 1, occupancy=0.25, wait_s=0.1)
    found = engine.rates()
    assert (found.occupancy, found.queue_s, found.collectives) == pytest.approx((0.25, 0.1, 0.125))


def test_a_step_that_is_counted_at_its_end_gives_no_share_above_one():
    engine = Engine()
    engine.run(20)
    engine.occupied_s += 15.0
    assert engine.rates().occupancy == 1.0


def test_requests_that_wait_behind_a_long_step_are_seen():
    engine = Engine()
    engine.run(20, wait_s=0.0)
    engine.run(WINDOW_S + 1)
    assert engine.rates().queue_s == 0.0
    assert engine.rates(waiting=3).queue_s >= WINDOW_S


def test_an_engine_in_one_process_has_no_collectives():
    window = LoadWindow()
    for second in range(5):
        window.sample(float(second), LoadTotals(0.0, 0.0, 0))
    assert window.rates(5.0, LoadTotals(1.0, 0.0, 0), 0).collectives is None


def test_the_window_keeps_few_samples_however_often_it_is_asked():
    engine = Engine()
    engine.run(100, every_s=0.01)
    assert len(engine.window._samples) <= WINDOW_S + 2
