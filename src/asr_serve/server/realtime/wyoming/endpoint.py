"""Wyoming behind the middleware of all routes: limits, logs and metrics are those of a WebSocket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from asr_serve import __version__
from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.errors import NoSuchRoute
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.options import ListenOptions
from asr_serve.protocols.openai.speech import SpeechStyle
from asr_serve.protocols.stream.speech_messages import StartSpeech
from asr_serve.protocols.wyoming.events import PATH, WyomingModel, WyomingTranscribe, WyomingVoice, encode_info
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.endpoint import LiveDependencies, run_conversation
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.outbox import OUTBOX_SEND_TIMEOUT_S, Outbox
from asr_serve.server.realtime.wyoming.conversation import WyomingConversation
from asr_serve.server.tts.speech_session import SpeechSession
from asr_serve.server.tts.voice_catalog import VoiceCatalog, voice_languages
from asr_serve.text import languages

EXTENSION = "asr_serve.wyoming"
"""Extension of the scopes that the TCP server makes: nobody else comes in by this route."""


@admitted_as(AdmissionClass.LIVE)
class WyomingEndpoint:
    """ASGI app of the connections that the TCP server accepts."""

    def __init__(
        self,
        dependencies: LiveDependencies,
        voices: VoiceCatalog,
        begin_speech: Callable[[RequestContext, StartSpeech], SpeechSession],
    ) -> None:
        """`begin_speech` starts a speech. Raises what prevents it."""
        self._dependencies, self._voices, self._begin_speech = dependencies, voices, begin_speech
        self._meter = dependencies.metrics.live_route(PATH)
        config = dependencies.config
        self._limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if EXTENSION not in scope.get("extensions", {}):
            raise NoSuchRoute(
                "Wyoming is no WebSocket", "a TCP connection to the port of the setting wyoming_port", "connect there"
            )
        context = request_context(scope)
        models = CallerModels(self._dependencies.engines, context)
        conversation = WyomingConversation(
            receive,
            Outbox(send, OUTBOX_SEND_TIMEOUT_S),
            self._limits,
            describe=self._describe,
            open_listener=partial(self._open_listener, models, context),
            open_decoder=partial(create_live_decoder, "s16le"),
            open_speech=partial(self._open_speech, context),
            max_characters=self._dependencies.config.max_characters,
        )
        try:
            await run_conversation(conversation, self._dependencies.admission, context, receive, send)
        finally:
            context.synthesized_s = conversation.synthesized_s or None

    def _describe(self) -> bytes:
        engines = list(self._dependencies.engines)
        models = [
            WyomingModel(card.name, card.languages, card.kind, card.source, _url(card.hub))
            for engine in engines
            if not engine.is_tts
            for card in [engine.card]
        ]
        cards = {engine.name: engine.tts_card for engine in engines if engine.is_tts}
        voices = [
            WyomingModel(
                voice.name,
                voice_languages(card, voice.name),
                f"{voice.name} ({card.name})",
                card.source,
                _url(card.hub),
            )
            for voice in self._voices.list_voices()
            for card in [cards[voice.model]]
        ]
        return encode_info(__version__, models, voices)

    def _open_listener(
        self,
        models: CallerModels,
        context: RequestContext,
        requested: WyomingTranscribe,
        on_events: Callable[[list[LiveEvent]], None],
    ) -> AsyncListener:
        """Raises UnknownModel, ModelNotLoaded, EngineClosed, NotAllowed, OptionError."""
        language = languages.requested_language_code(requested.language)
        name = requested.name or self._recognizer_of(models, language)
        engine = models.get(name)
        context.model = engine.name
        options = ListenOptions(language=language, hotwords=requested.hotwords)
        return AsyncListener(
            engine.client,
            engine.tokenizer,
            options,
            self._meter,
            engine.in_use(),
            on_events,
            api_client=context.client.name if context.client else None,
            watch=models.watch(name, "live"),
        )

    def _recognizer_of(self, models: CallerModels, language: str | None) -> str | None:
        """Name of a loaded model for a language that the default one does not have: Home Assistant offers the languages
        of all, and names no model. None: the default one, also where a policy chooses. Raises as `CallerModels.get`."""
        engines = self._dependencies.engines
        if language is None or engines.governor is not None or language in models.get(None).card.languages:
            return None
        ready = (engine for engine in engines if not engine.is_tts and engine.state == "ready")
        return next((engine.name for engine in ready if language in engine.card.languages), None)

    def _open_speech(self, context: RequestContext, voice: WyomingVoice | None, ssml: bool) -> SpeechSession:
        """Raises as `SpeechSynthesizer.resolve`, UnsupportedOption for a language that nobody speaks."""
        name = voice.name if voice is not None else None
        model = None if name is None else self._voices.model_of(name)
        if voice is not None and name is None and voice.language is not None:
            model, name = self._voices.voice_speaking(voice.language)
        style = SpeechStyle(ssml=ssml)
        return self._begin_speech(context, StartSpeech(model=model, voice=name, words=False, style=style))


def _url(hub: str) -> str:
    return f"https://huggingface.co/{hub}" if hub else ""


def route(
    dependencies: LiveDependencies,
    voices: VoiceCatalog,
    begin_speech: Callable[[RequestContext, StartSpeech], SpeechSession],
) -> WebSocketRoute:
    return WebSocketRoute(PATH, WyomingEndpoint(dependencies, voices, begin_speech))
