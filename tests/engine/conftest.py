"""Fixtures of the engine's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from asr_serve.engine.client import EngineClient

Client = TypeVar("Client", bound=EngineClient)


@pytest.fixture
def close_later() -> Iterator[Callable[[Client], Client]]:
    """Takes engines that a test starts, and closes them at its end."""
    with contextlib.ExitStack() as started:

        def register(client: Client) -> Client:
            started.callback(client.close)
            return client

        yield register
