"""Live session on the event loop: drives `pipelines/live/live_session`, passes its events on and measures them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AsrServeError
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.language_identification import LanguageIdentification, possible_itn
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone, SessionFinished
from asr_serve.pipelines.live.identifying_session import IdentifyingSession, OpenInLanguage
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.live.session_state import LiveSessionState, SavedLiveSession
from asr_serve.pipelines.options import ListenOptions
from asr_serve.server.caller_models import RequestWatch
from asr_serve.server.spoken_language import SpokenLanguage
from asr_serve.text.tokenizers import Tokenizer

MARK_SAMPLES = units.ms_to_samples(100)
"""Interval at which arrival times are recorded."""
MAX_ARRIVAL_MARKS = 1_024
"""Number of arrival times stored; the latency of older audio is not measured."""


class ArrivalTimes:
    """Arrival times of audio: sample positions to `time.perf_counter`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=MAX_ARRIVAL_MARKS)
        self._next_samples = 0

    def record(self, received_samples: int) -> None:
        """Records that `received_samples` have arrived by now."""
        if received_samples >= self._next_samples:
            self._next_samples = received_samples + MARK_SAMPLES
            self._marks.append((received_samples, time.perf_counter()))

    def arrival_s(self, position_samples: int) -> float | None:
        """Latest recorded time before the sample at that position arrived; forgets all records up to it. None when
        it is not recorded any more."""
        time_s = None
        while self._marks and self._marks[0][0] < position_samples:
            time_s = self._marks.popleft()[1]
        return time_s


class _Waker:
    """Sets events of one event loop from any thread. The results of an engine's step wake many listeners at once: they
    cost one call into the loop, and not one each, with which the thread would wait for the interpreter's lock."""

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: deque[asyncio.Event] = deque()
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Waker:
        """Returns the waker of that loop; call on its thread."""
        return cls._of_loops.setdefault(loop, cls(loop))

    def wake(self, event: asyncio.Event) -> None:
        self._due.append(event)
        loop = self._loop()
        if not self._scheduled and loop is not None:
            self._scheduled = True
            loop.call_soon_threadsafe(self._set_due)

    def _set_due(self) -> None:
        self._scheduled = False  # first: what is appended from now on is seen below, or scheduled again
        while self._due:
            self._due.popleft().set()


class AsyncListener:
    """Live session on the event loop. The engine wakes it from any thread; methods belong to the loop's thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        meter: LiveRouteMetrics,
        lease: AbstractContextManager[None],
        on_events: Callable[[list[LiveEvent]], None],
        *,
        api_client: str | None = None,
        saved: SavedLiveSession | None = None,
        watch: RequestWatch | None = None,
        identifies: bool = True,
    ) -> None:
        """`on_events` receives new events. `lease` holds the engine until `close`. `api_client`: whose session it is,
        where that is known. `saved`: the session to continue. `watch`: what is told of its latencies and its end.
        `identifies`: whether its model may change once its language is identified. Raises as LiveSession does."""
        self._default_language = self.language = client.card.language(options.language)
        self.model = client.name
        """Name of its model, by now."""
        self.after_advance: Callable[[], None] = lambda: None
        """Called after every step of the session, with or without events."""
        self._loop = asyncio.get_running_loop()
        self._waker = _Waker.of(self._loop)
        self._awake, self._changed = asyncio.Event(), asyncio.Event()
        self._wake_scheduled = self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        self._meter, self._on_events, self._watch = meter, on_events, watch
        self._arrivals = ArrivalTimes()
        self._partial: LivePartial | None = None
        self._partial_s: float | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(lease)
            session = LiveSession(client, tokenizer, options, self._wake, api_client=api_client, saved=saved)
            self._resources = stack.pop_all()
        self._session: LiveSession | IdentifyingSession = session
        self._tokenizer, self._options, self._api_client = tokenizer, options, api_client
        self._spoken: SpokenLanguage | None = None
        self._identifier_use = self._resources.enter_context(contextlib.ExitStack())
        """Use of the identifying engine, until the language is identified."""
        if identifies and saved is None and watch is not None and watch.language is not None:
            self._spoken = watch.language.for_live(options)
        if self._spoken is not None:
            self.language = ""
            self._identifier_use.enter_context(self._spoken.identifier.in_use())
            identifier = self._spoken.identifier.client
            self._session = IdentifyingSession(session, client.name, identifier, self._choose_model, self._wake)
        if saved is not None:
            self._awake.set()

    def _choose_model(self, language: str) -> tuple[str, OpenInLanguage | None]:
        spoken = self._spoken
        assert spoken is not None
        engine = spoken.model_for(language)
        if engine is spoken.default:
            return engine.name, None

        def open_session(saved: SavedLiveSession) -> LiveSession:
            itn = possible_itn(engine.card, language, self._options.itn)
            options = msgspec.structs.replace(self._options, language=language, itn=itn)
            session = LiveSession(
                engine.client, engine.tokenizer, options, self._wake, api_client=self._api_client, saved=saved
            )
            self._resources.enter_context(engine.in_use())
            self._tokenizer = engine.tokenizer
            return session

        return engine.name, open_session

    def decode_tokens(self, tokens: list[int]) -> str:
        """Text of tokens of its segments."""
        return self._tokenizer.decode(tokens)

    @property
    def received_samples(self) -> int:
        return self._session.received_samples

    @property
    def scored_samples(self) -> int:
        """End of the received audio in which speech has been looked for."""
        return self._session.scored_samples

    def export_state(self) -> LiveSessionState | None:
        """Returns the state after the events that were passed on; None: not now."""
        return self._session.export_state()

    def received_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        """Returns the audio from there on that may still be needed, and its first position."""
        return self._session.received_audio(from_samples)

    @property
    def needed_from_samples(self) -> int:
        """Start of the audio that may still be needed."""
        return self._session.needed_from_samples

    @property
    def full(self) -> bool:
        """Returns whether to write no more before `wait_writable` has returned."""
        return self._session.full

    def write(self, pcm: np.ndarray) -> None:
        """Writes `pcm` (n,) float32 at 16 kHz. Raises what ends the session."""
        with self._watched():
            self._session.append_audio(pcm)
            self._meter.audio.inc(units.samples_to_s(len(pcm)))
            self._arrivals.record(self._session.received_samples)
            self._advance()

    def flush(self, name: str) -> None:
        """Finalizes all audio so far; a `FlushDone` of that name follows. Raises AtCapacity."""
        self._session.flush(name)
        self._awake.set()

    async def wait_writable(self) -> None:
        """Waits for a change, after which `full` may be false."""
        self._changed.clear()
        await self._changed.wait()

    def finish(self) -> None:
        """Ends the audio; `SessionFinished` follows."""
        self._session.finish()
        self._awake.set()

    async def run(self) -> None:
        """Runs until `SessionFinished` has been passed on. Raises what ends the session."""
        while not self._finished:
            await self._awake.wait()
            self._awake.clear()
            self._wake_scheduled = False  # before advancing: a wake-up from now on means something new
            with self._watched():
                self._advance()

    async def close(self) -> None:
        """Releases everything; at any time, idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None and self.received_samples:
            self._watch.finish()
        self._session.close()
        self._resources.close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Context manager around a step of the session, of whose failure the watch hears."""
        try:
            yield
        except AsrServeError as error:
            if self._watch is not None:
                self._watch.finish(error)
            raise

    def _wake(self) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._waker.wake(self._awake)

    def _advance(self) -> None:
        events = self._session.advance()
        for event in events:
            match event:
                case LiveSegmentDone():
                    self._note_final(event)
                case LivePartial():
                    self._note_partial(event)
                case LanguageIdentification():
                    assert self._spoken is not None
                    self._spoken.tell(event)
                    self._identifier_use.close()
                    self.model, self.language = (
                        event.model,
                        event.language if event.outcome == "identified" else self._default_language,
                    )
                case SessionFinished():
                    self._finished = True
                    self._awake.set()
        if events:
            self._on_events(events)
        self.after_advance()
        self._changed.set()
        due_s = self._session.due_s
        if due_s is not None and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, due_s - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._awake.set()

    def _note_final(self, done: LiveSegmentDone) -> None:
        arrival_s = self._arrivals.arrival_s(done.decided_samples)
        if arrival_s is not None:
            latency_s = time.perf_counter() - arrival_s
            self._meter.final.observe(latency_s)
            if self._watch is not None:
                self._watch.note_latency(latency_s)
        if self._partial is not None and self._partial.start_samples < done.segment.end_samples:
            self._partial = self._partial_s = None

    def _note_partial(self, partial: LivePartial) -> None:
        now_s, last = time.perf_counter(), self._partial
        if last is not None and self._partial_s is not None and last.start_samples == partial.start_samples:
            self._meter.interval.observe(now_s - self._partial_s)
        self._partial, self._partial_s = partial, now_s
