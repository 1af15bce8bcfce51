"""Deepgram's WebSocket `/v1/listen`: text while audio arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.options import ListenOptions
from asr_serve.pipelines.prompting import hotword_bias
from asr_serve.pipelines.segments import check_diarization, resolve_language
from asr_serve.protocols.deepgram.listen_query import LISTEN_PATH, ListenQuery, parse_listen_query
from asr_serve.protocols.deepgram.live_messages import ListenResultsEncoder
from asr_serve.protocols.form_fields import errors_named_by_field
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import ModelEngine
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import NORMAL_CLOSURE, close_websocket, live_error_event
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.deepgram.conversation import DeepgramListenConversation
from asr_serve.server.realtime.endpoint import LiveDependencies, run_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox


class EngineListenSessionFactory:
    """Session factory of one socket."""

    def __init__(
        self,
        models: CallerModels,
        engine: ModelEngine,
        query: ListenQuery,
        context: RequestContext,
        meter: LiveRouteMetrics,
    ) -> None:
        """Raises OptionError for options that the model or the server does not support."""
        client = engine.client
        resolve_language(client, query.language)
        hotword_bias(client, engine.tokenizer, query.hotwords)
        if query.diarize:
            check_diarization(client)
        itn, self.without_effect = query.formatting(client.card)
        self._options: ListenOptions = query.listen_options(itn)
        self._models, self._engine, self._query = models, engine, query
        self._context, self._meter = context, meter

    def start(self, on_events: Callable[[list[LiveEvent]], None]) -> AsyncListener:
        engine, client = self._engine, self._context.client
        return AsyncListener(
            engine.client,
            engine.tokenizer,
            self._options,
            self._meter,
            engine.in_use(),
            on_events,
            api_client=client.name if client else None,
            watch=self._models.watch(self._query.model, "live"),
        )


@admitted_as(AdmissionClass.LIVE)
class DeepgramListenEndpoint:
    """ASGI app of this route: its WebSockets, accepted already."""

    def __init__(self, dependencies: LiveDependencies) -> None:
        self._dependencies, self._meter = dependencies, dependencies.metrics.live_route(LISTEN_PATH)
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, dependencies = request_context(scope), self._dependencies
        query = parse_listen_query(scope["query_string"].decode("latin-1"), live=True)
        models = CallerModels(dependencies.engines, context)
        engine = models.get(query.model)
        context.model = engine.name
        with errors_named_by_field(query.option_to_field):
            factory = EngineListenSessionFactory(models, engine, query, context, self._meter)
        ignored = (*query.ignored, *factory.without_effect)
        context.ignored.add(ignored)
        conversation = DeepgramListenConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            factory,
            self._limits,
            partial(live_error_event, request_id=context.request_id, path=LISTEN_PATH),
            query,
            ListenResultsEncoder(query, engine.name, context.request_id),
            self._meter,
            ignored,
        )
        await run_conversation(conversation, dependencies.admission, context, receive, send)
        if conversation.completed:
            await close_websocket(receive, send, NORMAL_CLOSURE)


def route(dependencies: LiveDependencies) -> WebSocketRoute:
    return WebSocketRoute(LISTEN_PATH, DeepgramListenEndpoint(dependencies))
