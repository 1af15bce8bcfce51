"""Sessions of FunASR's runtime protocol: a live one for `online` and `2pass`, and the job of a file for `offline`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from asr_serve.audio.pcm import SAMPLE_BYTES, is_wav_header, wav_header
from asr_serve.audio.reader import AudioLimits
from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.engine.client import EngineClient
from asr_serve.errors import UnsupportedOption
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.pipelines.prompting import hotword_bias, normalizes_text
from asr_serve.pipelines.segments import SegmentNormalizer, resolve_language
from asr_serve.protocols.funasr.runtime import PCM, RuntimeAnswers, RuntimeOptions
from asr_serve.protocols.funasr.websocket import FunAsrOptions
from asr_serve.server.caller_models import CallerModels, RequestWatch
from asr_serve.server.engine_registry import ModelEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.funasr.runtime_conversation import RuntimeSession
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.server.realtime.recording_session import RecordingSession
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import Transcript
from asr_serve.units import RATE_HZ


class RuntimeLiveSession:
    """RuntimeSession with a live listener. Belongs to the event loop's thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        runtime: RuntimeOptions,
        outbox: Outbox,
        meter: LiveRouteMetrics,
        lease: AbstractContextManager[None],
        *,
        api_client: str | None,
        watch: RequestWatch,
    ) -> None:
        """Raises as AsyncListener does."""
        self._outbox, self._answers = outbox, RuntimeAnswers(runtime)
        self._decoder = create_live_decoder("s16le", runtime.rate_hz)
        self._listener = AsyncListener(
            client, tokenizer, options, meter, lease, self._on_events, api_client=api_client, watch=watch
        )
        self.wait_writable, self.close = self._listener.wait_writable, self._listener.close

    @property
    def slice_bytes(self) -> int:
        return self._decoder.rate_hz

    @property
    def received_samples(self) -> int:
        return self._listener.received_samples

    @property
    def full(self) -> bool:
        return self._listener.full

    def write(self, data: bytes | memoryview) -> None:
        self._listener.write(self._decoder.decode(data))

    def finish(self) -> None:
        self._listener.write(self._decoder.finish())
        self._listener.finish()

    async def complete(self) -> None:
        await self._listener.run()

    def last_answer(self, *, is_end: bool) -> str:
        return self._answers.end(is_end=is_end)

    def _on_events(self, events: list[LiveEvent]) -> None:
        for event in events:
            match event:
                case LiveSegmentDone(segment):
                    for answer in self._answers.segment(segment):
                        self._outbox.send(answer)
                case LivePartial():
                    if words := self._answers.partial(event):
                        self._outbox.send(words)


class RuntimeOfflineSession(RecordingSession):
    """RuntimeSession with the job of a recording, which is decoded while it arrives."""

    slice_bytes = 1 << 20

    def __init__(self, runtime: RuntimeOptions, *arguments: object, **named: object) -> None:
        """Takes the arguments of RecordingSession after its own."""
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._answers = RuntimeAnswers(runtime)
        self._transcript: Transcript | None = None

    def write(self, pcm: bytes | memoryview) -> None:
        if self._job is None and is_wav_header(pcm):
            # FunASR's html5 page sends WAV files whole as samples: their header tells channels and rate
            self._header, self._sample_bytes = b"", None
        super().write(pcm)

    async def complete(self) -> None:
        self._transcript = await self.transcribe()

    def last_answer(self, *, is_end: bool) -> str:
        if self._transcript is None:
            return self._answers.end(is_end=is_end)
        return self._answers.whole(self._transcript.segments, self._transcript.text, is_end=is_end)


class EngineRuntimeSessionFactory:
    """Session factory of one socket: looks up the requested model for every session."""

    def __init__(
        self,
        dependencies: LiveDependencies,
        models: CallerModels,
        model: str | None,
        context: RequestContext,
        meter: LiveRouteMetrics,
        options: ListenOptions,
        defaults: FunAsrOptions,
    ) -> None:
        """`options`: those of live sessions, from the query. `defaults`: language and hotwords of sessions that send
        none, and speakers."""
        self._dependencies, self._models, self._model, self._options = dependencies, models, model, options
        self._context, self._meter, self._defaults = context, meter, defaults

    def validate(self, options: RuntimeOptions) -> None:
        engine = self._engine()
        resolve_language(engine.client, options.language)
        hotword_bias(engine.client, engine.tokenizer, options.hotwords)

    def start(self, options: RuntimeOptions, outbox: Outbox) -> RuntimeSession:
        engine, client = self._engine(), self._context.client
        if options.mode != "offline":
            return RuntimeLiveSession(
                engine.client,
                engine.tokenizer,
                msgspec.structs.replace(self._options, **self._pipeline_options(engine, options)),
                options,
                outbox,
                self._meter,
                engine.in_use(),
                api_client=client.name if client else None,
                watch=self._models.watch(self._model, "live"),
            )
        return RuntimeOfflineSession(
            options,
            self._dependencies.executor,
            engine,
            self._dependencies.admission.reserve_work(),
            TranscribeOptions(
                priority="interactive",
                limits=AudioLimits(max_duration_s=self._dependencies.config.max_duration_s),
                **self._pipeline_options(engine, options),
            ),
            self._context,
            self._meter,
            self._models.watch(self._model, "upload"),
            wav_header(options.rate_hz) if options.wav_format == PCM else b"",
            SAMPLE_BYTES if options.wav_format == PCM and options.rate_hz == RATE_HZ else None,
            self._dependencies.config.max_body_bytes,
        )

    def _pipeline_options(self, engine: ModelEngine, options: RuntimeOptions) -> dict[str, Any]:
        """Arguments of TranscribeOptions and ListenOptions."""
        language = options.language or self._defaults.language
        chosen = self._defaults.pipeline_options() | {
            "language": language,
            "hotwords": options.hotwords or self._defaults.hotwords,
            "words": None,
            "itn": _itn(engine, language, itn=options.itn),
        }
        if options.mode == "online":  # its text is final before it is known who says it
            chosen = {name: value for name, value in chosen.items() if "speakers" not in name}
        return chosen

    def _engine(self) -> ModelEngine:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        engine = self._models.get(self._model)
        self._context.model = engine.name
        return engine


def _itn(engine: ModelEngine, language: str | None, *, itn: bool) -> bool | None:
    """Returns whether numbers get their written form. FunASR's clients ask for it unless told otherwise: it has no
    effect where it is not possible."""
    if not itn:
        return False
    card = engine.client.card
    try:
        SegmentNormalizer(card.language(language), itn=normalizes_text(card, True))
    except UnsupportedOption:
        return None
    return True
