from __future__ import annotations

import io

import pytest
from rich.console import Console

from asr_serve.api.cli.progress import ProgressBar, ProgressMeter, clock_time


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_meter_knows_only_what_it_was_told() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    assert meter.describe() == "0.0 s of audio"
    meter.start()
    clock.now_s += 2
    assert (meter.speed, meter.left_s) == (None, None)
    meter.update(16_000 * 60, None)
    assert meter.describe() == "60.0 s of audio, 30.0 x real time"
    meter.update(16_000 * 60, 16_000 * 90)
    assert meter.describe() == "60.0 of 90.0 s of audio, 30.0 x real time, 0:01 left"
    meter.update(16_000 * 90, 16_000 * 80)  # a header that promised too little
    assert meter.left_s == 0
    assert meter.describe_done() == "90.0 s of audio in 2.0 s, 45.0 x real time"


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (6.2, "0:07"), (720, "12:00"), (3_723, "1:02:03")])
def test_clock_time(seconds: float, said: str) -> None:
    assert clock_time(seconds) == said


def test_the_bar_stays_on_its_own_terminal_and_steps_aside(capfd: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={})
    with ProgressBar(ProgressMeter(Clock()), console=console, stdout_shared=True) as bar:
        bar.update(16_000, 32_000)
        with bar.paused():
            shown = screen.getvalue()
            print("a result")
            assert screen.getvalue() == shown
        assert len(screen.getvalue()) > len(shown)
    assert "1.0 of 2.0 s of audio" in screen.getvalue()
    assert capfd.readouterr().out == "a result\n"


@pytest.mark.parametrize("shown", [True, False])
def test_no_bar_without_a_terminal_or_when_quiet(shown: bool) -> None:
    screen = io.StringIO()
    with ProgressBar(ProgressMeter(), shown=shown, console=Console(file=screen, force_terminal=not shown)) as bar:
        bar.update(16_000, None)
        with bar.paused():
            pass
    assert screen.getvalue() == ""


def test_the_bar_stays_where_results_go_elsewhere() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={})
    with ProgressBar(ProgressMeter(Clock()), console=console, stdout_shared=False) as bar:
        before = screen.getvalue()
        with bar.paused():
            assert screen.getvalue() == before
        with bar.paused(stderr=True):
            assert screen.getvalue() != before
