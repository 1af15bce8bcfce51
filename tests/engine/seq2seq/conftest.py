"""Engines around a tiny random model: Whisper, or what a test module's ENGINE names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_whisper

from asr_serve.engine.client import EngineClient


def start(module: Any, **settings: Any) -> EngineClient:
    return getattr(module, "ENGINE", tiny_whisper).start(**settings)


@pytest.fixture
def begin(request: pytest.FixtureRequest, close_later: Any) -> Callable[..., EngineClient]:
    """Starts engines with the settings given, and closes them."""
    return lambda **settings: close_later(start(request.module, **settings))


@pytest.fixture(scope="module", params=["native", "reference"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    """An engine for all tests of a module, with native kernels and with the reference ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_NATIVE", "1" if request.param == "native" else "0")
        client = start(request.module, **getattr(request.module, "CLIENT_SETTINGS", {}))
    yield client
    client.close()
