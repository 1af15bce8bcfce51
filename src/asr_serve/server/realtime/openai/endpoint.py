"""OpenAI Realtime's WebSocket, `/v1/realtime`: transcription sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.errors import UnsupportedOption
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.prompting import hotword_bias, prompt_tokens
from asr_serve.pipelines.segments import resolve_language
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.openai.events import TokenTexts
from asr_serve.protocols.openai.realtime_client_events import BETA_HEADER, BETA_SUBPROTOCOL, PATH, RealtimeSettings
from asr_serve.protocols.openai.realtime_server_events import ServerEventEncoder
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.server.middleware.admission import CALLER_FIELD, AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import realtime_problem
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import LiveDependencies, run_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.openai.conversation import OpenAiConversation
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox

QUERY = ("model", "intent", "api_key", CALLER_FIELD, "partials")


class EngineRealtimeSessionFactory:
    """Session factory of one socket."""

    def __init__(self, engines: EngineRegistry, context: RequestContext, meter: LiveRouteMetrics) -> None:
        self._models, self._visit, self._meter = CallerModels(engines, context), context, meter

    def validate(self, settings: RealtimeSettings) -> str:
        engine = self._engine(settings)
        resolve_language(engine.client, settings.language)
        options = settings.listen_options(engine.client.turn_model)
        prompt_tokens(engine.client, engine.tokenizer, options.prompt)
        hotword_bias(engine.client, engine.tokenizer, options.hotwords)
        return engine.name

    def start(
        self, settings: RealtimeSettings, on_events: Callable[[list[LiveEvent]], None]
    ) -> tuple[AsyncListener, TokenTexts]:
        engine = self._engine(settings)
        options = settings.listen_options(engine.client.turn_model)
        listener = AsyncListener(
            engine.client,
            engine.tokenizer,
            options,
            self._meter,
            engine.in_use(),
            on_events,
            api_client=self._visit.client.name if self._visit.client else None,
            watch=self._models.watch(settings.model, "live"),
        )
        return listener, listener.decode_tokens

    def _engine(self, settings: RealtimeSettings) -> ModelEngine:
        engine = self._models.get(settings.model)
        self._visit.model = engine.name
        return engine


@admitted_as(AdmissionClass.LIVE)
class OpenAiRealtimeEndpoint:
    """ASGI app of this route: its WebSockets, accepted already."""

    def __init__(self, dependencies: LiveDependencies) -> None:
        self._dependencies, self._meter = dependencies, dependencies.metrics.live_route(PATH)
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, dependencies = request_context(scope), self._dependencies
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        fields = FormFields(query, QUERY)
        if (intent := fields.text("intent")) not in (None, "transcription"):
            raise UnsupportedOption(
                f"intent={intent} is not supported",
                "this server transcribes only",
                "ask for intent=transcription",
                param="intent",
            )
        conversation = OpenAiConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            EngineRealtimeSessionFactory(dependencies.engines, context, self._meter),
            self._limits,
            partial(realtime_problem, request_id=context.request_id),
            ServerEventEncoder(beta=_uses_beta_shape(scope)),
            RealtimeSettings.initial(fields.text("model")),
            partials=fields.flag("partials") or False,
        )
        await run_conversation(conversation, dependencies.admission, context, receive, send)


def _uses_beta_shape(scope: Scope) -> bool:
    """Returns whether the client uses the shapes of the beta API."""
    header = Headers(scope=scope).get("openai-beta", "")
    return BETA_HEADER in header or BETA_SUBPROTOCOL in scope.get("subprotocols", ())


def route(dependencies: LiveDependencies) -> WebSocketRoute:
    return WebSocketRoute(PATH, OpenAiRealtimeEndpoint(dependencies))
