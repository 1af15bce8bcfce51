"""A time after which no slow test begins: `.ci/run` has 90 minutes on every machine, and some CPUs are three
times as slow as others. Tests that are not slow always run. The tests that did not begin are counted at the end.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

UNTIL = "SLOW_TESTS_UNTIL"
"""Variable with that time, in seconds since 1970. Without it there is no limit."""
NO_TIME = "no time is left for slow tests: this machine takes too long for all of them"


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get(UNTIL)
    if until and time.time() > float(until) and item.get_closest_marker("slow"):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    late = sum(isinstance(report.longrepr, tuple) and NO_TIME in report.longrepr[2] for report in skipped)
    if late:
        terminalreporter.line(f"slow tests that did not begin, since no time was left: {late}", yellow=True)
