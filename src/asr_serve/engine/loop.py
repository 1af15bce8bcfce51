"""The one loop of a device: drain, plan, step, emit.

The only place in the engine with a broad `except`: a step that fails fails its own requests, and the loop
goes on.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asr_serve import units
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import Hypothesis
from asr_serve.engine.planner import Planner, Waiting
from asr_serve.engine.runner import DecodeRunner, EncodeRunner, Row, VadRunner
from asr_serve.engine.session import Listener, Utterance, Windows
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, StepFailed
from asr_serve.models.vad.silero import WINDOW_SAMPLES

BULK_ENCODES = 8
"""Encode batches in a row while only bulk work is there: decoding is cheapest with all rows taken."""

Job = Callable[["Loop"], None]
"""A message to the loop: it is called on the loop's thread, between two steps."""


class Loop:
    """Owns the runners and every request that has been let in."""

    def __init__(
        self,
        model: Any,
        encode: EncodeRunner,
        decode: DecodeRunner,
        vad: VadRunner,
        config: EngineConfig,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> None:
        self.model, self.config, self.text, self.tokens_per_s = model, config, text, tokens_per_s
        self.encode_runner, self.decode_runner, self.vad_runner = encode, decode, vad
        self.on_done, self.on_stop = on_done, on_stop
        self.planner = Planner(config, config.encode_frames or encode.device.encode_frames)
        self.inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.utterances: dict[int, Utterance] = {}
        self.listeners: dict[int, Listener] = {}
        self.stats = Stats()
        self._running = True

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            while self._running:
                self._drain()
                if self._running and not self._step():
                    self.check()
                    self.inbox.get()(self)  # nothing to do: sleep until somebody calls
        except Exception as failure:
            error = EngineClosed(f"the engine stopped: {type(failure).__name__}: {failure}", todo="load it again")
            error.__cause__ = failure
            logging.getLogger(__name__).exception("the engine loop stopped")
        finally:
            self.on_stop()  # from here on nobody can call
            self._end(error)

    def _end(self, error: AsrServeError) -> None:
        """Reject whatever is left, even when what is left is broken: nobody may wait for ever."""
        while not self.inbox.empty():
            try:
                self.inbox.get()(self)
            except Exception:
                logging.getLogger(__name__).exception("a message to the ending engine failed")
        try:
            self._fail(list(self.utterances), error)
        finally:
            for utterance in self.utterances.values():
                _reject(utterance.future, error)
            for listener_id in list(self.listeners):
                self.close(listener_id, error)

    def _step(self) -> bool:
        """One turn of voice activity, encoding and decoding; False when there was nothing to do."""
        heard = self._hear()
        encoded = False
        for _ in range(1 if self._somebody_waits() else BULK_ENCODES):
            free_rows = self.decode_runner.max_rows - len(self.decode_runner.rows)
            if not self._encode(self.planner.plan(free_rows, self.decode_runner.pages.free)):
                break
            encoded = True
        return self._decode() or encoded or heard

    def _somebody_waits(self) -> bool:
        return any(u.priority == "interactive" for u in self.utterances.values())

    def _drain(self) -> None:
        while True:
            try:
                job = self.inbox.get_nowait()
            except queue.Empty:
                return
            job(self)

    def check(self) -> None:
        """Everything that was lent has a holder. Run when idle."""
        self.decode_runner.pages.check()
        self.vad_runner.states.check()
        if not self.decode_runner.rows:
            assert self.decode_runner.pages.used == 0, "no row decodes, yet pages are held"
        assert len(self.utterances) == len(self.decode_runner.rows) + len(self.planner), "a request was lost"

    # --- messages, on the loop's thread -----------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        assert utterance.pcm is not None
        frames = self.model.frames(len(utterance.pcm))
        pages = self.decode_runner.pages_needed(frames, self.max_tokens(utterance.samples))
        self.utterances[utterance.id] = utterance
        self.planner.add(Waiting(utterance.id, frames, pages, utterance.priority, time.monotonic() * 1_000))

    def cancel(self, request_id: int) -> None:
        """At any moment; what the request held is free before the next step."""
        if request_id in self.utterances:
            self._fail([request_id], Cancelled("the request was cancelled"))

    def open(self, listener_id: int) -> None:
        self.listeners[listener_id] = Listener(listener_id, self.vad_runner.states.take())

    def put(self, windows: Windows) -> None:
        listener = self.listeners.get(windows.session)
        if listener is None:
            _reject(windows.future, Cancelled("the session was closed"))
        else:
            listener.waiting.append(windows)

    def close(self, listener_id: int, error: AsrServeError | None = None) -> None:
        listener = self.listeners.pop(listener_id, None)
        if listener is None:
            return
        for windows in listener.waiting:
            _reject(windows.future, error or Cancelled("the session was closed"))
        self.vad_runner.states.give(listener.slot)

    def stop(self) -> None:
        self._running = False

    # --- steps --------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Voice activity: one piece of each caller that has any, within the step's bound."""
        batch: list[tuple[Listener, Windows]] = []
        longest = 0
        for listener in self.listeners.values():
            if not listener.waiting:
                continue
            longer = max(longest, len(listener.waiting[0].pcm) // WINDOW_SAMPLES)
            if batch and (len(batch) + 1) * longer > self.config.vad_step_windows:
                continue
            longest = longer
            batch.append((listener, listener.waiting.popleft()))
        if not batch:
            return False
        for listener, _ in batch:  # whoever was served goes to the back
            self.listeners[listener.id] = self.listeners.pop(listener.id)
        started = time.perf_counter()
        try:
            results = self.vad_runner.run([(listener.slot, w.pcm) for listener, w in batch])
        except Exception as failure:
            for _, windows in batch:
                _reject(windows.future, _step_failed("voice activity", failure))
        else:
            for (_, windows), probabilities in zip(batch, results, strict=True):
                _resolve(windows.future, probabilities)
        self.stats.vad_s += time.perf_counter() - started
        return True

    def _encode(self, ids: list[int]) -> bool:
        if not ids:
            return False
        started = time.perf_counter()
        batch = [self.utterances[i] for i in ids]
        try:
            results = self.encode_runner.run([u.pcm for u in batch if u.pcm is not None])
            for utterance, result in zip(batch, results, strict=True):
                limit = self.max_tokens(utterance.samples)
                hypothesis = Hypothesis(utterance.options, self.model.eos, limit, self.text)
                self.decode_runner.join(utterance.id, result, hypothesis)
                utterance.pcm = None
        except Exception as failure:
            self._fail(ids, _step_failed("encoding", failure))
        took = time.perf_counter() - started
        self.stats.encoded(sum(u.samples for u in batch), took)
        return True

    def _decode(self) -> bool:
        runner = self.decode_runner
        if not runner.rows:
            return False
        started = time.perf_counter()
        self.stats.steps += 1
        self.stats.step_rows += len(runner.rows)
        try:
            ended = runner.step()
        except Exception as failure:
            self._fail([row.request_id for row in runner.rows], _step_failed("decoding", failure))
            return True
        for row in ended:
            self._settle(row)
        self.stats.decode_s += time.perf_counter() - started
        return True

    def _settle(self, row: Row) -> None:
        assert row.finish is not None
        try:
            answer = row.hypothesis.settle(row.finish)
        except Exception as failure:
            self._fail([row.request_id], _step_failed("settling", failure))
            return
        if answer is None:
            self.stats.fallbacks += 1
            self.decode_runner.again(row)
            return
        self.decode_runner.leave(row)
        _resolve(self._forget(row.request_id), answer)

    def max_tokens(self, samples: int) -> int:
        """Nobody says more than this in that time; never past the model's positions, the first being BOS."""
        return min(int(self.model.max_tokens) - 1, 4 + int(units.samples_to_s(samples) * self.tokens_per_s))

    # --- endings ------------------------------------------------------------------------------------

    def _fail(self, ids: list[int], error: Exception) -> None:
        wanted = set(ids)
        for row in [row for row in self.decode_runner.rows if row.request_id in wanted]:
            self.decode_runner.leave(row)
        for request_id in ids:
            self.planner.remove(request_id)
            _reject(self._forget(request_id), error)

    def _forget(self, request_id: int) -> Future[Any]:
        utterance = self.utterances.pop(request_id)
        self.on_done(utterance.samples)
        return utterance.future


def live(make: Callable[[], Loop], ready: Future[Loop]) -> None:
    """A loop's whole life, on the thread it is to have: make it, tell, run."""
    try:
        loop = make()
    except BaseException as failure:
        ready.set_exception(failure)
        return
    ready.set_result(loop)
    loop.run()


class Stats:
    """What the loop has done, for `describe` and the benches."""

    def __init__(self) -> None:
        self.steps = self.step_rows = self.fallbacks = self.samples = 0
        self.vad_s = self.encode_s = self.decode_s = 0.0

    def encoded(self, samples: int, seconds: float) -> None:
        self.samples += samples
        self.encode_s += seconds


def _step_failed(what: str, failure: Exception) -> StepFailed:
    error = StepFailed(
        f"{what} failed: {type(failure).__name__}: {failure}", todo="try again; if it stays, report it"
    )
    error.__cause__ = failure
    return error


def _resolve(future: Future[Any], value: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _reject(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
