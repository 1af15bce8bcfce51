"""Loop of a device: drain the inbox, step voice activity, step the executor, emit results."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from asr_serve.engine.cache import TieredStore
from asr_serve.engine.diarization_runner import DiarizationRunner
from asr_serve.engine.executor import ModelExecutor, StepGuard
from asr_serve.engine.remote.peer_pool import PeerPool
from asr_serve.engine.request import reject, resolve
from asr_serve.engine.seq2seq.executor import Seq2SeqExecutor
from asr_serve.engine.speaker_separation import SeparationRunner
from asr_serve.engine.state_cache import StateCacheManager
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.streaming.executor import StreamingExecutor
from asr_serve.engine.tts.executor import TtsExecutor
from asr_serve.engine.vad_runner import VadCache, VadRunner, VadStepOutput
from asr_serve.engine.vad_scheduler import VadBatch, VadScheduler
from asr_serve.errors import AsrServeError, EngineClosed

LoopJob = Callable[["Loop"], None]
"""Message to the loop: a function that runs on the loop's thread, between two steps."""


class Loop:
    """Loop of one device: owns its voice-activity sessions and its executor."""

    def __init__(
        self,
        executor: ModelExecutor,
        vad: VadRunner | None,
        step_windows: int,
        on_stop: Callable[[], None],
        *,
        stats: EngineStats,
        keep_states: bool = False,
        vad_cache: VadCache | None = None,
        offload: TieredStore | None = None,
    ) -> None:
        """`vad`: None for a speech synthesis model. `step_windows`: maximum windows in a voice-activity step.
        `keep_states`: return each caller's state with its probabilities. `vad_cache`: None where no audio is cached.
        `offload`: storage that is closed with the loop."""
        self.executor, self.vad_runner, self._vad_cache, self._offload = executor, vad, vad_cache, offload
        self.states = vad.states if vad is not None else StateCacheManager({}, 0)
        """State of the voice-activity sessions."""
        self.uses_digests = vad_cache is not None
        """Whether submitted audio should have a digest (engine/cache/digest)."""
        self.inbox: queue.SimpleQueue[LoopJob] = queue.SimpleQueue()
        self.vad_scheduler = VadScheduler(self.states, step_windows, vad_cache)
        self.stats, self.running = stats, True
        self.diarization = DiarizationRunner(executor.device, stats)
        """Diarization of audio windows."""
        self.separation = SeparationRunner(executor.device, stats, self.call)
        """Separation of speakers who talk at once, on a thread beside the loop."""
        device = executor.device
        vad_threads = 1 if device.computes_on_host else max(1, device.threads - 1)  # one is the loop's, which launches
        self._vad_thread = ThreadPoolExecutor(1, "asr-serve vad", device.set_threads, (vad_threads,))
        self._on_stop, self._keep_states = on_stop, keep_states
        executor.attach(self)

    def run(self) -> None:
        """Runs until `stop`, or until a step fails for good; then rejects what is left."""
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            while self.running:
                self.stats.begin_work()
                self.drain()
                if self.running and not self._step():
                    self._sleep()
        except Exception as failure:
            error = EngineClosed(f"the engine stopped: {type(failure).__name__}: {failure}", todo="load it again")
            error.__cause__ = failure
            logging.getLogger(__name__).exception("the engine loop stopped")
        finally:
            self._on_stop()  # no jobs are accepted from here on
            self._end(error)

    def _step(self) -> bool:
        """Runs one iteration; returns False when there was nothing to do."""
        stepped = self.step_vad()
        busy = self.executor.step() or stepped
        return self.diarization.step(live=self.live_sessions > 0, idle=not busy) or busy

    def _sleep(self) -> None:
        """Waits for a message, or until the next batch is due."""
        due_s = [due for due in (self.vad_scheduler.due_s, self.executor.due_s) if due is not None]
        if not due_s and self.executor.idle:
            self.check()
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        computing = self.vad_scheduler.step_in_flight or self.separation.busy  # on another thread
        if self.executor.idle and not computing:
            self.stats.end_work()
        with contextlib.suppress(queue.Empty):
            job = self.inbox.get(timeout=wait_s)
            self.stats.begin_work()
            job(self)

    def drain(self) -> None:
        """Runs the jobs that arrived in the inbox."""
        while True:
            try:
                job = self.inbox.get_nowait()
            except queue.Empty:
                return
            job(self)

    def call(self, job: Callable[[], None]) -> None:
        """Schedules a job between two steps. May be called from any thread."""
        self.inbox.put(lambda _: job())

    def check(self) -> None:
        """Asserts that every allocated resource has an owner. Called when idle."""
        self.states.check()
        self.executor.check()

    @property
    def live_sessions(self) -> int:
        """Open voice-activity sessions of live callers."""
        return self.vad_scheduler.live_count

    @property
    def streams(self) -> StreamingExecutor:
        """Executor of a streaming model."""
        assert isinstance(self.executor, StreamingExecutor), "this model has no streams: it takes whole utterances"
        return self.executor

    @property
    def peers(self) -> PeerPool:
        """Engines that encode for this one."""
        assert isinstance(self.executor, Seq2SeqExecutor), "only encoder-decoder models are encoded by other engines"
        assert self.executor.peers is not None, "this engine has no peers"
        return self.executor.peers

    @property
    def tts(self) -> TtsExecutor:
        """Executor of a speech synthesis model."""
        assert isinstance(self.executor, TtsExecutor), "this is a model of speech recognition"
        return self.executor

    def close(self, session: int) -> None:
        """Closes the voice-activity session or the stream with that number."""
        self.vad_scheduler.close(session)
        if isinstance(self.executor, StreamingExecutor):
            self.executor.close_stream(session)

    def stop(self) -> None:
        """Ends `run` before its next step. Must be called on the loop's thread."""
        self.running = False

    def step_vad(self) -> bool:
        """Starts a voice-activity step, if one is due and none is in flight; returns whether it did. While live callers
        are connected, and always where the model is not computed on the host's cores, the step runs on another thread,
        beside those of the executor."""
        batch = self.vad_scheduler.schedule(time.monotonic())
        if not batch:
            return False
        runner, step = self.vad_runner, None
        assert runner is not None, "a chunk of voice activity in an engine without its model"
        device = self.executor.device
        concurrent = device.threads > 1 and (self.live_sessions > 0 or not device.computes_on_host)
        with self._guard_vad(batch):
            state = runner.gather_states([self.vad_scheduler.restore_slot(session) for session, _ in batch])
            step = partial(runner.step, [chunk.pcm for _, chunk in batch], state)
            if concurrent:
                self._vad_thread.submit(step).add_done_callback(
                    lambda done: self.call(lambda: self._complete_vad(batch, done.result))
                )
        if step is not None and not concurrent:
            self._complete_vad(batch, step)
        return True

    def _guard_vad(self, batch: VadBatch) -> StepGuard:
        """Context in which an error fails this batch only."""

        def fail(error: AsrServeError) -> None:
            for index in self.vad_scheduler.complete(batch):
                session, chunk = batch[index]
                if self._vad_cache is not None:
                    self._vad_cache.disable(session)
                reject(chunk.future, error)

        return StepGuard(self.stats, "vad", "voice activity", fail)

    def _complete_vad(self, batch: VadBatch, result: Callable[[], VadStepOutput]) -> None:
        """Answers the chunks of a step; those of sessions that were closed while it ran were rejected then."""
        output: VadStepOutput | None = None
        with self._guard_vad(batch):
            output = result()
        if output is None:
            return
        assert self.vad_runner is not None
        indices = self.vad_scheduler.complete(batch)
        self.vad_runner.scatter_states([batch[index][0].slot for index in indices], output.state, indices)
        states = output.export_states() if self._keep_states or self._vad_cache is not None else None
        for index in indices:
            (session, chunk), probabilities = batch[index], output.probabilities[index]
            if states is not None:
                chunk.future.state = states[index]
                if self._vad_cache is not None:
                    self._vad_cache.store(session, chunk, probabilities, states[index])
            resolve(chunk.future, probabilities)
            self.vad_scheduler.serve_from_cache(session)
        counts = [chunk.window_count for _, chunk in batch]
        self.stats.record_step("vad", output.duration_s, len(batch), sum(counts) / (len(batch) * max(counts)))

    def _end(self, error: AsrServeError) -> None:
        """Rejects all remaining requests, even in a broken state, so that no caller waits forever."""
        while not self.inbox.empty():
            try:
                self.inbox.get()(self)
            except Exception:
                logging.getLogger(__name__).exception("a message failed while the engine was shutting down")
        try:
            self.executor.shutdown(error)
        finally:
            self.diarization.close(error)
            self.separation.close(error)
            self.vad_scheduler.close_all(error)
            self._vad_thread.shutdown()
            if self._offload is not None:
                self._offload.close()

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached results: voice activity, answers and audio."""
        vad_bytes = 0 if self._vad_cache is None else self._vad_cache.nbytes
        return vad_bytes + self.executor.report().get("kept_bytes", 0)

    def describe(self) -> dict[str, Any]:
        """Counters and resources in use."""
        return {
            **self.stats.describe(),
            **self.executor.describe(),
            "sessions_used": self.states.used,
            "kept_bytes": self.cached_bytes,
        }


def run_loop(make: Callable[[], Loop], ready: Future[Loop]) -> None:
    """Builds a loop, reports it through `ready` and runs it, all on the calling thread."""
    try:
        loop = make()
    except BaseException as failure:
        ready.set_exception(failure)
        return
    ready.set_result(loop)
    loop.run()
