"""One live caller on the event loop: drives `pipelines/live/listen`, hands its events on, and measures them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from asr_serve import units
from asr_serve.engine.client import EngineClient
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import ListenOptions, LiveEvent, LivePartial, LiveSegmentDone, SessionFinished
from asr_serve.pipelines.live.listen import LiveSession
from asr_serve.text.tokenizers import Tokenizer

MARK_SAMPLES = units.ms_to_samples(100)
"""Arrivals are noted this often."""
MAX_ARRIVAL_MARKS = 1_024
"""How many of them are kept: what is said reaches less far back."""


class ArrivalTimes:
    """When audio came: sample positions to the clock of `time.perf_counter`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MAX_ARRIVAL_MARKS)
        self._next_samples = 0

    def record(self, received_samples: int) -> None:
        """That many are here now."""
        if received_samples >= self._next_samples:
            self._next_samples = received_samples + MARK_SAMPLES
            self._marks.append((received_samples, time.perf_counter()))

    def arrival_s(self, position_samples: int) -> float | None:
        """When the sample at that position was not here yet, for the last time that was noted; forgets what was
        before it. None: that was not noted any more."""
        found = None
        while self._marks and self._marks[0][0] < position_samples:
            found = self._marks.popleft()[1]
        return found


class AsyncListener:
    """`wake` comes from any thread; the rest belongs to the event loop's."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        meter: LiveRouteMetrics,
        using: AbstractContextManager[None],
        hear: Callable[[list[LiveEvent]], None],
    ) -> None:
        """`hear` gets the events, some at a time. `using`: the engine's, held until `close`. Raises what Listening
        does."""
        self.language = client.card.language(options.language)
        self._loop = asyncio.get_running_loop()
        self._awake, self._changed = asyncio.Event(), asyncio.Event()
        self._wake_scheduled = self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        self._meter, self._on_events = meter, hear
        self._arrivals = ArrivalTimes()
        self._partial: LivePartial | None = None
        self._partial_s: float | None = None
        with contextlib.ExitStack() as held:
            held.enter_context(using)
            self._session = LiveSession(client, tokenizer, options, self._wake)
            self._resources = held.pop_all()

    @property
    def received_samples(self) -> int:
        return self._session.received_samples

    @property
    def full(self) -> bool:
        """Put no more before `room` has come back."""
        return self._session.full

    def write(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32 at 16 kHz. Raises what ends this caller."""
        self._session.append_audio(pcm)
        self._meter.audio.inc(units.samples_to_s(len(pcm)))
        self._arrivals.record(self._session.received_samples)
        self._advance()

    def flush(self, name: str) -> None:
        """What was put is to be final soon; `Flushed` follows. Raises AtCapacity."""
        self._session.flush(name)
        self._awake.set()

    async def wait_writable(self) -> None:
        """Wait for a change: `full` may have ended."""
        self._changed.clear()
        await self._changed.wait()

    def finish(self) -> None:
        """No more audio will come."""
        self._session.finish()
        self._awake.set()

    async def run(self) -> None:
        """Until `Finished` was handed on. Raises what ends this caller."""
        while not self._finished:
            await self._awake.wait()
            self._awake.clear()
            self._wake_scheduled = False  # before advancing: a call from now on tells of something new
            self._advance()

    async def close(self) -> None:
        """At any time, idempotent: give everything back."""
        if self._timer is not None:
            self._timer.cancel()
        self._session.close()
        self._resources.close()

    def _wake(self) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._awake.set)

    def _advance(self) -> None:
        events = self._session.advance()
        for event in events:
            match event:
                case LiveSegmentDone():
                    self._note_final(event)
                case LivePartial():
                    self._note_partial(event)
                case SessionFinished():
                    self._finished = True
                    self._awake.set()
        if events:
            self._on_events(events)
        self._changed.set()
        due_s = self._session.due_s
        if due_s is not None and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._awake.set()

    def _note_final(self, done: LiveSegmentDone) -> None:
        came_s = self._arrivals.arrival_s(done.decided_samples)
        if came_s is not None:
            self._meter.final.observe(time.perf_counter() - came_s)
        if self._partial is not None and self._partial.start_samples < done.segment.end_samples:
            self._partial = self._partial_s = None

    def _note_partial(self, partial: LivePartial) -> None:
        now_s, before = time.perf_counter(), self._partial
        if before is not None and self._partial_s is not None and before.start_samples == partial.start_samples:
            self._meter.interval.observe(now_s - self._partial_s)
        self._partial, self._partial_s = partial, now_s
