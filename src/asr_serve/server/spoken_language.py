"""Spoken language of requests that name neither a language nor a model, where several models are served: which model
identifies it, which one serves it, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec

from asr_serve.audio.input_manifest import InputItem
from asr_serve.audio.reader import AudioLimits, Source
from asr_serve.errors import OptionError
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.language_identification import LanguageIdentification, possible_itn
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.pipelines.offline.recording_language import PeekedReader, RecordingLanguage
from asr_serve.pipelines.offline.transcribe import Event, FileDone, TranscribeCanceller
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.text.tokenizers import Tokenizer


class SpokenLanguage:
    """Identification of the language of one request, or of one live session, that came for the default model. Belongs
    to the event loop's thread."""

    def __init__(
        self, engines: EngineRegistry, default: ModelEngine, identifier: ModelEngine, context: RequestContext
    ) -> None:
        self._engines, self.default, self.identifier, self._context = engines, default, identifier, context

    def model_for(self, language: str) -> ModelEngine:
        """Engine of the model that serves a language: the default model if it speaks it, else the first loaded model of
        that language alone, else the identifying model; the default one where none of them can."""
        return choose_model(language, self.default, self.identifier, self._engines)

    def tell(self, identification: LanguageIdentification) -> None:
        """Records what came of it, for the answer's headers, the log and the metrics."""
        context = self._context
        context.model, context.identified_language = identification.model, header_value(identification)
        self._engines.count_identification(identification.outcome, identification.language)

    def for_live(self, options: ListenOptions) -> SpokenLanguage | None:
        """Itself for a live session that is to be identified; None: its language is named, or it labels speakers,
        whose voices another model's session would not know."""
        return None if options.language or options.speakers else self


def choose_model(
    language: str, default: ModelEngine, identifier: ModelEngine, engines: Iterable[ModelEngine]
) -> ModelEngine:
    """Returns the engine of the model that serves a language, see `SpokenLanguage.model_for`."""
    if language in default.card.languages:
        return default
    ready = [engine for engine in engines if not engine.is_tts and engine.state == "ready"]
    own = (each for each in ready if not each.card.detects and language in each.card.languages)
    return next(own, identifier if identifier in ready and language in identifier.card.languages else default)


def header_value(identification: LanguageIdentification) -> str:
    """Value of the header x-identified-language.

    >>> header_value(LanguageIdentification("identified", "whisper-base", "de", 0.97312))
    'de;outcome=identified;probability=0.973'
    >>> header_value(LanguageIdentification("unsure", "moonshine-tiny-en"))
    'und;outcome=unsure'
    """
    told = f"{identification.language or 'und'};outcome={identification.outcome}"
    return f"{told};probability={identification.probability:.3f}" if identification.language else told


def options_in_language(options: TranscribeOptions, card: AsrCard, language: str) -> TranscribeOptions:
    """Options of a recording for the model of its language."""
    return msgspec.structs.replace(options, language=language, itn=possible_itn(card, language, options.itn))


class IdentifyingEngine:
    """FileEngine of recordings whose language is identified before they are transcribed. Until then, its tokenizer is
    that of the default model; its name and its card stay those."""

    def __init__(self, language: SpokenLanguage, engines: Iterable[ModelEngine]) -> None:
        """`engines`: all that are loaded."""
        self._language = language
        self._engines = [engine for engine in engines if not engine.is_tts]
        self._uses = {engine.name: ExitStack() for engine in self._engines}
        """Use of each engine by this recording."""
        self._chosen: ModelEngine = language.default
        self.identified = asyncio.Event()
        """Set once it is known, and told, which model serves the recording; or there is nothing to identify."""

    @property
    def name(self) -> str:
        return self._language.default.name

    @property
    def card(self) -> AsrCard:
        return self._language.default.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._chosen.tokenizer

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Holds all engines until one is chosen, then that one."""
        with ExitStack() as uses:
            for engine in self._engines:
                uses.enter_context(self._uses[engine.name]).enter_context(engine.in_use())
            yield

    def _set_identified(self) -> None:
        for name, use in self._uses.items():
            if name != self._chosen.name:
                use.close()
        self.identified.set()

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions, stop: TranscribeCanceller
    ) -> Generator[Event, None, None]:
        """Transcribes one item, as FileEngine does."""
        (item,) = items
        default = self._language.default
        plain = default.events([item], options, stop)  # raises OptionError for what the default model cannot do
        if options.language or options.task != "transcribe":
            self._set_identified()
            return plain
        plain.close()
        return self._events(item, options, stop, asyncio.get_running_loop())

    def _events(
        self, item: InputItem, options: TranscribeOptions, stop: TranscribeCanceller, loop: asyncio.AbstractEventLoop
    ) -> Generator[Event, None, None]:
        # Around the identification, too: a thread that reads ahead waits for ever for a reader that nobody closes.
        with closing(PeekedReader(item.source, options.limits, lambda: stop.awake.put(None))) as reader:
            try:
                identification, stream = self._identify(item, options, stop, reader)
                loop.call_soon_threadsafe(self._language.tell, identification)
            finally:
                loop.call_soon_threadsafe(self._set_identified)
            with closing(stream):
                for event in stream:
                    if isinstance(event, FileDone) and identification.outcome == "identified":
                        probability = event.transcript.language_prob or identification.probability
                        transcript = msgspec.structs.replace(event.transcript, language_prob=probability)
                        event = msgspec.structs.replace(event, transcript=transcript)
                    yield event

    def _identify(
        self, item: InputItem, options: TranscribeOptions, stop: TranscribeCanceller, reader: PeekedReader
    ) -> tuple[LanguageIdentification, Generator[Event, None, None]]:
        """Identifies the language; returns what came of it and the events of the model that serves it."""

        def open_peeked(source: Source, limits: AudioLimits, wake: Callable[[], None]) -> AudioReader:
            return reader

        spoken = self._language
        identification = RecordingLanguage(spoken.identifier.client, reader, stop, options.priority)
        outcome, language, probability = identification.identify()
        if outcome == "identified":
            engine = choose_model(language, spoken.default, spoken.identifier, self._engines)
            try:
                chosen = options_in_language(options, engine.card, language)
                stream = engine.events([item], chosen, stop, open_peeked)
                self._chosen = engine
                return LanguageIdentification(outcome, engine.name, language, probability), stream
            except OptionError:
                outcome = "refused"
        stream = spoken.default.events([item], options, stop, open_peeked)
        return LanguageIdentification(outcome, self.name, language, probability), stream
