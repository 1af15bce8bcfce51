"""Engine clients over a checkpoint, on a thread or in a process of their own, and waits that end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asr_serve.config import EngineConfig
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.backend import ProcessBackend, process_backend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.thread_backend import thread_backend

WAIT_S = 180.0
NEMO = Path(__file__).parents[1] / "models" / "fixtures" / "fastconformer_hybrid.nemo"
NEMO_MODEL = "fastconformer-streaming-medium-en"
RING = RingSize(64, 16_384)
"""Small, so that a load of clips goes round it several times."""


def start_engine(
    model: str,
    weights: Path,
    config: EngineConfig = EngineConfig(),  # noqa: B008
    *,
    process: bool = False,
    ring: RingSize = RING,
    **spec: Any,
) -> EngineClient:
    """Start an engine on the CPU; `spec` holds further fields of a process's EngineSpec."""
    if process:
        fields = {"device": "cpu", "dtype": "fp32", "threads": 1, **spec}
        return EngineClient(config, process_backend(EngineSpec(model=model, weights=str(weights), **fields), ring))
    found = AsrCheckpoint.find(model, weights)
    if config.lookahead_frames is not None:
        found = found.with_lookahead(config.lookahead_frames)
    return EngineClient(config, thread_backend(found.card, lambda: found.build("cpu", "fp32")))


def backend_of(client: EngineClient) -> ProcessBackend:
    """The backend of an engine that has a process of its own."""
    assert isinstance(client.backend, ProcessBackend)
    return client.backend


def engine_pid(client: EngineClient) -> int:
    return backend_of(client)._current.process.pid


def wait_until(true: Callable[[], object], what: Callable[[], object] = lambda: "it never came true") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.005)


def spy(owner: object, method: str, record: Callable[..., object], patch: pytest.MonkeyPatch | None = None) -> None:
    """Call `record` with the arguments of every later call of a method, before it runs; `patch` undoes it."""
    original = getattr(owner, method)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        record(*arguments, **keywords)
        return original(*arguments, **keywords)

    (patch.setattr if patch else setattr)(owner, method, watched)


def fail_calls(
    owner: object, method: str, *calls: int, error: Exception | None = None, patch: pytest.MonkeyPatch | None = None
) -> Iterator[int]:
    """Make these later calls of a method fail, the first being 1. Returns the counter of calls."""
    counter = itertools.count(1)

    def check(*_: object, **__: object) -> None:
        if next(counter) in calls:
            raise error or RuntimeError("the device hiccuped")

    spy(owner, method, check, patch)
    return counter


def poison_free_pages(runner: Any) -> None:
    """Fill every free page of a decoder with NaN before it adds a row, steps or verifies a draft."""

    def poison(*_: object, **__: object) -> None:
        runner.kv_cache[runner.page_pool._free] = float("nan")

    for method in ("add_row", "step", "prefill_and_verify"):
        spy(runner, method, poison)
