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
from asr_serve.protocols.fields import Fields
from asr_serve.protocols.openai import Spell
from asr_serve.protocols.openai_realtime import BETA_HEADER, BETA_SUBPROTOCOL, PATH, Settings
from asr_serve.protocols.openai_realtime_items import Voice
from asr_serve.server.engines import Engine, Engines
from asr_serve.server.layers.replies import problem_in_realtime
from asr_serve.server.layers.visits import Visit, visit_of
from asr_serve.server.live.caller import Caller
from asr_serve.server.live.life import Limits
from asr_serve.server.live.openai import Conversation
from asr_serve.server.live.outbox import SEND_S, Outbox
from asr_serve.server.sockets import Desk, carry

QUERY = ("model", "intent", "api_key", "partials")


class Microphone:
    """The Ears of one socket."""

    def __init__(self, engines: Engines, visit: Visit, meter: LiveRouteMetrics) -> None:
        self._engines, self._visit, self._meter = engines, visit, meter

    def expect(self, settings: Settings) -> str:
        engine = self._engine(settings)
        resolve_language(engine.client, settings.language)
        options = settings.listen(engine.client.turn_model)
        prompt_tokens(engine.client, engine.tokenizer, options.prompt)
        hotword_bias(engine.client, engine.tokenizer, options.hotwords)
        return engine.name

    def begin(self, settings: Settings, hear: Callable[[list[LiveEvent]], None]) -> tuple[Caller, Spell]:
        engine = self._engine(settings)
        options = settings.listen(engine.client.turn_model)
        caller = Caller(engine.client, engine.tokenizer, options, self._meter, engine.used(), hear)
        return caller, engine.tokenizer.decode

    def _engine(self, settings: Settings) -> Engine:
        engine = self._engines.get(settings.model)
        self._visit.model = engine.name
        return engine


class Line:
    """ASGI: the WebSockets of this route, accepted already."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._meter = desk, desk.metrics.live_route(PATH)
        config = desk.config
        self._limits = Limits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit, desk = visit_of(scope), self._desk
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        fields = Fields(query, QUERY)
        if (intent := fields.text("intent")) not in (None, "transcription"):
            raise UnsupportedOption(
                f"intent={intent} is not supported",
                "this server transcribes only",
                "ask for intent=transcription",
                param="intent",
            )
        talk = Conversation(
            receive,
            Outbox(send, SEND_S),
            Microphone(desk.engines, visit, self._meter),
            self._limits,
            partial(problem_in_realtime, request_id=visit.request_id),
            Voice(beta=_beta(scope)),
            Settings.of(fields.text("model")),
            partials=fields.flag("partials") or False,
        )
        await carry(talk, desk.gate, visit, receive, send)


def _beta(scope: Scope) -> bool:
    """Whether the client speaks as before."""
    header = Headers(scope=scope).get("openai-beta", "")
    return BETA_HEADER in header or BETA_SUBPROTOCOL in scope.get("subprotocols", ())


def route(desk: Desk) -> WebSocketRoute:
    return WebSocketRoute(PATH, Line(desk))
