"""`--through-cluster`: tests of servers use the ingress of a real Ray cluster in place of a server of their process.

    pytest -n 0 --through-cluster tests/server/test_openai_realtime.py

Tests that look into the process of their server, or replace code in it, are skipped, and so are those marked
`one_server`, with their reason.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import pytest

THROUGH_CLUSTER = "--through-cluster"
OWN_SERVERS = frozenset({"server", "shared_server", "serve", "speaker", "shared_speaker", "serve_voice"})


class Ending(Protocol):
    """Server that can be ended."""

    def end(self) -> None: ...


class Started:
    """Servers that the running test itself has started: they end with it, since each is a process."""

    def __init__(self) -> None:
        self.calling = False
        self.servers: list[Ending] = []


STARTED = Started()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(THROUGH_CLUSTER, action="store_true", help="servers of tests are ingresses of a cluster")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption(THROUGH_CLUSTER):
        if marker := item.get_closest_marker("one_server"):
            pytest.skip(marker.args[0])
        names = set(getattr(item, "fixturenames", ()))
        if not names & OWN_SERVERS:
            pytest.skip("it uses no server of the shared fixtures")
        if "monkeypatch" in names:
            pytest.skip("it replaces code in the process of its server")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    STARTED.calling = True
    try:
        return (yield)
    finally:
        STARTED.calling = False
        while STARTED.servers:
            STARTED.servers.pop().end()
