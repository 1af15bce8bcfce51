"""The work of a model that speaks: sentences in, sound out, a piece at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asr_serve.devices.base import Device
from asr_serve.engine.session import Utterance, reject, resolve
from asr_serve.engine.speaking.planner import (
    BULK_RESERVE,
    WITHIN_S,
    Pace,
    Playback,
    Turn,
    Waiting,
    choose,
    first_deadline_s,
)
from asr_serve.engine.speaking.runner import Piece, Row, Runner
from asr_serve.engine.speaking.saying import Saying
from asr_serve.engine.work import Attempt, Keeper
from asr_serve.errors import AsrServeError, Cancelled, WrongModel
from asr_serve.types import Sound

STEP_S = 0.05
"""How long encoding and a step of chunks may each take, as far as that can be told: somebody who comes meanwhile
waits for both."""
ENCODE_ROWS, ENCODE_PHONEMES, LEAST_PHONEMES = 32, 4_096, 128
"""Sentences and phonemes in one encode batch, however fast it goes; and phonemes however slow."""
LEAST_ROWS = 2
"""Of a step of chunks, however slow."""
PIECE_S = 0.1
"""Of sound that is there at once, a piece."""


class Active:
    """A sentence that has a row."""

    def __init__(self, saying: Saying, row: Row) -> None:
        self.saying, self.row = saying, row
        self.playback = Playback(_first_s(saying), WITHIN_S[saying.priority])
        self.made = 0
        """Samples, those to be skipped included."""


class Speaking:
    """Owns the runner, and every sentence that was let in. See engine/work.Work."""

    def __init__(
        self,
        runner: Runner[Any],
        device: Device,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
    ) -> None:
        self.runner, self.device = runner, device
        self._on_done, self._on_start = on_done, on_start
        self._sayings: dict[int, Saying] = {}
        self._waiting = Waiting()
        self._active: dict[int, Active] = {}
        self._encoding = Pace(STEP_S, LEAST_PHONEMES, ENCODE_PHONEMES)
        self._stepping = Pace(STEP_S, min(LEAST_ROWS, runner.step_rows), runner.step_rows)

    def begin(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def due_s(self) -> float | None:
        return None

    @property
    def idle(self) -> bool:
        return True

    def check(self) -> None:
        self.runner.check()
        assert self.runner.used == len(self._active), "a row was lost"
        assert len(self._sayings) == len(self._waiting) + len(self._active), "a sentence was lost"
        assert all((number in self._waiting) != (number in self._active) for number in self._sayings)

    def end(self, error: Exception) -> None:
        left = list(self._sayings.values())
        try:
            for number in list(self._sayings):
                self._leave(number)
        finally:
            for saying in left:
                reject(saying.future, error)

    def report(self) -> dict[str, int]:
        return {
            "waiting": len(self._waiting),
            "decoding": 0,
            "speaking": len(self._active),
            "pages": self.runner.rows,
            "pages_used": self.runner.used,
        }

    def describe(self) -> dict[str, Any]:
        return {
            "rows": self.runner.rows,
            "rows_used": self.runner.used,
            "sentences_waiting": len(self._waiting),
        }

    # --- messages --------------------------------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        self._on_done(utterance.samples)
        reject(utterance.future, WrongModel("this model speaks, and hears nothing"))

    def say(self, saying: Saying) -> None:
        """What the model cannot say is refused before it shares anything with others."""
        self._sayings[saying.id] = saying
        # Also of an engine that is gone: who waited there has waited here.
        saying.arrived_s = time.monotonic() - _since_s(saying.submitted_ns)
        with self._attempt("speak", "a sentence", [saying.id]):
            try:
                self.runner.expect(saying.sentence)
            except AsrServeError as error:
                self._drop(saying.id, error)
        if saying.id in self._sayings:
            phonemes, bulk = len(saying.sentence.phonemes), saying.priority == "bulk"
            self._waiting.add(saying.id, phonemes, _first_s(saying), bulk=bulk)

    def cancel(self, request_id: int) -> None:
        self._drop(request_id, Cancelled("the request was cancelled"))

    # --- a turn ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Rows for those who wait, a batch of them; and a chunk of those who want one soonest."""
        began = self._begin()
        return self._speak() or began

    def _begin(self) -> bool:
        free = self.runner.rows - self.runner.used
        if not free or not len(self._waiting):
            return False
        held = sum(each.saying.priority == "bulk" for each in self._active.values())
        bulk = max(0, self.runner.rows - self.runner.rows // BULK_RESERVE - held)
        taken = self._waiting.take(min(free, ENCODE_ROWS), self._encoding.room, bulk)
        if not taken:
            return False
        started = time.perf_counter()
        sayings = [self._sayings[number] for number in taken]
        phonemes = sum(len(each.sentence.phonemes) for each in sayings)
        self._on_start(taken)
        self._encode(sayings)
        spent_s = time.perf_counter() - started
        self._encoding.took(spent_s, phonemes)
        self._keeper.stats.step("encode", spent_s, len(taken), min(1.0, phonemes / ENCODE_PHONEMES))
        return True

    def _encode(self, sayings: Sequence[Saying]) -> None:
        """Of a batch that fails each sentence is tried by itself: nobody pays for another's."""

        def fail(error: AsrServeError) -> None:
            if len(sayings) > 1:
                for saying in sayings:
                    self._encode([saying])
            else:
                self._drop(sayings[0].id, error.__cause__ if isinstance(error.__cause__, AsrServeError) else error)

        rows: list[Row] = []
        with Attempt(self._keeper.stats, "encode", "encoding a sentence", fail):
            rows = list(self.runner.begin([each.sentence for each in sayings]))
        for saying, row in zip(sayings, rows, strict=False):  # none where it failed
            self._active[saying.id] = Active(saying, row)
            self._keeper.stats.queued(saying.priority, _since_s(saying.submitted_ns))

    def _speak(self) -> bool:
        playing = ((number, each.playback) for number, each in self._active.items())
        turns = [Turn(each.deadline_s, number, each.begun) for number, each in playing]
        chosen = choose(turns, self._stepping.room, time.monotonic())
        if not chosen:
            return False
        started = time.perf_counter()
        rows = [self._active[number] for number in chosen]
        pieces: list[Piece] = []
        with self._attempt("speak", "speaking", chosen):
            pieces = list(self.runner.step([each.row for each in rows]))
        spent_s = time.perf_counter() - started
        self._stepping.took(spent_s, len(rows))
        self._keeper.stats.step("speak", spent_s, len(rows), len(rows) / self.runner.step_rows)
        for number, each, piece in zip(chosen, rows, pieces, strict=False):  # none where it failed
            with self._attempt("speak", "speaking", [number]):
                self._tell(each, piece)
                if piece.over:
                    self._leave(number)
                    resolve(each.saying.future, each.made)
        return True

    def _tell(self, active: Active, piece: Piece) -> None:
        """What is new of it to who hears it; the rest was heard of another engine."""
        saying, rate_hz = active.saying, self.runner.rate_hz
        new = piece.pcm[max(0, saying.skip - active.made) :]
        active.made += len(piece.pcm)
        if not len(new) and not piece.over:
            return
        first = not active.playback.begun
        active.playback.give(len(new) / rate_hz, time.monotonic())
        if first:
            self._keeper.stats.sounded(_since_s(saying.submitted_ns))
        self._keeper.stats.spoke(len(new) / rate_hz)
        samples = to_int16(new)
        size = int(PIECE_S * rate_hz)
        cuts = range(size, len(samples), size) if len(samples) > 2 * size else ()
        parts = np.split(samples, list(cuts))
        for at, part in enumerate(parts):
            ends = tuple(active.row.ends) if first and not at and not saying.skip else ()
            saying.hear(Sound(part.tobytes(), ends, piece.over and at == len(parts) - 1))

    # --- endings ---------------------------------------------------------------------------------------

    def _attempt(self, stage: str, what: str, sayings: list[int]) -> Attempt:
        """What may fail these, and nobody else."""

        def fail(error: AsrServeError) -> None:
            for number in sayings:
                self._drop(number, error)

        return Attempt(self._keeper.stats, stage, what, fail)

    def _leave(self, number: int) -> Saying:
        """Nothing is held for it any more, wherever it was."""
        saying = self._sayings.pop(number)
        self._waiting.remove(number)
        if (active := self._active.pop(number, None)) is not None:
            self.runner.leave(active.row)
        self._on_done(saying.samples)
        return saying

    def _drop(self, number: int, error: Exception) -> None:
        """If it is still here."""
        if number in self._sayings:
            reject(self._leave(number).future, error)


def to_int16(pcm: np.ndarray) -> np.ndarray:
    """(n,) float32 in -1..1, as it goes over wires. Raises ValueError for what is no number: it would be noise."""
    if not np.isfinite(pcm).all():
        raise ValueError("samples that are no numbers")
    samples: np.ndarray = np.rint(np.clip(pcm, -1.0, 1.0) * 32_767).astype("<i2")
    return samples


def _since_s(submitted_ns: int) -> float:
    return max(0, time.time_ns() - submitted_ns) / 1e9


def _first_s(saying: Saying) -> float:
    return first_deadline_s(saying.arrived_s, saying.priority, saying.within_ms)
