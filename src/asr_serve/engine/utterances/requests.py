"""Requests that have been let in: what each needs to be heard, what is worked on, and what they are told."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from asr_serve import units
from asr_serve.decoding.attention import Hypothesis, Recognition, Reused
from asr_serve.engine.session import Utterance, resolve
from asr_serve.engine.stats import Stats
from asr_serve.engine.utterances.encode import Lent
from asr_serve.engine.utterances.planner import Waiting
from asr_serve.engine.utterances.runner import DecodeRunner
from asr_serve.engine.utterances.starts import rows_needed
from asr_serve.types import Phases, Priority


class Need(NamedTuple):
    """Frames to encode, rows and pages to decode."""

    frames: int
    rows: int
    pages: int


class Requests:
    """Of one engine, by number. Belongs to the loop's thread."""

    stats: Stats
    """The loop's."""

    def __init__(
        self,
        model: Any,
        runner: DecodeRunner,
        window: str,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
    ) -> None:
        """`window`: see EngineConfig."""
        self._model, self._runner = model, runner
        self._window = window if hasattr(model, "window") else "packed"
        self.text, self._tokens_per_s = text, tokens_per_s
        self._on_done, self.on_start = on_done, on_start
        self.open: dict[int, Utterance] = {}
        self.lent: dict[int, Lent] = {}
        """Of those whose audio was encoded elsewhere: it lies in pages already."""
        self.count: Counter[Priority] = Counter()
        self.live_s = -math.inf
        """When somebody on line last wanted something."""

    @property
    def pressing(self) -> bool:
        """Somebody waits for an answer."""
        return bool(self.count["live"] or self.count["interactive"])

    def add(self, utterance: Utterance, lent: Lent | None = None) -> None:
        self.open[utterance.id] = utterance
        self.count[utterance.priority] += 1
        utterance.whole, utterance.arrived_s = self._window == "whole", time.monotonic()
        if lent is not None:
            self.lent[utterance.id] = lent
        if utterance.priority == "live":
            self.live_s = utterance.arrived_s

    def remove(self, request_id: int) -> Utterance:
        utterance = self.open.pop(request_id)
        self.count[utterance.priority] -= 1
        if self.lent.pop(request_id, None) is None:
            self._on_done(utterance.samples)
        return utterance

    def start(self, ids: list[int]) -> list[Utterance]:
        """These are worked on."""
        start_ns = time.time_ns()
        batch = [self.open[i] for i in ids]
        new = [utterance for utterance in batch if not utterance.encode_start_ns]
        for utterance in new:
            utterance.encode_start_ns = start_ns
            self.stats.queued(utterance.priority, max(0, start_ns - utterance.submitted_ns) / 1e9)
        self.on_start([utterance.id for utterance in new])
        return batch

    def heard(self, utterance: Utterance) -> None:
        """Its frames are in pages."""
        if not self.leaves_out(utterance):
            utterance.pcm = None
        utterance.encode_end_ns = time.time_ns()

    def answer(self, utterance: Utterance, answer: Recognition) -> None:
        """What somebody else was told."""
        self.finish(utterance, answer, "answer")

    def finish(self, utterance: Utterance, answer: Recognition, reused: Reused) -> None:
        """It is answered, and not here any more."""
        self.remove(utterance.id)
        now_ns = time.time_ns()
        if utterance.wanted:
            self.stats.found(reused or "none")
        self.stats.recognised(utterance.samples, 0 if reused == "answer" else len(answer.tokens))
        phases = Phases(
            submitted_ns=utterance.submitted_ns,
            encode_start_ns=utterance.encode_start_ns or now_ns,
            encode_end_ns=utterance.encode_end_ns or now_ns,
            decode_end_ns=now_ns,
        )
        resolve(utterance.future, msgspec.structs.replace(answer, phases=phases, reused=reused))

    # --- what one needs -----------------------------------------------------------------------------------

    def need(self, utterance: Utterance) -> Need:
        pcm, whole = utterance.pcm, [True] * utterance.whole
        frames = 0 if pcm is None else self._model.frames(len(pcm), *whole)
        limit, options = self._max_tokens(utterance.samples), utterance.options
        return Need(frames, rows_needed(options), self._runner.pages_needed(frames, limit, options))

    def waiting(self, each: Utterance, like: Utterance) -> Waiting:
        """As the planner knows it; `like`: as soon as that one."""
        frames, rows, pages = self.need(each)
        return Waiting(each.id, frames, pages, like.priority, like.arrived_s * 1_000, like.within_ms, rows)

    def expect_room(self, utterance: Utterance) -> None:
        """Raises OptionError where it asks for what there will never be."""
        _, rows, pages = self.need(utterance)
        self._runner.expect_room(rows, pages)

    def hypothesis(self, utterance: Utterance) -> Hypothesis:
        limit = self._max_tokens(utterance.samples)
        hypothesis = Hypothesis(utterance.options, self._model.eos, limit, self.text, utterance.draft)
        hypothesis.hotwords = utterance.hotwords
        return hypothesis

    def leaves_out(self, utterance: Utterance) -> bool:
        """Whether silence is left out of its window that it may yet be heard with."""
        pcm = None if self._window != "checked" or utterance.whole else utterance.pcm
        return pcm is not None and bool(self._model.frames(len(pcm)) < self._model.frames(len(pcm), True))

    def _max_tokens(self, samples: int) -> int:
        """Nobody says more than this in that time; never past the model's positions, the first being BOS."""
        most = 4 + int(units.samples_to_s(samples) * self._tokens_per_s)
        return min(int(self._model.max_tokens) - 1, most)
