"""Fixtures every room's tests share. Speech comes from packages; the larger sets are optional."""

from __future__ import annotations

import importlib.resources
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from allowed_skips import pytest_configure as pytest_configure
from case_tiers import pytest_itemcollected as pytest_itemcollected
from children import restore_sigint
from file_order import pytest_collection_modifyitems as pytest_collection_modifyitems
from freed_memory import pytest_runtest_protocol as pytest_runtest_protocol
from shared_certificates import share_certificates
from through_cluster import pytest_addoption as pytest_addoption
from through_cluster import pytest_runtest_call as pytest_runtest_call
from through_cluster import pytest_runtest_setup as pytest_runtest_setup

from asr_serve.config import limit_openmp_spinning
from asr_serve.engine import executor
from asr_serve.server.telemetry.logs import LOGGER_NAMES

pytest_plugins = ("slow_tests_limit",)

restore_sigint()  # before any test starts a process
share_certificates()
limit_openmp_spinning()  # before any test loads torch: the servers some of them start want the same cores
executor.CHECKS_PER_IDLE = executor.MAX_CHECKS = 1 << 30  # an engine that does nothing looks through all that it holds

_user_data = tempfile.TemporaryDirectory(prefix="asr-serve-tests-")
os.environ["XDG_DATA_HOME"] = _user_data.name  # batches and cloned voices of servers that no test gives a folder
os.environ["XDG_STATE_HOME"] = str(Path(_user_data.name, "state"))  # submissions of batches

LOGGERS = tuple(logging.getLogger(name) for name in (None, *LOGGER_NAMES))
ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("ASR_SERVE_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def speech_data() -> Path:
    """Folder of evaluation speech; tests that want it skip where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no evaluation speech at {DATA}: set ASR_SERVE_DATA to a folder that holds it")
    return DATA


@pytest.fixture(scope="session")
def packaged_speech() -> Path:
    """Folder with real speech that a test dependency carries: beckett.wav, two_cities.wav."""
    folder = Path(str(importlib.resources.files("moonshine_voice"))) / "assets"
    if not folder.is_dir():
        pytest.skip("moonshine-voice is not installed: pip install moonshine-voice==0.1.0")
    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_26)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undoes a logging setup: its handler writes to a stream that pytest closes after the test, and servers of other
    tests would fail to log there."""
    kept = [(logger.handlers[:], logger.level, logger.propagate) for logger in LOGGERS]
    yield
    for logger, (handlers, level, propagate) in zip(LOGGERS, kept, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        if logger.level != level:  # setting it forgets what every logger has cached
            logger.setLevel(level)
