"""The one loop of a device: drain, hear, step, emit. What a step is, is its work's affair (engine/work)."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.engine.chunked.streams import Streams
from asr_serve.engine.session import Listeners, reject, resolve
from asr_serve.engine.speakers.runner import Voices
from asr_serve.engine.speaking.work import Speaking
from asr_serve.engine.states import StateCacheManager
from asr_serve.engine.stats import Stats
from asr_serve.engine.tiers import Tiers
from asr_serve.engine.voice import VadRunner, VoiceMemory
from asr_serve.engine.work import Attempt, Work
from asr_serve.errors import AsrServeError, EngineClosed

Job = Callable[["Loop"], None]
"""A message to the loop: it is called on the loop's thread, between two steps."""


class Loop:
    """Owns the callers' voice activity, and the work."""

    def __init__(
        self,
        work: Work,
        vad: VadRunner | None,
        step_windows: int,
        on_stop: Callable[[], None],
        *,
        stats: Stats,
        keep_states: bool = False,
        memory: VoiceMemory | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`vad`: None of a model that hears nobody. `step_windows`: the most windows in one voice-activity step.
        `keep_states`: hand out each caller's state with its probabilities. `memory`: of voice activity; without it
        nothing is kept of what was heard. `tiers`: closed with the loop."""
        self.work, self.vad_runner, self._memory, self._tiers = work, vad, memory, tiers
        self.states = vad.states if vad is not None else StateCacheManager({}, 0)
        """Of voice activity."""
        self.names = memory is not None
        """Whether what comes should have a name (engine/prefix/names)."""
        self.inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.listeners = Listeners(self.states, step_windows, memory)
        self.stats, self.running = stats, True
        self.voices = Voices(work.device, stats)
        """Who speaks, of callers who want to know."""
        self._on_stop, self._keep_states = on_stop, keep_states
        work.begin(self)

    def run(self) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            while self.running:
                self.drain()
                if self.running and not self._step():
                    self._sleep()
        except Exception as failure:
            error = EngineClosed(f"the engine stopped: {type(failure).__name__}: {failure}", todo="load it again")
            error.__cause__ = failure
            logging.getLogger(__name__).exception("the engine loop stopped")
        finally:
            self._on_stop()  # from here on nobody can call
            self._end(error)

    def _step(self) -> bool:
        """One turn; False when there was nothing to do."""
        heard = self.hear()
        busy = self.work.step() or heard
        return self.voices.step(live=self.listeners.live > 0, idle=not busy) or busy

    def _sleep(self) -> None:
        """Nothing to do: until somebody calls, or what waits for company has waited long enough."""
        due_s = [due for due in (self.listeners.due_s, self.work.due_s) if due is not None]
        if not due_s and self.work.idle:
            self.check()
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        with contextlib.suppress(queue.Empty):
            self.inbox.get(timeout=wait_s)(self)

    def drain(self) -> None:
        while True:
            try:
                job = self.inbox.get_nowait()
            except queue.Empty:
                return
            job(self)

    def call(self, job: Callable[[], None]) -> None:
        """From any thread."""
        self.inbox.put(lambda _: job())

    def check(self) -> None:
        """Everything that was lent has a holder. Run when idle."""
        self.states.check()
        self.work.check()

    @property
    def streams(self) -> Streams:
        """Of a streaming model."""
        assert isinstance(self.work, Streams), "this model hears whole utterances"
        return self.work

    @property
    def speaking(self) -> Speaking:
        """Of a model that speaks."""
        assert isinstance(self.work, Speaking), "this model hears"
        return self.work

    def close(self, session: int) -> None:
        """A caller's voice activity, or a stream: whichever has that number."""
        self.listeners.close(session)
        if isinstance(self.work, Streams):
            self.work.close(session)

    def stop(self) -> None:
        self.running = False

    def hear(self) -> bool:
        """Voice activity of whoever has waited long enough."""
        batch = self.listeners.take(time.monotonic())
        if not batch:
            return False
        runner = self.vad_runner
        assert runner is not None, "nobody has a row where there are none"
        started = time.perf_counter()

        def fail(error: AsrServeError) -> None:
            for listener, windows in batch:
                if self._memory is not None:
                    self._memory.forget(listener)
                reject(windows.future, error)

        results: list[np.ndarray] = []
        with Attempt(self.stats, "vad", "voice activity", fail):
            results = runner.run([(self.listeners.row(listener), w.pcm) for listener, w in batch])
        for (listener, windows), probabilities in zip(batch, results, strict=False):  # none where it failed
            if self._keep_states or self._memory is not None:
                windows.state = self.states.save(listener.slot)
            if self._memory is not None and windows.state is not None:
                self._memory.keep(listener, windows, probabilities, windows.state)
            resolve(windows.future, probabilities)
            self.listeners.recall(listener)
        counts = [windows.count for _, windows in batch]
        used = sum(counts) / (len(batch) * max(counts))
        self.stats.step("vad", time.perf_counter() - started, len(batch), used)
        return True

    def _end(self, error: AsrServeError) -> None:
        """Reject whatever is left, even when what is left is broken: nobody may wait for ever."""
        while not self.inbox.empty():
            try:
                self.inbox.get()(self)
            except Exception:
                logging.getLogger(__name__).exception("a message to the ending engine failed")
        try:
            self.work.end(error)
        finally:
            self.voices.end(error)
            self.listeners.close_all(error)
            if self._tiers is not None:
                self._tiers.close()

    @property
    def kept_bytes(self) -> int:
        """Of what was heard before."""
        voice = 0 if self._memory is None else self._memory.nbytes
        return voice + self.work.report().get("kept_bytes", 0)

    def describe(self) -> dict[str, Any]:
        """What has been done so far, and what is held."""
        return {
            **self.stats.describe(),
            **self.work.describe(),
            "sessions_used": self.states.used,
            "kept_bytes": self.kept_bytes,
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
