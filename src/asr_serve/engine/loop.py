"""The one loop of a device: drain, plan, step, emit.

The only place in the engine with a broad `except`: a step that fails fails its own requests, and the loop
goes on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from asr_serve import units
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import Hypothesis
from asr_serve.engine.encoders import Batch, Encoders
from asr_serve.engine.planner import LIVE_RESERVE, Planner, Waiting
from asr_serve.engine.runner import VERIFY_ROWS, DecodeRunner, EncoderResult, EncodeRunner, Row, VadRunner
from asr_serve.engine.session import Listeners, Utterance, reject, resolve
from asr_serve.engine.stats import Stats
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, StepFailed
from asr_serve.types import Phases, Priority

BULK_ENCODES = 8
"""Encode batches in a row while only bulk work is there: decoding is cheapest with all rows taken."""
LIVE_STEPS = 6
"""Decoding steps between two encode batches while callers' rows decode: a verified draft needs a few more
tokens, and encoding takes much longer than a step."""
BESIDE = 4
"""So much smaller is a batch that one thread encodes beside the loop."""
QUIET_S = 5.0
"""When callers have said nothing for so long, files have the engine to themselves."""
PACE_S, PACE_ROWS = 0.02, 8
"""Decoding steps of fewer rows are at least so far apart while every encoder is busy."""

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
        *,
        on_start: Callable[[list[int]], None] = lambda _: None,
        stats: Stats,
        keep_states: bool = False,
    ) -> None:
        self.model, self.config, self.text, self.tokens_per_s = model, config, text, tokens_per_s
        self.encode_runner, self.decode_runner, self.vad_runner = encode, decode, vad
        self.on_done, self.on_start, self.on_stop = on_done, on_start, on_stop
        self.planner = Planner(config, config.encode_frames or encode.device.encode_frames)
        self.inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.encoders = Encoders(encode, lambda *encoded: self.inbox.put(lambda loop: loop._encoded(*encoded)))
        self.utterances: dict[int, Utterance] = {}
        self.listeners = Listeners(vad.states, config.vad_step_windows)
        self.stats, self.keep_states = stats, keep_states
        self._count: Counter[Priority] = Counter()
        self._decoded_s, self._live_s = -PACE_S, -QUIET_S
        self._running = True

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            while self._running:
                self._drain()
                if self._running and not self._step():
                    self._sleep()
        except Exception as failure:
            error = EngineClosed(f"the engine stopped: {type(failure).__name__}: {failure}", todo="load it again")
            error.__cause__ = failure
            logging.getLogger(__name__).exception("the engine loop stopped")
        finally:
            self.on_stop()  # from here on nobody can call
            self.encoders.close()
            self._end(error)

    def _sleep(self) -> None:
        """Nothing to do: until somebody calls, or what waits for company has waited long enough."""
        due_s = [] if self.listeners.due_s is None else [self.listeners.due_s]
        if self.decode_runner.rows:
            due_s.append(self._decoded_s + PACE_S)
        if not due_s and not self.encoders.under_way:
            self.check()
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        with contextlib.suppress(queue.Empty):
            self.inbox.get(timeout=wait_s)(self)

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
                reject(utterance.future, error)
            self.listeners.close_all(error)

    def _step(self) -> bool:
        """One turn of voice activity, encoding and decoding; False when there was nothing to do."""
        heard = self._hear()
        if self.encoders.beside(self._speaking()):
            started = self._start_encoding()
            return (not self._paced() and self._decode()) or started or heard
        encoded = False
        for _ in range(BULK_ENCODES):
            if not self._encode(self._plan()):
                break
            encoded = True
            self._drain()  # whoever comes meanwhile must not wait for all of them
            heard |= self._hear()
            if self._count["live"] or self._count["interactive"] or not self._running:
                break
        decoded = self._decode()
        for _ in range(LIVE_STEPS - 1):
            if not any(self.utterances[row.request_id].priority == "live" for row in self.decode_runner.rows):
                break
            self._drain()
            self._decode()
        return decoded or encoded or heard

    def _speaking(self) -> bool:
        """Whether anybody on line said something of late: who is silent costs files nothing."""
        return self.listeners.live > 0 and time.monotonic() - self._live_s < QUIET_S

    def _paced(self) -> bool:
        """Whether a few rows wait for more: a step costs as much for one as for PACE_ROWS, and takes it from
        encoders that all have work."""
        if self.encoders.free or time.monotonic() - self._decoded_s >= PACE_S:
            return False
        rows = [self.utterances[row.request_id] for row in self.decode_runner.rows]
        return len(rows) < PACE_ROWS and not any(row.urgent for row in rows)

    def _start_encoding(self) -> bool:
        """Have batches encoded beside us, while there are threads for it."""
        started, frames = False, self.planner.encode_frames // BESIDE
        while self._speaking() and self.encoders.free and (ids := self._plan(frames)):
            batch = self._begin(ids)
            pages = sum(self._needs(utterance)[1] for utterance in batch)
            self.encoders.start(Batch(ids, pages), [u.pcm for u in batch if u.pcm is not None])
            started = True
        return started

    def _encoded(self, batch: Batch, encoded: Future[list[EncoderResult]], seconds: float) -> None:
        """What was encoded beside us joins; who has gone meanwhile is left out."""
        self.encoders.under_way.remove(batch)
        try:
            results = dict(zip(batch.ids, encoded.result(), strict=True))
        except Exception as failure:
            self.stats.failed("encode")
            self._fail([i for i in batch.ids if i in self.utterances], _step_failed("encoding", failure))
            return
        self._join({i: result for i, result in results.items() if i in self.utterances}, seconds)

    def _plan(self, frames: int | None = None) -> list[int]:
        runner, beside = self.decode_runner, self.encoders
        free_rows = runner.max_rows - len(runner.rows) - beside.rows
        kept = (0, 0)
        busy = runner.rows or beside.under_way
        if self._speaking() and busy:  # an engine that does nothing gives a file whatever it needs
            kept = runner.max_rows // LIVE_RESERVE, runner.pages.pages // LIVE_RESERVE
        return self.planner.plan(free_rows, runner.pages.free - beside.pages, kept=kept, frames=frames)

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
        frames, pages = self._needs(utterance)
        self.utterances[utterance.id] = utterance
        self._count[utterance.priority] += 1
        now_ms = time.monotonic() * 1_000
        if utterance.priority == "live":
            self._live_s = now_ms / 1_000
        self.planner.add(Waiting(utterance.id, frames, pages, utterance.priority, now_ms, utterance.within_ms))

    def _needs(self, utterance: Utterance) -> tuple[int, int]:
        """Frames to encode, and pages to decode."""
        assert utterance.pcm is not None
        frames = self.model.frames(len(utterance.pcm))
        return frames, self.decode_runner.pages_needed(frames, self.max_tokens(utterance.samples))

    def cancel(self, request_id: int) -> None:
        """At any moment; what the request held is free before the next step."""
        if request_id in self.utterances:
            self._fail([request_id], Cancelled("the request was cancelled"))

    def stop(self) -> None:
        self._running = False

    # --- steps --------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """Voice activity of whoever has waited long enough."""
        batch = self.listeners.take(time.monotonic())
        if not batch:
            return False
        started = time.perf_counter()
        try:
            results = self.vad_runner.run([(listener.slot, w.pcm) for listener, w in batch])
        except Exception as failure:
            self.stats.failed("vad")
            for _, windows in batch:
                reject(windows.future, _step_failed("voice activity", failure))
        else:
            for (listener, windows), probabilities in zip(batch, results, strict=True):
                if self.keep_states:
                    windows.state = self.vad_runner.states.pack(listener.slot)
                resolve(windows.future, probabilities)
        counts = [windows.count for _, windows in batch]
        used = sum(counts) / (len(batch) * max(counts))
        self.stats.step("vad", time.perf_counter() - started, len(batch), used)
        return True

    def _encode(self, ids: list[int]) -> bool:
        if not ids:
            return False
        started = time.perf_counter()
        batch = self._begin(ids)
        try:
            results = self.encode_runner.run([u.pcm for u in batch if u.pcm is not None])
        except Exception as failure:
            self.stats.failed("encode")
            self._fail(ids, _step_failed("encoding", failure))
            return True
        self._join(dict(zip(ids, results, strict=True)), time.perf_counter() - started)
        return True

    def _begin(self, ids: list[int]) -> list[Utterance]:
        """These are worked on."""
        start_ns = time.time_ns()
        batch = [self.utterances[i] for i in ids]
        for utterance in batch:
            utterance.encode_start_ns = start_ns
            self.stats.queued(utterance.priority, max(0, start_ns - utterance.submitted_ns) / 1e9)
        self.on_start(ids)
        return batch

    def _join(self, encoded: dict[int, EncoderResult], seconds: float) -> None:
        """What is encoded is decoded from here on."""
        try:
            for request_id, result in encoded.items():
                utterance = self.utterances[request_id]
                limit = self.max_tokens(utterance.samples)
                hypothesis = Hypothesis(utterance.options, self.model.eos, limit, self.text, utterance.draft)
                self.decode_runner.join(utterance.id, result, hypothesis)
                utterance.pcm = None
                utterance.encode_end_ns = time.time_ns()
        except Exception as failure:
            self.stats.failed("encode")
            self._fail(list(encoded), _step_failed("encoding", failure))
            return
        frames = sum(result.frames for result in encoded.values())
        self.stats.step("encode", seconds, len(encoded), min(1.0, frames / self.planner.encode_frames))

    def _verify(self, rows: list[Row]) -> None:
        """What drafts hold, in one pass over all their positions."""
        started, runner = time.perf_counter(), self.decode_runner
        offered, held = runner.positions_verified, runner.positions_held
        try:
            ended = runner.verify(rows)
        except Exception as failure:
            self.stats.failed("verify")
            self._fail([row.request_id for row in rows], _step_failed("verifying a draft", failure))
            return
        for row in ended:
            self._settle(row)
        offered, held = runner.positions_verified - offered, runner.positions_held - held
        positions = offered + len(rows)
        self.stats.step("verify", time.perf_counter() - started, positions, min(1.0, positions / VERIFY_ROWS))
        self.stats.verified(offered, held)

    def _decode(self) -> bool:
        runner = self.decode_runner
        if drafted := runner.drafted():
            self._verify(drafted)
        if not runner.rows:
            return bool(drafted)
        started = time.perf_counter()
        self._decoded_s = time.monotonic()
        rows = len(runner.rows)
        try:
            ended = runner.step()
        except Exception as failure:
            self.stats.failed("decode")
            self._fail([row.request_id for row in runner.rows], _step_failed("decoding", failure))
            return True
        for row in ended:
            self._settle(row)
        self.stats.step("decode", time.perf_counter() - started, rows, rows / runner.max_rows)
        return True

    def _settle(self, row: Row) -> None:
        assert row.finish is not None
        try:
            answer = row.hypothesis.settle(row.finish)
        except Exception as failure:
            self._fail([row.request_id], _step_failed("settling", failure))
            return
        if answer is None:
            self.stats.fell_back()
            self.decode_runner.again(row)
            return
        self.decode_runner.leave(row)
        utterance = self._forget(row.request_id)
        self.stats.recognised(utterance.samples, len(answer.tokens))
        phases = Phases(
            submitted_ns=utterance.submitted_ns,
            encode_start_ns=utterance.encode_start_ns,
            encode_end_ns=utterance.encode_end_ns,
            decode_end_ns=time.time_ns(),
        )
        resolve(utterance.future, msgspec.structs.replace(answer, phases=phases))

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
            reject(self._forget(request_id).future, error)

    def _forget(self, request_id: int) -> Utterance:
        utterance = self.utterances.pop(request_id)
        self._count[utterance.priority] -= 1
        self.on_done(utterance.samples)
        return utterance

    def describe(self) -> dict[str, Any]:
        """What has been done so far, and what is held."""
        pages = self.decode_runner.pages
        return {
            **self.stats.describe(),
            "pages": pages.pages,
            "pages_used": pages.used,
            "sessions_used": self.vad_runner.states.used,
        }


def live(make: Callable[[], Loop], ready: Future[Loop]) -> None:
    """A loop's whole life, on the thread it is to have: make it, tell, run."""
    try:
        loop = make()
    except BaseException as failure:
        ready.set_exception(failure)
        return
    ready.set_result(loop)
    loop.run()


def _step_failed(what: str, failure: Exception) -> StepFailed:
    error = StepFailed(
        f"{what} failed: {type(failure).__name__}: {failure}", todo="try again; if it stays, report it"
    )
    error.__cause__ = failure
    return error
