"""Windows that wait to be heard for speakers: a few in a step of the loop, on its thread.

Not beside it: the same cores would have to be shared between two pools of threads, and both stages together took a
quarter longer than one after the other. A step is short, for whoever speaks live waits behind it.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from asr_serve.devices.base import Device
from asr_serve.engine.speakers.hearing import Hearing
from asr_serve.engine.stats import Stats
from asr_serve.engine.work import Attempt
from asr_serve.errors import AsrServeError, WeightsCorrupt, WeightsMissing
from asr_serve.speaker.local import LocalVoices

WINDOWS = 4
"""In a step while nobody is on line: 40 s, which take as long as a batch of utterances."""
LIVE_WINDOWS = 1


class Question(NamedTuple):
    pcm: np.ndarray
    answer: Future[LocalVoices]
    """Nobody cancels it."""


class Voices:
    """Only the loop touches it. How many may wait is for EngineClient to bound."""

    def __init__(self, device: Device, stats: Stats) -> None:
        self._device, self._stats = device, stats
        self._waiting: deque[Question] = deque()
        self._hearing: Hearing | None = None
        """Loaded when it is first wanted."""

    def ask(self, question: Question) -> None:
        self._waiting.append(question)

    def step(self, live: bool) -> bool:
        """Hear some; False when nothing waits. `live`: somebody is on line."""
        batch: list[Question] = []
        while self._waiting and len(batch) < (LIVE_WINDOWS if live else WINDOWS):
            batch.append(self._waiting.popleft())
        if not batch:
            return False
        started = time.perf_counter()

        def fail(error: AsrServeError) -> None:
            for question in batch:
                question.answer.set_exception(error)

        if self._hearing is None:
            try:
                self._hearing = Hearing.load(self._device)
            except (WeightsMissing, WeightsCorrupt) as failure:  # the next one may find them
                fail(failure)
                return True
        with Attempt(self._stats, "speakers", "hearing who speaks", fail):
            heard = self._hearing.hear([each.pcm for each in batch])
            for question, voices in zip(batch, heard, strict=True):
                question.answer.set_result(voices)
        self._stats.step("speakers", time.perf_counter() - started, len(batch), len(batch) / WINDOWS)
        return True

    def end(self, error: AsrServeError) -> None:
        while self._waiting:
            self._waiting.popleft().answer.set_exception(error)
