"""Turn model on threads beside the loop.

It shares nothing with the loop but the cores: no rows, no pages, no state between queries. A query is made while
the speaker is silent, so it must not wait for a step of the loop, or run at a lower priority: niced, as encoders
are, it took twice as long on a busy machine.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asr_serve.devices.interface import Device
from asr_serve.errors import AsrServeError, EngineClosed, StepFailed, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.store import verified_published_folder
from asr_serve.models.interfaces import TurnModel
from asr_serve.models.registry import TurnCard, turn_card, turn_cards, turn_model_file

if TYPE_CHECKING:
    from asr_serve.engine.stats import EngineStats

log = logging.getLogger(__name__)

CORES_PER_THREAD = 4
"""Cores for each thread that runs turn queries."""


class LoadedTurnModel(NamedTuple):
    card: TurnCard
    model: TurnModel


def load_turn_model(wanted: str) -> LoadedTurnModel | None:
    """Loads a turn model by name; for `auto` the first whose weights are on this machine, or None; for `none`,
    None.

    Raises UnknownModel, WeightsMissing, WeightsCorrupt; none of them for `auto`.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        return _load(turn_card(wanted))
    for card in turn_cards().values():
        try:
            return _load(card)
        except WeightsMissing:
            continue
        except WeightsCorrupt as failure:  # not requested by name: warn, and continue without
            log.warning("the turn model %s is not used: %s", card.name, failure)
    return None


def _load(card: TurnCard) -> LoadedTurnModel:
    return LoadedTurnModel(card, turn_model_file(card.kind).Model(verified_published_folder(card)))


class TurnRunner:
    """Runs turn queries, each on one thread. The client limits how many wait."""

    def __init__(self, loaded: LoadedTurnModel, device: Device, stats: EngineStats) -> None:
        self.card, self._model = loaded
        self._stats, self._lock = stats, Lock()
        self._threads = ThreadPoolExecutor(
            max(1, device.threads // CORES_PER_THREAD), "asr-serve turn", initializer=device.set_threads, initargs=(1,)
        )

    def submit(self, pcm: np.ndarray, answer: Future[float]) -> None:
        """Submits a query; `answer` receives the probability, StepFailed or EngineClosed. May be called from any
        thread."""
        try:
            prediction = self._threads.submit(self._predict, pcm)
        except RuntimeError:  # raised by a pool that is shut down
            answer.set_exception(_closed())
        else:
            prediction.add_done_callback(partial(self._answer, answer))

    def _predict(self, pcm: np.ndarray) -> float:
        started = time.perf_counter()
        probability = self._model.finished(pcm)
        with self._lock:
            self._stats.record_step("turn", time.perf_counter() - started, 1, 1.0)
        return probability

    def _answer(self, answer: Future[float], prediction: Future[float]) -> None:
        failure = _closed() if prediction.cancelled() else prediction.exception()
        if failure is None:
            answer.set_result(prediction.result())
        elif isinstance(failure, AsrServeError):
            answer.set_exception(failure)
        else:
            self._stats.record_failed_step("turn")
            log.error("a turn model's step failed", exc_info=failure)
            failed = StepFailed(f"the turn model failed: {type(failure).__name__}: {failure}", todo="go on without")
            failed.__cause__ = failure
            answer.set_exception(failed)

    def close(self) -> None:
        """Waits for running queries; the others raise EngineClosed."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed", todo="load the model again")
