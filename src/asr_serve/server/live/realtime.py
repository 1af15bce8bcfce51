"""FunASR's realtime session: text while somebody speaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from asr_serve import units
from asr_serve.engine.client import EngineClient
from asr_serve.metrics import LiveMeter
from asr_serve.pipelines.caller import Finished, ListenOptions, Partial, SegmentDone
from asr_serve.pipelines.listen import Listening
from asr_serve.protocols.funasr_live import Sentences, samples
from asr_serve.server.live.outbox import Outbox
from asr_serve.types import Segment

MARK_SAMPLES = units.ms_to_samples(100)
"""Arrivals are noted this often."""
MARKS = 1_024
"""How many of them are kept: what is said reaches less far back."""


class Arrivals:
    """When audio came: sample positions to the clock of `time.perf_counter`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MARKS)
        self._next_samples = 0

    def note(self, received_samples: int) -> None:
        """That many are here now."""
        if received_samples >= self._next_samples:
            self._next_samples = received_samples + MARK_SAMPLES
            self._marks.append((received_samples, time.perf_counter()))

    def before(self, position_samples: int) -> float | None:
        """When the sample at that position was not here yet, for the last time that was noted; forgets what was
        before it. None: that was not noted any more."""
        found = None
        while self._marks and self._marks[0][0] < position_samples:
            found = self._marks.popleft()[1]
        return found


class Realtime:
    """A Hearing over `pipelines/listen`. `wake` may be called from any thread, the rest from the event loop's."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        options: ListenOptions,
        outbox: Outbox,
        meter: LiveMeter,
        using: AbstractContextManager[None],
        *,
        only_new: bool,
    ) -> None:
        """`using`: the engine's, held until `close`. Raises what Listening does."""
        self.language = options.language or client.card.languages[0]
        self._loop = asyncio.get_running_loop()
        self._awake, self._changed = asyncio.Event(), asyncio.Event()
        self._called = self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        self._outbox, self._meter = outbox, meter
        self._sentences = Sentences(only_new=only_new)
        self._partial: Partial | None = None
        self._partial_s: float | None = None
        self._arrivals = Arrivals()
        with contextlib.ExitStack() as held:
            held.enter_context(using)
            self._listening = Listening(client, text, options, self._wake)
            self._held = held.pop_all()

    @property
    def received_samples(self) -> int:
        return self._listening.received_samples

    @property
    def full(self) -> bool:
        return self._listening.full

    def put(self, pcm: bytes | memoryview) -> None:
        heard = samples(pcm)
        self._listening.put(heard)
        self._meter.audio.inc(units.samples_to_s(len(heard)))
        self._arrivals.note(self._listening.received_samples)
        self._advance()

    async def room(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def finish(self) -> None:
        self._listening.finish()
        self._awake.set()

    async def run(self) -> str:
        while not self._finished:
            await self._awake.wait()
            self._awake.clear()
            self._called = False  # before advancing: a call from now on tells of something new
            self._advance()
        return self._sentences.final()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._listening.close()
        self._held.close()

    def _wake(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._awake.set)

    def _advance(self) -> None:
        news = False
        for event in self._listening.advance():
            match event:
                case SegmentDone(segment, decided):
                    self._lock(segment, decided)
                    news = True
                case Partial():
                    news |= self._partial is None or event.text != self._partial.text
                    self._begin(event)
                case Finished():
                    self._finished = True
                    self._awake.set()
        if news and not self._outbox.show(self._answer):
            self._meter.dropped.inc()
        self._changed.set()
        due_s = self._listening.due_s
        if due_s is not None and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._look)

    def _look(self) -> None:
        self._timer = None
        self._awake.set()

    def _lock(self, segment: Segment, decided_samples: int) -> None:
        self._sentences.lock(segment)
        came_s = self._arrivals.before(decided_samples)
        if came_s is not None:
            self._meter.final.observe(time.perf_counter() - came_s)
        if self._partial is not None and self._partial.start_samples < segment.end_samples:
            self._partial = self._partial_s = None

    def _begin(self, partial: Partial) -> None:
        now_s, before = time.perf_counter(), self._partial
        if before is not None and self._partial_s is not None and before.start_samples == partial.start_samples:
            self._meter.interval.observe(now_s - self._partial_s)
        self._partial, self._partial_s = partial, now_s

    def _answer(self) -> str:
        partial = self._partial
        if partial is None:
            return self._sentences.answer("")
        return self._sentences.answer(partial.text, partial.start_samples)
