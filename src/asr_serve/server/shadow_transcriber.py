"""Shadow: uploads that the candidate of a route transcribes too, after their callers have their text."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import NamedTuple

import msgspec

from asr_serve.errors import AsrServeError, OptionError
from asr_serve.governance.routing import RoutedModel, is_sampled
from asr_serve.governance.word_differences import word_differences
from asr_serve.metrics import ServerMetrics
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.server.caller_models import is_model_failure
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.uploads.upload import Upload

log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Uploads that wait for the candidate. Each is kept until then, at its end on disk."""
MAX_UPLOAD_BYTES = 64 << 20
"""Largest upload that is kept for a shadow."""


class ShadowJob(NamedTuple):
    """An upload that was answered, and waits for the candidate."""

    routed: RoutedModel
    candidate: str
    upload: Upload
    options: TranscribeOptions
    text: str
    """Transcript of the stable model."""


class ShadowTranscriber:
    """Transcribes uploads by candidates, one at a time and with the least priority, and counts the words that differ.
    Its texts go nowhere. Belongs to the event loop's thread."""

    def __init__(self, engines: EngineRegistry, executor: TranscriptionExecutor, metrics: ServerMetrics) -> None:
        self._engines, self._executor, self._metrics = engines, executor, metrics
        self._waiting: deque[ShadowJob] = deque()
        self._worker: asyncio.Task[None] | None = None

    def offer(
        self, routed: RoutedModel | None, request_id: str, upload: Upload, options: TranscribeOptions, text: str
    ) -> bool:
        """Takes over an upload that was answered, if its route has a shadow that is due. False: it has none, or the
        shadow is busy; the upload stays with its owner."""
        governor = self._engines.governor
        if routed is None or governor is None or (candidate := governor.shadow_of(routed)) is None:
            return False
        if not is_sampled(routed.route, request_id, governor.policy.routes[routed.route].rollout.shadow_percent):
            return False
        if len(self._waiting) >= MAX_WAITING or upload.received_bytes > MAX_UPLOAD_BYTES:
            self._metrics.governance.shadow_dropped.labels(routed.route).inc()
            return False
        self._waiting.append(ShadowJob(routed, candidate, upload, options, text))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return True

    async def close(self) -> None:
        """Ends the job in progress, and drops those that wait."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        while self._waiting:
            self._waiting.popleft().upload.close()

    async def _work(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            try:
                await self._transcribe(job)
            except Exception:  # those that wait are still transcribed, and their uploads freed
                log.exception("an upload for the shadow %s ended in an error", job.candidate)
                self._metrics.governance.shadow_dropped.labels(job.routed.route).inc()
            finally:
                job.upload.close()

    async def _transcribe(self, job: ShadowJob) -> None:
        governor = self._engines.governor
        assert governor is not None
        options = msgspec.structs.replace(job.options, priority="bulk")
        try:
            engine = self._engines.get(job.candidate)
            with engine.in_use():
                running = self._executor.start(engine, job.upload.open_bytes(), options, job.upload.filename)
                try:
                    transcript = await running.transcript
                finally:
                    running.cancel()
                    await running.wait_closed()
        except OptionError as error:  # what the stable model can do, and this one cannot
            log.info("the shadow %s was not given an upload: %s", job.candidate, error)
            self._metrics.governance.shadow_dropped.labels(job.routed.route).inc()
            return
        except AsrServeError as error:
            log.warning("the shadow %s failed on an upload: %s", job.candidate, error)
            if is_model_failure(error):
                governor.record_shadow(job.routed, 0, 0, failed=True)
            return
        found = await asyncio.to_thread(word_differences, job.text, transcript.text)
        if found is None:
            self._metrics.governance.shadow_dropped.labels(job.routed.route).inc()
            return
        governor.record_shadow(job.routed, found.words, found.differences, failed=False)
