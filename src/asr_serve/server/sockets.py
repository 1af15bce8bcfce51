"""FunASR's WebSockets: `/` answers while somebody speaks, `/ws` when all has been said."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol, cast
from urllib.parse import parse_qs

import msgspec
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.audio.pcm import SAMPLE_BYTES
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError
from asr_serve.metrics import LiveRouteMetrics, ServerMetrics
from asr_serve.pipelines.live.events import ListenOptions
from asr_serve.pipelines.options import SPEAKER_COUNT_FIELDS, TranscribeOptions
from asr_serve.pipelines.prompting import hotword_bias
from asr_serve.pipelines.segments import SegmentNormalizer, check_diarization, resolve_language
from asr_serve.protocols.fields import Fields
from asr_serve.protocols.funasr_live import FLAGS, Sentences, Wants
from asr_serve.server.bodies.spool import Spool, SpoolReader
from asr_serve.server.engines import Engine, Engines
from asr_serve.server.jobs import Job, Jobs
from asr_serve.server.layers.gate import Gate
from asr_serve.server.layers.replies import TOO_BIG, close_code, code_of, hang_up, told_live
from asr_serve.server.layers.visits import Visit, visit_of
from asr_serve.server.live.life import Limits
from asr_serve.server.live.outbox import SEND_S, Outbox
from asr_serve.server.live.realtime import Realtime
from asr_serve.server.live.talk import Hearing, Talk
from asr_serve.units import RATE_HZ, samples_to_s

REALTIME, OFFLINE = "/", "/ws"
QUERY = ("model", "api_key", *FLAGS, *SPEAKER_COUNT_FIELDS)
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
    """A Hearing like `POST /asr`: the same job over the same audio, begun with the first of it. It tells nothing
    before the end."""

    def __init__(
        self,
        jobs: Jobs,
        engine: Engine,
        place: AbstractContextManager[None],
        wants: Wants,
        visit: Visit,
        meter: LiveRouteMetrics,
    ) -> None:
        """`place`: among those for whom work is done, held until `close`. Raises AtCapacity."""
        self.language, self.received_samples, self.full = wants.language or "", 0, False
        self._jobs, self._engine, self._visit, self._meter = jobs, engine, visit, meter
        self._options = TranscribeOptions(priority="interactive", **wants.options())
        self._spool = Spool(MEMORY_BYTES)
        self._job: Job | None = None
        self._begun = asyncio.Event()
        with contextlib.ExitStack() as held:
            held.enter_context(place)
            held.enter_context(engine.used())
            self._held = held.pop_all()

    async def room(self) -> None:
        """There is always some: what does not fit into memory goes to disk."""

    def write(self, pcm: bytes | memoryview) -> None:
        """Raises AtCapacity when the disk is full."""
        if self._job is None:
            self._spool.append(memoryview(WAV_HEAD))
            self._job = self._jobs.begin(self._engine, cast(BinaryIO, SpoolReader(self._spool)), self._options)
            self._begun.set()
        self._spool.append(memoryview(pcm))
        samples = len(pcm) // SAMPLE_BYTES
        self.received_samples += samples
        self._meter.audio.inc(samples_to_s(samples))

    def finish(self) -> None:
        self._spool.end()
        self._begun.set()

    async def run(self) -> str:
        sentences = Sentences(words=self._options.words)
        await self._begun.wait()
        if self._job is None:
            return sentences.final(0)
        async for event in self._job:
            sentences.lock(event.segment)
            if event.phases is not None:
                self._visit.trace.engine_phases(event.phases)
        whole = await self._job.transcript
        return sentences.final(whole.duration_samples, whole.language, whole.language_prob)

    async def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._spool.close()
        if self._job is not None:
            await self._job.over()
        self._held.close()


Begin = Callable[[Engine, Wants, Outbox], Hearing]
"""Begins a session of a route, with answers into that outbox."""


class Microphone:
    """The Ears of one socket: the model it asked for, when it wants to be heard."""

    def __init__(self, engines: Engines, model: str | None, visit: Visit, begin: Begin) -> None:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        self._engines, self._model, self._visit, self._begin = engines, model, visit, begin
        self._engine()

    def language(self, code: str | None) -> str:
        return resolve_language(self._engine().client, code)

    def expect(self, wants: Wants) -> None:
        engine = self._engine()
        hotword_bias(engine.client, engine.tokenizer, wants.hotwords)
        SegmentNormalizer(resolve_language(engine.client, wants.language or None), itn=wants.itn)
        if wants.spk:
            check_diarization(engine.client)

    def begin(self, wants: Wants, outbox: Outbox) -> Hearing:
        return self._begin(self._engine(), wants, outbox)

    def _engine(self) -> Engine:
        engine = self._engines.get(self._model)
        self._visit.model = engine.name
        return engine


def _realtime(desk: Desk, fields: Fields, visit: Visit, meter: LiveRouteMetrics) -> Begin:
    partial_ms = fields.whole("partial_ms", 100, 60_000)
    schedule = fields.text("silence_schedule")
    only_new = fields.choice("sentences", ("all", "new")) == "new"
    options = ListenOptions(
        partial_ms=ListenOptions().partial_ms if partial_ms is None else partial_ms,
        max_segment_ms=fields.whole("max_segment_ms", 1_000, 86_400_000),
        silence_schedule=None if schedule is None else SilenceSchedule.from_text(schedule),
    )

    def begin(engine: Engine, wants: Wants, outbox: Outbox) -> Hearing:
        chosen = msgspec.structs.replace(options, **wants.options())
        return Realtime(engine.client, engine.tokenizer, chosen, outbox, meter, engine.used(), only_new=only_new)

    return begin


def _offline(desk: Desk, fields: Fields, visit: Visit, meter: LiveRouteMetrics) -> Begin:
    def begin(engine: Engine, wants: Wants, outbox: Outbox) -> Hearing:
        return Offline(desk.jobs, engine, desk.gate.work(), wants, visit, meter)

    return begin


class Parting(Protocol):
    """How a client left."""

    left_in_session: bool
    left_code: int | None


class Talking(Parting, Protocol):
    """What is said over one socket."""

    @property
    def received_samples(self) -> int: ...

    def drain(self) -> None: ...

    async def run(self) -> AsrServeError | None: ...


async def carry(talk: Talking, gate: Gate, visit: Visit, receive: Receive, send: Send) -> None:
    """To its end, of which the visit and the client are told."""
    try:
        with gate.warned(talk.drain):
            told = await talk.run()
    finally:
        visit.audio_s = samples_to_s(talk.received_samples)
    await part(talk, told, visit, receive, send)


async def part(talk: Parting, told: AsrServeError | None, visit: Visit, receive: Receive, send: Send) -> None:
    """From a client: the visit learns how its conversation ended, and the client, if it is still there."""
    if told is not None:
        visit.ended = code_of(told)
        await hang_up(receive, send, close_code(told))
        return
    visit.ended = "client_gone" if talk.left_in_session else "done"
    if talk.left_code == NO_CODE:
        # The only word that reaches a client whose frame granian refused.
        await hang_up(receive, send, TOO_BIG)


class Line:
    """ASGI: the WebSockets of one route, accepted already."""

    def __init__(
        self,
        desk: Desk,
        path: str,
        session_s: float,
        fields: Sequence[str],
        begin: Callable[[Desk, Fields, Visit, LiveRouteMetrics], Begin],
    ) -> None:
        """`fields`: what the query may hold."""
        self._desk, self._fields, self._begin = desk, fields, begin
        self._meter = desk.metrics.live_route(path)
        config = desk.config
        self._limits = Limits(config.session_idle_s, session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, desk = visit_of(scope), self._desk
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        fields = Fields(query, self._fields)
        begin = self._begin(desk, fields, visit, self._meter)
        ears = Microphone(desk.engines, fields.text("model"), visit, begin)
        talk = Talk(
            receive,
            Outbox(send, SEND_S),
            ears,
            self._limits,
            partial(told_live, request_id=visit.request_id),
            Wants.of(fields),
        )
        await carry(talk, desk.gate, visit, receive, send)


def routes(desk: Desk) -> list[WebSocketRoute]:
    config = desk.config
    return [
        WebSocketRoute(REALTIME, Line(desk, REALTIME, config.max_session_s, REALTIME_QUERY, _realtime)),
        WebSocketRoute(OFFLINE, Line(desk, OFFLINE, config.max_duration_s, QUERY, _offline)),
    ]
