"""Skips that CI allows. A skip with any other reason leaves a behaviour unproven, and nobody would see it: with
STRICT_SKIPS=1 it fails the run, with `report`, as `.ci/run` sets it, it is listed at the end.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import Any

import pytest

ALLOWED_SKIPS = {
    "no evaluation speech at *": "the speech with transcripts is no part of the repository",
    "*needs a CUDA device*": "CI has no GPU",
    "no CUDA device*": "CI has no GPU",
    "only Linux tells what a connection has received": "elsewhere the server cannot find silent connections",
    "root may *": "CI runs as root, whom file permissions do not stop",
    "this CPU, or what was compiled for it, has no *": "CPUs differ; each runs the kernels it has",
    "no weights of *": "packages that .ci/run tries to install may be missing",
    "*weights of * are not *": "the same",
    "no tiny.en.pt: *": "weights of upstream's own package, for comparisons on demand",
    "ASR_SERVE_MOONSHINE_BASE names no folder *": "a checkpoint that no package carries",
    "the oracle: *": "upstream packages of the extra `bench`",
    "could not import 'matplotlib'*": "a package of the extra `bench`",
    "the console's packages are not installed: *": "the built pages are in the package; npm is for their developers",
    "axe-core is not installed: *": "the same",
    "no tier has been measured yet: *": "CONTRIBUTING has no figures before somebody measures",
    "it cannot tell that nobody speaks": "a case of models that can",
    "one that says when something was said": "a case of models that can",
}
"""Pattern of the reason -> why CI cannot run the test."""


def is_allowed(reason: str) -> bool:
    """Whether CI allows a skip with this reason, with or without pytest's prefix."""
    reason = reason.removeprefix("Skipped: ")
    return any(fnmatchcase(reason, pattern) for pattern in ALLOWED_SKIPS)


STRICT_SKIPS = "STRICT_SKIPS"
"""Variable that switches this on: 1, or `report`."""


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
        if self.refused and exitstatus == pytest.ExitCode.OK and os.environ[STRICT_SKIPS] != "report":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.refused:
            terminalreporter.section("skips that tests/allowed_skips.py does not allow")
            for test, reason in sorted(self.refused.items()):
                terminalreporter.line(f"{test}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(STRICT_SKIPS) and not hasattr(config, "workerinput"):  # workers report to the first process
        config.pluginmanager.register(SkipPolicy(), "skip-policy")
