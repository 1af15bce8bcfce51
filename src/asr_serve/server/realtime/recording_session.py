"""Transcription of a recording that comes over a WebSocket: it is decoded while it arrives, and answered at its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AbstractContextManager
from typing import BinaryIO, cast

from asr_serve.audio.pcm import SAMPLE_BYTES
from asr_serve.errors import AsrServeError, AudioTooLong
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.server.caller_models import RequestWatch
from asr_serve.server.engine_registry import FileEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.transcription_job import TranscriptionExecutor, TranscriptionJob
from asr_serve.server.uploads.spool import Spool, SpoolReader
from asr_serve.types import Transcript
from asr_serve.units import samples_to_s

MEMORY_BYTES = 1 << 20
"""Bytes of a recording that stay in memory; the rest goes to disk."""


class RecordingSession:
    """Session with the job of an upload, started with the first audio."""

    def __init__(
        self,
        executor: TranscriptionExecutor,
        engine: FileEngine,
        reservation: AbstractContextManager[None],
        options: TranscribeOptions,
        context: RequestContext,
        meter: LiveRouteMetrics,
        watch: RequestWatch,
        header: bytes,
        sample_bytes: int | None = SAMPLE_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        """`reservation`: from `AdmissionController.reserve_work`, held until `close`. `header`: bytes before those that
        are written; empty for those of a file. `sample_bytes`: size of a sample at 16 kHz, for the length so far; None:
        it is known at the end. `max_bytes`: limit of the recording. Raises AtCapacity."""
        self.language, self.received_samples, self.full = options.language or "", 0, False
        engine = watch.file_engine(engine)
        self._jobs, self._engine, self._context, self._meter = executor, engine, context, meter
        self._options = options
        self._watch, self._ended_s, self._header, self._sample_bytes = watch, 0.0, header, sample_bytes
        self._max_bytes = max_bytes
        self._spool = Spool(MEMORY_BYTES)
        self._job: TranscriptionJob | None = None
        self._audio_started = asyncio.Event()
        with contextlib.ExitStack() as stack:
            stack.enter_context(reservation)
            stack.enter_context(engine.in_use())
            self._resources = stack.pop_all()

    async def wait_writable(self) -> None:
        """Returns at once: what does not fit into memory goes to disk."""

    def write(self, pcm: bytes | memoryview) -> None:
        """Writes bytes. Raises AtCapacity when the disk is full, AudioTooLong."""
        if self._max_bytes is not None and self._spool.size_bytes + len(pcm) > self._max_bytes:
            raise AudioTooLong(
                f"a recording of over {self._max_bytes} bytes came", "no more are allowed", "send it in parts"
            )
        if self._job is None:
            if self._header:
                self._spool.append(memoryview(self._header))
            self._job = self._jobs.start(self._engine, cast(BinaryIO, SpoolReader(self._spool)), self._options)
            self._audio_started.set()
        self._spool.append(memoryview(pcm))
        if self._sample_bytes is not None:
            self._count(len(pcm) // self._sample_bytes)

    def _count(self, samples: int) -> None:
        self.received_samples += samples
        self._meter.audio.inc(samples_to_s(samples))

    def finish(self) -> None:
        self._ended_s = time.perf_counter()
        self._spool.end()
        self._audio_started.set()

    async def transcribe(self) -> Transcript | None:
        """Waits for the transcript; None without audio. Raises what the job does."""
        await self._audio_started.wait()
        if self._job is None:
            return None
        try:
            async for event in self._job:
                if event.phases is not None:
                    self._context.trace.engine_phases(event.phases)
            transcript = await self._job.transcript
        except AsrServeError as error:
            self._watch.finish(error)
            raise
        self._watch.note_latency(time.perf_counter() - self._ended_s)
        self._watch.finish()
        if self._sample_bytes is None:
            self._count(transcript.duration_samples)
        return transcript

    async def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
        self._spool.close()
        if self._job is not None:
            await self._job.wait_closed()
        self._resources.close()
