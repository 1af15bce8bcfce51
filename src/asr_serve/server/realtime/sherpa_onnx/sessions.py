"""Sessions of sherpa-onnx's clients: a live one, and the job of a recording."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asr_serve.audio.pcm import wav_header
from asr_serve.audio.reader import AudioLimits
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.protocols.sherpa_onnx.messages import HEADER_BYTES, RecordingHeader
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import ModelEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.recording_session import RecordingSession


class EngineSherpaSessionFactory:
    """Session factory of one socket."""

    def __init__(
        self,
        dependencies: LiveDependencies,
        models: CallerModels,
        model: str | None,
        context: RequestContext,
        meter: LiveRouteMetrics,
        options: ListenOptions,
    ) -> None:
        """`options`: those of live sessions, from the query."""
        self._dependencies, self._models, self._model, self._options = dependencies, models, model, options
        self._context, self._meter = context, meter
        self.max_duration_s, self.max_bytes = dependencies.config.max_duration_s, dependencies.config.max_body_bytes

    def start_live(self, on_events: Callable[[list[LiveEvent]], None]) -> AsyncListener:
        """Starts a live session. Raises AtCapacity, ModelNotLoaded, EngineClosed."""
        engine, client = self._engine(), self._context.client
        return AsyncListener(
            engine.client,
            engine.tokenizer,
            msgspec.structs.replace(self._options, words=None),
            self._meter,
            engine.in_use(),
            on_events,
            api_client=client.name if client else None,
            watch=self._models.watch(self._model, "live"),
        )

    def start_recording(self, header: RecordingHeader) -> RecordingSession:
        """Starts the session of a recording. Raises as `start_live` does."""
        engine = self._engine()
        return RecordingSession(
            self._dependencies.executor,
            engine,
            self._dependencies.admission.reserve_work(),
            TranscribeOptions(
                priority="interactive", words=None, limits=AudioLimits(max_duration_s=self.max_duration_s)
            ),
            self._context,
            self._meter,
            self._models.watch(self._model, "upload"),
            wav_header(header.rate_hz, format_tag=3, sample_bytes=4),
            None,
            header.size_bytes + 16 * HEADER_BYTES,
        )

    def _engine(self) -> ModelEngine:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        engine = self._models.get(self._model)
        self._context.model = engine.name
        return engine
