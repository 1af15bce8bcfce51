"""Skips that CI allows. Run under `.ci/run`, a skip with any other reason fails the run: a behaviour would go unproven,
and nobody would see it.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import Any

import pytest

ALLOWED_SKIPS = {
    "no evaluation speech at *": "the speech with transcripts is no part of the repository",
    "*needs a CUDA device*": "CI has no GPU",
    "no CUDA device": "CI has no GPU",
    "root may read everything": "CI runs as root, whom file permissions do not stop",
}
"""Pattern of the reason -> why CI cannot run the test."""


def is_allowed(reason: str) -> bool:
    """Whether CI allows a skip with this reason, with or without pytest's prefix."""
    reason = reason.removeprefix("Skipped: ")
    return any(fnmatchcase(reason, pattern) for pattern in ALLOWED_SKIPS)


STRICT_SKIPS = "ASR_SERVE_STRICT_SKIPS"
"""Variable that `.ci/run` sets: skips that are not in allowed_skips.py fail the run."""


class SkipPolicy:
    """Pytest plugin: collects skips, and fails the run for those that are not allowed."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        """Test or file -> reason."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2]
            if not is_allowed(reason):
                self.refused[report.nodeid] = reason

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.refused and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.refused:
            terminalreporter.section("skips that tests/allowed_skips.py does not allow")
            for test, reason in sorted(self.refused.items()):
                terminalreporter.line(f"{test}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(STRICT_SKIPS) and not hasattr(config, "workerinput"):  # workers report to the first process
        config.pluginmanager.register(SkipPolicy(), "skip-policy")
