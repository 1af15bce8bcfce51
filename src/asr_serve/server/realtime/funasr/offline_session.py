"""Session of FunASR's `/ws`: audio is transcribed as a file while it arrives, and answered at its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AbstractContextManager
from typing import BinaryIO, cast

from asr_serve.audio.pcm import SAMPLE_BYTES, WAV_HEADER
from asr_serve.errors import AsrServeError
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.funasr.websocket import FunAsrOptions, SentenceEncoder
from asr_serve.server.caller_models import RequestWatch
from asr_serve.server.engine_registry import ModelEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.transcription_job import TranscriptionExecutor, TranscriptionJob
from asr_serve.server.uploads.spool import Spool, SpoolReader
from asr_serve.units import samples_to_s

OFFLINE_MEMORY_BYTES = 1 << 20
"""Bytes of a `/ws` recording that stay in memory; the rest goes to disk."""


class FunAsrOfflineSession:
    """FunAsrSession with the job of `POST /asr`, started with the first audio. Sends nothing before the end."""

    def __init__(
        self,
        executor: TranscriptionExecutor,
        engine: ModelEngine,
        reservation: AbstractContextManager[None],
        options: FunAsrOptions,
        context: RequestContext,
        meter: LiveRouteMetrics,
        watch: RequestWatch,
    ) -> None:
        """`reservation`: from `AdmissionController.reserve_work`, held until `close`. Raises AtCapacity."""
        self.language, self.received_samples, self.full = options.language or "", 0, False
        self._jobs, self._engine, self._visit, self._meter = executor, engine, context, meter
        self._options = TranscribeOptions(priority="interactive", **options.pipeline_options())
        self._watch, self._ended_s = watch, 0.0
        self._spool = Spool(OFFLINE_MEMORY_BYTES)
        self._job: TranscriptionJob | None = None
        self._audio_started = asyncio.Event()
        with contextlib.ExitStack() as stack:
            stack.enter_context(reservation)
            stack.enter_context(engine.in_use())
            self._resources = stack.pop_all()

    async def wait_writable(self) -> None:
        """Returns at once: what does not fit into memory goes to disk."""

    def write(self, pcm: bytes | memoryview) -> None:
        """Writes whole samples. Raises AtCapacity when the disk is full."""
        if self._job is None:
            self._spool.append(memoryview(WAV_HEADER))
            self._job = self._jobs.start(self._engine, cast(BinaryIO, SpoolReader(self._spool)), self._options)
            self._audio_started.set()
        self._spool.append(memoryview(pcm))
        samples = len(pcm) // SAMPLE_BYTES
        self.received_samples += samples
        self._meter.audio.inc(samples_to_s(samples))

    def finish(self) -> None:
        self._ended_s = time.perf_counter()
        self._spool.end()
        self._audio_started.set()

    async def run(self) -> str:
        sentences = SentenceEncoder(words=self._options.words is not False)
        await self._audio_started.wait()
        if self._job is None:
            return sentences.encode_final(0)
        try:
            async for event in self._job:
                sentences.add_segment(event.segment)
                if event.phases is not None:
                    self._visit.trace.engine_phases(event.phases)
            transcript = await self._job.transcript
        except AsrServeError as error:
            self._watch.finish(error)
            raise
        self._watch.note_latency(time.perf_counter() - self._ended_s)
        self._watch.finish()
        return sentences.encode_final(transcript.duration_samples, transcript.language, transcript.language_prob)

    async def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._spool.close()
        if self._job is not None:
            await self._job.wait_closed()
        self._resources.close()
