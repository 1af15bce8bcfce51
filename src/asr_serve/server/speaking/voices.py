"""Who speaks: the models that have a voice, and their voices by every name that clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asr_serve.errors import UnknownVoice
from asr_serve.models.card import VoiceCard
from asr_serve.protocols.fields import shown
from asr_serve.protocols.speech.openai import VoiceEntry
from asr_serve.text.spoken.front import Front
from asr_serve.values import nearest

if TYPE_CHECKING:
    from asr_serve.server.engines import Engine, Engines

OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15")
"""OpenAI's names for a model that speaks: here they are the server's own, unless an alias says otherwise."""
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
"""OpenAI's voices, and which of ours is nearest. A model that has not that speaks with its first."""


def warm(card: VoiceCard) -> None:
    """Load what texts are read by: of the first text it would take a second. Raises ProgramMissing."""
    next(Front(card.alphabet).passages("One."))


class Voices:
    """Belongs to the event loop's thread."""

    def __init__(self, engines: Engines, models: Mapping[str, str], aliases: Mapping[str, str]) -> None:
        """`models`: alias -> model. `aliases`: alias -> voice; a voice's own name comes before them."""
        self._engines, self._models, self._aliases = engines, models, aliases

    def engine(self, model: str | None) -> Engine:
        """Of the model by that name, or the server's own. Raises UnknownModel, ModelNotLoaded, WrongModel,
        EngineClosed."""
        if model in OPENAI_MODELS and model not in self._engines.known() and model not in self._models:
            model = None
        return self._engines.voice(model)

    def voice(self, card: VoiceCard, name: str | None) -> str:
        """The voice's own name. Raises UnknownVoice."""
        if name is None:
            return card.voices[0]
        for found in (name, self._aliases.get(name, name)):
            if found in card.voices:
                return found
        if name in OPENAI_VOICES and name not in self._aliases:
            return OPENAI_VOICES[name] if OPENAI_VOICES[name] in card.voices else card.voices[0]
        names = [*card.voices, *self._aliases, *OPENAI_VOICES]
        raise UnknownVoice(
            f"voice={shown(name)}, which {card.name} has not",
            f"voices: {', '.join(card.voices)}",
            nearest(name, names) or "GET /v1/audio/voices lists them",
            param="voice",
        )

    def every(self) -> list[VoiceEntry]:
        """Of the models that are loaded, the server's own first."""
        loaded = [engine for engine in self._engines if engine.speaks]
        return [
            VoiceEntry(name, name, engine.name, name == engine.voice_card.voices[0])
            for engine in loaded
            for name in engine.voice_card.voices
        ]
