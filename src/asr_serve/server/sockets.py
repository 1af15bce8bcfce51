"""FunASR's WebSockets: `/` answers while somebody speaks, `/ws` when all has been said."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.config import ServeConfig
from asr_serve.errors import OptionError
from asr_serve.metrics import LiveMeter, ServerMetrics
from asr_serve.pipelines.listen import ListenOptions
from asr_serve.pipelines.transcribe import TranscribeOptions
from asr_serve.pipelines.utterance import language
from asr_serve.protocols.fields import Fields
from asr_serve.protocols.funasr_live import SAMPLE_BYTES, Sentences
from asr_serve.server.bodies.spool import Spool, SpoolReader
from asr_serve.server.engines import Engine, Engines
from asr_serve.server.gate import Gate
from asr_serve.server.jobs import Job, Jobs
from asr_serve.server.live.outbox import SEND_S, Outbox
from asr_serve.server.live.realtime import Realtime
from asr_serve.server.live.talk import Ears, Hearing, Limits, Talk
from asr_serve.server.replies import TOO_BIG, close_code, code_of, hang_up, told_live
from asr_serve.server.visits import Visit, visit_of
from asr_serve.units import RATE_HZ, samples_to_s
from asr_serve.vad.schedule import SilenceSchedule

REALTIME, OFFLINE = "/", "/ws"
QUERY = ("model", "api_key")
REALTIME_QUERY = (*QUERY, "sentences", "partial_ms", "max_segment_ms", "silence_schedule")
MEMORY_BYTES = 1 << 20
"""What `/ws` keeps of a recording in memory; the rest goes to disk."""
STREAMED = 0xFFFFFFFF
"""As a size in a WAV header: not known."""
WAV_HEAD = struct.pack(
    "<4sI4s4sIHHIIHH4sI",
    *(b"RIFF", STREAMED, b"WAVE", b"fmt ", 16, 1, 1),
    *(RATE_HZ, RATE_HZ * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", STREAMED),
)
NO_CODE = 1_005
"""A client that says nothing as it closes; and granian's word for a frame over its own limit."""


class Desk(NamedTuple):
    """What these routes work with."""

    config: ServeConfig
    engines: Engines
    gate: Gate
    jobs: Jobs
    metrics: ServerMetrics


class Offline:
    """A Hearing like `POST /asr`: the same job over the same audio, begun with the first of it. Nothing is told before
    the end."""

    def __init__(
        self, jobs: Jobs, engine: Engine, place: AbstractContextManager[None], language: str, visit: Visit, meter: LiveMeter
    ) -> None:
        """`place`: among those for whom work is done, held until `close`. Raises AtCapacity."""
        self.language, self.received_samples, self.full = language, 0, False
        self._jobs, self._engine, self._visit, self._meter = jobs, engine, visit, meter
        self._spool = Spool(MEMORY_BYTES)
        self._job: Job | None = None
        self._begun = asyncio.Event()
        with contextlib.ExitStack() as held:
            held.enter_context(place)
            held.enter_context(engine.used())
            self._held = held.pop_all()

    async def room(self) -> None:
        """There is always some: what does not fit into memory goes to disk."""

    def put(self, pcm: bytes | memoryview) -> None:
        """Raises AtCapacity when the disk is full."""
        if self._job is None:
            self._spool.append(memoryview(WAV_HEAD))
            options = TranscribeOptions(language=self.language, priority="interactive")
            self._job = self._jobs.begin(self._engine, SpoolReader(self._spool), options)
            self._begun.set()
        self._spool.append(memoryview(pcm))
        samples = len(pcm) // SAMPLE_BYTES
        self.received_samples += samples
        self._meter.audio.inc(samples_to_s(samples))

    def finish(self) -> None:
        self._spool.end()
        self._begun.set()

    async def run(self) -> str:
        sentences = Sentences()
        await self._begun.wait()
        if self._job is None:
            return sentences.final(0)
        async for event in self._job:
            sentences.lock(event.segment)
            if event.phases is not None:
                self._visit.trace.engine_phases(event.phases)
        return sentences.final((await self._job.transcript).duration_samples)

    async def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._spool.close()
        if self._job is not None:
            await self._job.over()
        self._held.close()


class Microphone:
    """Ears of one route. `begin`: how it hears, given the engine, the language and where answers go."""

    def __init__(self, engines: Engines, model: str | None, visit: Visit, begin: Begin) -> None:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        self._engines, self._model, self._visit, self._begin = engines, model, visit, begin
        self._engine()

    def language(self, code: str | None) -> str:
        return language(self._engine().client, code)

    def begin(self, language: str, outbox: Outbox) -> Hearing:
        return self._begin(self._engine(), language, outbox)

    def _engine(self) -> Engine:
        engine = self._engines.get(self._model)
        self._visit.model = engine.name
        return engine
