"""Windows that wait to be heard for speakers: a few in a step of the loop, on its thread.

Not beside it: the same cores would have to be shared with recognition. While somebody is on line a step is one
window, for they wait behind it; otherwise windows wait for as many as go together. Who is on line comes first.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.devices.base import Device
from asr_serve.engine.speakers.hearing import Hearing
from asr_serve.engine.stats import Stats
from asr_serve.engine.work import Attempt
from asr_serve.errors import AsrServeError, WeightsCorrupt, WeightsMissing
from asr_serve.speaker.local import LocalVoices

WINDOWS, STEP_BUDGET_SAMPLES = 16, units.s_to_samples(120)
"""In a step while nobody is on line, and how much of them may be listened to. 16 windows of which 2.5 s are took
2.2 ms a second of audio, 8 at a time 2.6, so a step takes 0.35 s (bf16, two cores of a busy EPYC)."""
LIVE_WINDOWS = 1
WAIT_S = 0.5
"""So long a window waits for company while there is other work."""


class Question(NamedTuple):
    pcm: np.ndarray
    budget_samples: int
    live: bool
    """Of somebody who is on line."""
    answer: Future[LocalVoices]
    """Nobody cancels it."""
    due_s: float = 0.0
    """When it is to be heard without company."""


class Voices:
    """Only the loop touches it. How many may wait is for EngineClient to bound."""

    def __init__(self, device: Device, stats: Stats) -> None:
        self._device, self._stats = device, stats
        self._waiting: deque[Question] = deque()
        self._live: deque[Question] = deque()
        self._hearing: Hearing | None = None
        """Loaded when it is first wanted."""

    def ask(self, question: Question) -> None:
        (self._live if question.live else self._waiting).append(question._replace(due_s=time.monotonic() + WAIT_S))

    def step(self, *, live: bool, idle: bool) -> bool:
        """Hear some; False when none are heard. `live`: somebody is on line. `idle`: there is nothing else to do;
        if there is, windows wait for as many as go together, for they come one by one as files are read."""
        batch: list[Question] = []
        queue = self._live or self._waiting
        waits = not (live or idle or self._live or len(queue) >= WINDOWS)
        if waits and (not queue or time.monotonic() < queue[0].due_s):
            return False
        most, budget = LIVE_WINDOWS if live else WINDOWS, STEP_BUDGET_SAMPLES
        while queue and len(batch) < most and (not batch or queue[0].budget_samples <= budget):
            batch.append(queue.popleft())
            budget -= batch[-1].budget_samples
        if not batch:
            return False
        started = time.perf_counter()

        def fail(error: AsrServeError) -> None:
            for question in batch:
                question.answer.set_exception(error)

        if self._hearing is None:
            with Attempt(self._stats, "speakers", "loading what hears speakers", fail):
                try:
                    self._hearing = Hearing.load(self._device)
                except (WeightsMissing, WeightsCorrupt) as failure:  # the next one may find them
                    fail(failure)
        if self._hearing is None:
            return True
        with Attempt(self._stats, "speakers", "hearing who speaks", fail):
            heard = self._hearing.hear([(each.pcm, each.budget_samples) for each in batch])
            for question, voices in zip(batch, heard, strict=True):
                question.answer.set_result(voices)
        self._stats.step("speakers", time.perf_counter() - started, len(batch), len(batch) / WINDOWS)
        return True

    def end(self, error: AsrServeError) -> None:
        for queue in (self._live, self._waiting):
            while queue:
                queue.popleft().answer.set_exception(error)
        if self._hearing is not None:
            self._hearing.close()
