"""Catalog of voices: speech models, and their voices under every name that clients use."""

from __future__ import annotations

from collections.abc import Mapping

from asr_serve.errors import UnknownVoice, UnsupportedOption
from asr_serve.models.registry import TtsCard
from asr_serve.protocols.deepgram.models import is_deepgram_voice
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.openai.models import is_openai_speech_model
from asr_serve.protocols.openai.speech import VoiceEntry
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.types import suggest_name
from asr_serve.voices.voice_store import VoiceStore

OPENAI_VOICES = {
    "alloy": "alloy",
    "echo": "echo",
    "fable": "fable",
    "nova": "nova",
    "onyx": "onyx",
    "ash": "adam",
    "ballad": "fable",
    "cedar": "michael",
    "coral": "bella",
    "marin": "heart",
    "sage": "sarah",
    "shimmer": "aoede",
    "verse": "liam",
}
"""OpenAI's voices, each with the nearest of ours. A model without that one uses its first voice."""
MAX_LISTED_VOICES = 50
"""Cloned voices that an error message lists."""


def speaks(card: TtsCard, voice: str, language: str) -> bool:
    """Returns whether a voice of a model speaks a language, a code like de or en-GB. A voice without a country speaks
    the language of each, one with a country that one alone, and the language without any."""
    tag = _language_tag(language)
    return any(own in (tag, tag.partition("-")[0]) or own.startswith(f"{tag}-") for own in voice_languages(card, voice))


def _language_tag(language: str) -> str:
    return language.strip().replace("_", "-").lower()


def voice_languages(card: TtsCard, voice: str) -> tuple[str, ...]:
    """Languages of a voice: its own one, or those of a model whose voices are not told apart by it."""
    own = card.language(voice)
    return (own,) if own in card.languages else card.languages


class VoiceCatalog:
    """Speech models and voices by name. Belongs to the event loop's thread."""

    def __init__(self, engines: EngineRegistry, store: VoiceStore, aliases: Mapping[str, str]) -> None:
        """`store`: cloned voices. `aliases`: alias -> voice, after the voices' own names."""
        self._engines, self._store, self._aliases = engines, store, aliases

    def engine(self, model: str | None) -> ModelEngine:
        """Engine of the model of that name, or the server's own. Raises UnknownModel, ModelNotLoaded, WrongModel,
        EngineClosed."""
        return self._engines.get_tts(model)

    def model_and_voice(self, name: str | None) -> tuple[str | None, str | None]:
        """Model and voice of a name that may be either; None: the default, as Deepgram's voices are unless they
        are aliases."""
        if name is None or (is_deepgram_voice(name) and name not in self._aliases):
            return None, None
        is_model = is_openai_speech_model(name) or self._engines.without_alias(name) in self._engines.known_models()
        return (name, None) if is_model and name not in self._aliases else (None, name)

    def voice_speaking(self, language: str, model: str | None = None) -> tuple[str, str]:
        """Model and voice for a language, a code like de or en-GB: the first voice whose own language that is, else
        the first that speaks it, of all models or of `model`. Raises UnsupportedOption, and as `engine`."""
        cards = [engine.tts_card for engine in self._engines if engine.is_tts and model is None]
        cards = cards or [self.engine(model).tts_card]
        voices = [(card, voice) for card in cards for voice in card.voices]
        for card, voice in voices:
            if _language_tag(language) in voice_languages(card, voice):
                return card.name, voice
        for card, voice in voices:
            if speaks(card, voice, language):
                return card.name, voice
        raise UnsupportedOption(
            f"no voice speaks {language[:40]!r}",
            f"languages: {', '.join(sorted({each for card in cards for each in card.languages}))}",
            "name one of these, or one of the voices that are listed",
            param="language",
        )

    def model_of(self, voice: str) -> str | None:
        """Name of the first model with a voice of that name of its own; None: of none, though it may be an alias."""
        return next((each.model for each in self.list_voices() if each.name == voice), None)

    def voice(self, card: TtsCard, name: str | None) -> str:
        """Resolves a voice to its own name. Reads a folder if the model supports cloning. Raises UnknownVoice."""
        if name is None:
            return card.voices[0]
        own = self._aliases.get(name, name)
        for candidate in (name, own):
            if candidate in card.voices:
                return candidate
        cloned = self._cloned(card)
        for candidate in (name, own):
            if candidate in cloned:
                return candidate
        if name in OPENAI_VOICES and name not in self._aliases:
            return OPENAI_VOICES[name] if OPENAI_VOICES[name] in card.voices else card.voices[0]
        raise UnknownVoice(
            f"{card.name} has no voice {quote_for_message(name)}",
            f"voices: {', '.join((*card.voices, *cloned[:MAX_LISTED_VOICES]))}",
            suggest_name(name, [*card.voices, *cloned, *self._aliases, *OPENAI_VOICES])
            or "GET /v1/audio/voices lists them",
            param="voice",
        )

    def list_voices(self) -> list[VoiceEntry]:
        """Voices of the loaded models, in the order of loading. Reads a folder."""
        return [
            VoiceEntry(name, name, engine.name, name == engine.tts_card.voices[0], name not in own)
            for engine in self._engines
            if engine.is_tts
            for own in [engine.tts_card.voices]
            for name in (*own, *self._cloned(engine.tts_card))
        ]

    def _cloned(self, card: TtsCard) -> list[str]:
        """Names of the voices cloned for the model."""
        return [voice.name for voice in self._store.cards() if voice.model == card.name] if card.clones else []
