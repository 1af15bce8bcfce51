"""FunASR's WebSockets: `/` answers while audio arrives, `/ws` after its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import parse_qs

import msgspec
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.audio.pcm import wav_header
from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.governance.rollback_monitor import RequestKind
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.options import SPEAKER_COUNT_FIELDS, ListenOptions, TranscribeOptions
from asr_serve.pipelines.segments import resolve_language
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.funasr.websocket import FLAGS, FunAsrOptions
from asr_serve.server.caller_models import CallerModels, RequestWatch
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.server.middleware.admission import CALLER_FIELD, AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import (
    NORMAL_CLOSURE,
    close_websocket,
    live_error_event,
    runtime_error_event,
)
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.endpoint import LiveDependencies, run_conversation
from asr_serve.server.realtime.funasr.conversation import FunAsrConversation, FunAsrSession
from asr_serve.server.realtime.funasr.offline_session import FunAsrOfflineSession
from asr_serve.server.realtime.funasr.realtime_session import FunAsrRealtimeSession
from asr_serve.server.realtime.funasr.runtime_conversation import FunAsrRuntimeConversation
from asr_serve.server.realtime.funasr.runtime_session import EngineRuntimeSessionFactory
from asr_serve.server.realtime.funasr.session_defaults import FunAsrSessionDefaults, validate_options
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.realtime.sherpa_onnx.conversation import SherpaConversation
from asr_serve.server.realtime.sherpa_onnx.sessions import EngineSherpaSessionFactory

REALTIME_PATH, OFFLINE_PATH = "/", "/ws"
QUERY = ("model", "api_key", CALLER_FIELD, *FLAGS, *SPEAKER_COUNT_FIELDS)
REALTIME_QUERY = (*QUERY, "sentences", "partial_ms", "max_segment_ms", "silence_schedule")

StartFunAsrSession = Callable[[ModelEngine, FunAsrOptions, Outbox, RequestWatch], FunAsrSession]
"""Starts a session of a route, with answers into that outbox."""


class EngineFunAsrSessionFactory:
    """Session factory of one socket: looks up the requested model for every session."""

    def __init__(
        self,
        engines: EngineRegistry,
        model: str | None,
        context: RequestContext,
        begin: StartFunAsrSession,
        kind: RequestKind,
    ) -> None:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed, NotAllowed."""
        self.models, self._kind = CallerModels(engines, context), kind
        self._model, self._context, self._begin = model, context, begin
        _ = self.engine

    def resolve_language(self, code: str | None) -> str:
        language = resolve_language(self.engine.client, code)
        return "" if code is None and self.models.identifies_language(self._model) else language

    def validate(self, options: FunAsrOptions) -> None:
        validate_options(self.engine, options)

    def start(self, options: FunAsrOptions, outbox: Outbox) -> FunAsrSession:
        engine = self.engine
        return self._begin(engine, options, outbox, self.models.watch(self._model, self._kind))

    @property
    def engine(self) -> ModelEngine:
        """Engine of the requested model. Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        engine = self.models.get(self._model)
        self._context.model = engine.name
        return engine


def _listen_options(fields: FormFields) -> ListenOptions:
    """Options of live sessions that a query has. Raises OptionError."""
    partial_ms, schedule = fields.integer("partial_ms", 100, 60_000), fields.text("silence_schedule")
    return ListenOptions(
        partial_ms=ListenOptions().partial_ms if partial_ms is None else partial_ms,
        max_segment_ms=fields.integer("max_segment_ms", 1_000, 86_400_000),
        silence_schedule=None if schedule is None else SilenceSchedule.from_text(schedule),
    )


def _realtime(
    dependencies: LiveDependencies, fields: FormFields, context: RequestContext, meter: LiveRouteMetrics
) -> StartFunAsrSession:
    only_new = fields.choice("sentences", ("all", "new")) == "new"
    options = _listen_options(fields)

    def begin(engine: ModelEngine, requested: FunAsrOptions, outbox: Outbox, watch: RequestWatch) -> FunAsrSession:
        chosen = msgspec.structs.replace(options, **requested.pipeline_options())
        return FunAsrRealtimeSession(
            engine.client,
            engine.tokenizer,
            chosen,
            outbox,
            meter,
            engine.in_use(),
            only_new=only_new,
            api_client=context.client.name if context.client else None,
            watch=watch,
        )

    return begin


def _offline(
    dependencies: LiveDependencies, fields: FormFields, context: RequestContext, meter: LiveRouteMetrics
) -> StartFunAsrSession:
    def begin(engine: ModelEngine, options: FunAsrOptions, outbox: Outbox, watch: RequestWatch) -> FunAsrSession:
        chosen = TranscribeOptions(priority="interactive", **options.pipeline_options())
        return FunAsrOfflineSession(
            dependencies.executor,
            engine,
            dependencies.admission.reserve_work(),
            chosen,
            context,
            meter,
            watch,
            wav_header(),
        )

    return begin


@admitted_as(AdmissionClass.LIVE)
class FunAsrEndpoint:
    """ASGI app of one route: its WebSockets, accepted already."""

    def __init__(
        self,
        dependencies: LiveDependencies,
        path: str,
        session_s: float,
        fields: Sequence[str],
        begin: Callable[[LiveDependencies, FormFields, RequestContext, LiveRouteMetrics], StartFunAsrSession],
        defaults: FunAsrSessionDefaults,
    ) -> None:
        """`fields`: names that are allowed in the query."""
        self._kind: RequestKind = "live" if path == REALTIME_PATH else "upload"
        self._dependencies, self._fields, self._begin, self._defaults = dependencies, fields, begin, defaults
        self._meter = dependencies.metrics.live_route(path)
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, dependencies = request_context(scope), self._dependencies
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        fields = FormFields(query, self._fields)
        begin = self._begin(dependencies, fields, context, self._meter)
        factory = EngineFunAsrSessionFactory(dependencies.engines, fields.text("model"), context, begin, self._kind)
        defaults = self._defaults.apply(factory.engine, FunAsrOptions.from_query(fields))
        conversation = FunAsrConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            factory,
            self._limits,
            partial(live_error_event, request_id=context.request_id),
            defaults,
        )
        await run_conversation(conversation, dependencies.admission, context, receive, send)
        again = conversation.receive_again(receive)
        models, model, options = factory.models, fields.text("model"), _listen_options(fields)
        match conversation.other_protocol:
            case "runtime":
                runtime = FunAsrRuntimeConversation(
                    again,
                    Outbox(send, OUTBOX_SEND_TIMEOUT_S),
                    EngineRuntimeSessionFactory(dependencies, models, model, context, self._meter, options, defaults),
                    self._limits,
                    partial(runtime_error_event, request_id=context.request_id),
                )
                await run_conversation(runtime, dependencies.admission, context, receive, send)
            case "sherpa_online" | "sherpa_offline" as protocol:
                sherpa = SherpaConversation(
                    again,
                    Outbox(send, OUTBOX_SEND_TIMEOUT_S),
                    EngineSherpaSessionFactory(dependencies, models, model, context, self._meter, options),
                    self._limits,
                    partial(live_error_event, request_id=context.request_id),
                    live=protocol == "sherpa_online",
                )
                await run_conversation(sherpa, dependencies.admission, context, receive, send)
                if sherpa.completed:
                    await close_websocket(receive, send, NORMAL_CLOSURE)


def routes(dependencies: LiveDependencies, defaults: FunAsrSessionDefaults) -> list[WebSocketRoute]:
    """Returns the routes."""
    config = dependencies.config
    realtime = (dependencies, REALTIME_PATH, config.max_session_s, REALTIME_QUERY, _realtime, defaults)
    offline = (dependencies, OFFLINE_PATH, config.max_duration_s, QUERY, _offline, defaults)
    return [WebSocketRoute(each[1], FunAsrEndpoint(*each)) for each in (realtime, offline)]
