"""Executor of a TTS model: sentences in, audio out, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asr_serve.devices.interface import Device
from asr_serve.engine.executor import LoopContext, StepGuard
from asr_serve.engine.request import RecognitionRequest, reject, resolve
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.engine.tts.runner import TtsRunner, TtsSequence, TtsStepOutput
from asr_serve.engine.tts.scheduler import (
    BULK_RESERVED_ROWS,
    DEADLINE_S,
    Playback,
    StepBudget,
    TtsDeadline,
    TtsWaitingQueue,
    first_deadline_s,
    select_for_step,
)
from asr_serve.errors import AsrServeError, Cancelled, WrongModel
from asr_serve.types import SentenceAudio

STEP_S = 0.05
"""Target duration of encoding and of a step of chunks, each: a request that arrives meanwhile waits for both."""
ENCODE_ROWS, ENCODE_PHONEMES, LEAST_PHONEMES = 32, 4_096, 128
"""Limits of an encode batch: sentences and phonemes, however fast it is; phonemes that are always allowed."""
LEAST_ROWS = 2
"""Least rows of a step of chunks, however slow it is."""
PIECE_S = 0.1
"""Duration of a piece, where more audio is ready at once."""


class ActiveSentence:
    """Sentence that has a row."""

    def __init__(self, saying: TtsRequest, row: TtsSequence) -> None:
        self.request, self.sequence = saying, row
        self.playback = Playback(_first_sound_deadline_s(saying), DEADLINE_S[saying.priority])
        self.generated_samples = 0
        """Samples generated, skipped ones included."""


class TtsExecutor:
    """Executor that owns the runner and every admitted sentence. See engine/executor.ModelExecutor."""

    def __init__(
        self,
        runner: TtsRunner[Any],
        device: Device,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
    ) -> None:
        self.runner, self.device = runner, device
        self._on_done, self._on_start = on_done, on_start
        self._requests: dict[int, TtsRequest] = {}
        self._waiting = TtsWaitingQueue()
        self._active: dict[int, ActiveSentence] = {}
        self._encoding = StepBudget(STEP_S, LEAST_PHONEMES, ENCODE_PHONEMES)
        self._stepping = StepBudget(STEP_S, min(LEAST_ROWS, runner.step_rows), runner.step_rows)

    def attach(self, loop: LoopContext) -> None:
        self._loop = loop

    @property
    def due_s(self) -> float | None:
        return None

    @property
    def idle(self) -> bool:
        return True

    def check(self) -> None:
        self.runner.check_invariants()
        assert self.runner.used == len(self._active), "a row was lost"
        assert len(self._requests) == len(self._waiting) + len(self._active), "a sentence was lost"
        assert all((number in self._waiting) != (number in self._active) for number in self._requests)

    def shutdown(self, error: Exception) -> None:
        requests = list(self._requests.values())
        try:
            for number in list(self._requests):
                self._remove_request(number)
        finally:
            for request in requests:
                reject(request.future, error)

    def cached_audio(self) -> list[bytes]:
        return []

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Does nothing: no audio is cached."""

    def report(self) -> dict[str, int]:
        return {
            "waiting": len(self._waiting),
            "decoding": 0,
            "speaking": len(self._active),
            "pages": self.runner.rows,
            "pages_used": self.runner.used,
        }

    def describe(self) -> dict[str, Any]:
        return {"rows": self.runner.rows, "rows_used": self.runner.used, "sentences_waiting": len(self._waiting)}

    # --- messages --------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        self._on_done(utterance.samples)
        reject(utterance.future, WrongModel("this model synthesizes speech, and does not recognize it"))

    def submit_sentence(self, saying: TtsRequest) -> None:
        """Validates and enqueues a sentence; one that the model rejects fails before it shares a batch with
        others."""
        self._requests[saying.id] = saying
        # Time spent waiting in an engine that is gone counts too.
        saying.arrived_s = time.monotonic() - _since_s(saying.submitted_ns)
        with self._isolate_failure("speak", "a sentence", [saying.id]):
            try:
                self.runner.validate(saying.sentence)
            except AsrServeError as error:
                self._fail_request(saying.id, error)
        if saying.id in self._requests:
            phonemes, bulk = len(saying.sentence.phonemes), saying.priority == "bulk"
            self._waiting.enqueue(saying.id, phonemes, _first_sound_deadline_s(saying), bulk=bulk)

    def cancel(self, request_id: int) -> None:
        self._fail_request(request_id, Cancelled("the request was cancelled"))

    def expedite(self, request_id: int, within_ms: int) -> None:
        """Does nothing: sentences have deadlines of their own."""

    # --- a step ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Starts a batch of waiting sentences, then generates chunks of those with the nearest deadlines."""
        began = self._start_waiting()
        return self._generate_chunks() or began

    def _start_waiting(self) -> bool:
        free = self.runner.rows - self.runner.used
        if not free or not len(self._waiting):
            return False
        bulk_rows = sum(active.request.priority == "bulk" for active in self._active.values())
        bulk = max(0, self.runner.rows - self.runner.rows // BULK_RESERVED_ROWS - bulk_rows)
        ids = self._waiting.pop_batch(min(free, ENCODE_ROWS), self._encoding.max_count, bulk)
        if not ids:
            return False
        started = time.perf_counter()
        requests = [self._requests[number] for number in ids]
        phonemes = sum(len(request.sentence.phonemes) for request in requests)
        self._on_start(ids)
        self._encode_batch(requests)
        spent_s = time.perf_counter() - started
        self._encoding.record_step(spent_s, phonemes)
        self._loop.stats.record_step("encode", spent_s, len(ids), min(1.0, phonemes / ENCODE_PHONEMES))
        return True

    def _encode_batch(self, sayings: Sequence[TtsRequest]) -> None:
        """Encodes a batch. If it fails, each sentence is retried alone, so that one cannot fail the others."""

        def fail(error: AsrServeError) -> None:
            if len(sayings) > 1:
                for request in sayings:
                    self._encode_batch([request])
            else:
                self._fail_request(
                    sayings[0].id, error.__cause__ if isinstance(error.__cause__, AsrServeError) else error
                )

        rows: list[TtsSequence] = []
        with StepGuard(self._loop.stats, "encode", "encoding a sentence", fail):
            rows = list(self.runner.start_sequences([request.sentence for request in sayings]))
        for request, row in zip(sayings, rows, strict=False):  # empty after a failure
            self._active[request.id] = ActiveSentence(request, row)
            self._loop.stats.record_queue_time(request.priority, _since_s(request.submitted_ns))

    def _generate_chunks(self) -> bool:
        playing = ((number, active.playback) for number, active in self._active.items())
        deadlines = [TtsDeadline(active.deadline_s, number, active.started) for number, active in playing]
        chosen = select_for_step(deadlines, self._stepping.max_count, time.monotonic())
        if not chosen:
            return False
        started = time.perf_counter()
        rows = [self._active[number] for number in chosen]
        outputs: list[TtsStepOutput] = []
        with self._isolate_failure("speak", "speaking", chosen):
            outputs = list(self.runner.step([active.sequence for active in rows]))
        spent_s = time.perf_counter() - started
        self._stepping.record_step(spent_s, len(rows))
        self._loop.stats.record_step("speak", spent_s, len(rows), len(rows) / self.runner.step_rows)
        for number, active, output in zip(chosen, rows, outputs, strict=False):  # empty after a failure
            with self._isolate_failure("speak", "speaking", [number]):
                self._deliver(active, output)
                if output.finished:
                    self._remove_request(number)
                    resolve(active.request.future, active.generated_samples)
        return True

    def _deliver(self, active: ActiveSentence, piece: TtsStepOutput) -> None:
        """Delivers new audio to the client; the first `skip_samples` were delivered by another engine."""
        request, rate_hz = active.request, self.runner.rate_hz
        new = piece.pcm[max(0, request.skip_samples - active.generated_samples) :]
        active.generated_samples += len(piece.pcm)
        if not len(new) and not piece.finished:
            return
        first = not active.playback.started
        active.playback.add_audio(len(new) / rate_hz, time.monotonic())
        if first:
            self._loop.stats.record_first_audio(_since_s(request.submitted_ns))
        self._loop.stats.record_synthesis(len(new) / rate_hz)
        samples = to_int16(new)
        size = int(PIECE_S * rate_hz)
        cuts = range(size, len(samples), size) if len(samples) > 2 * size else ()
        parts = np.split(samples, list(cuts))
        for at, part in enumerate(parts):
            ends = tuple(active.sequence.ends) if first and not at and not request.skip_samples else ()
            request.on_sound(SentenceAudio(part.tobytes(), ends, piece.finished and at == len(parts) - 1))

    # --- endings ---------------------------------------------------------------------------------------

    def _isolate_failure(self, stage: str, what: str, sayings: list[int]) -> StepGuard:
        """Guard that fails only these requests."""

        def fail(error: AsrServeError) -> None:
            for number in sayings:
                self._fail_request(number, error)

        return StepGuard(self._loop.stats, stage, what, fail)

    def _remove_request(self, number: int) -> TtsRequest:
        """Removes a request from the queue, or frees its row."""
        request = self._requests.pop(number)
        self._waiting.remove(number)
        if (active := self._active.pop(number, None)) is not None:
            self.runner.free_sequence(active.sequence)
        self._on_done(request.samples)
        return request

    def _fail_request(self, number: int, error: Exception) -> None:
        """Fails the request if it is still here."""
        if number in self._requests:
            reject(self._remove_request(number).future, error)


def to_int16(pcm: np.ndarray) -> np.ndarray:
    """Converts (n,) float32 in -1..1 to the int16 sent to clients. Raises ValueError for NaN and infinity, which
    would become noise."""
    if not np.isfinite(pcm).all():
        raise ValueError("samples that are no numbers")
    samples: np.ndarray = np.rint(np.clip(pcm, -1.0, 1.0) * 32_767).astype("<i2")
    return samples


def _since_s(submitted_ns: int) -> float:
    return max(0, time.time_ns() - submitted_ns) / 1e9


def _first_sound_deadline_s(saying: TtsRequest) -> float:
    return first_deadline_s(saying.arrived_s, saying.priority, saying.slack_ms)
