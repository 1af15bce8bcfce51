"""A packaged model and real speech."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.audio import read_audio


@pytest.fixture(scope="module")
def model(packaged_speech: Path) -> Iterator[Model]:
    with load_model() as model:
        yield model


@pytest.fixture
def idle_afterwards(model: Model) -> Iterator[None]:
    """Fails a test that leaves anything held by the engine."""
    yield
    expect_idle(model._client)


@pytest.fixture(scope="module")
def beckett(packaged_speech: Path) -> np.ndarray:
    """Ten seconds, six sentences, a pause after each."""
    return read_audio(packaged_speech / "beckett.wav")


@pytest.fixture(scope="module")
def cities(packaged_speech: Path) -> np.ndarray:
    """Forty-four seconds nearly without a pause."""
    return read_audio(packaged_speech / "two_cities.wav")
