"""Choice of the text front end of a voice."""

from __future__ import annotations

from collections.abc import Mapping

from asr_serve.models.registry import TtsCard
from asr_serve.text.g2p.frontend import TextFrontend
from asr_serve.types import unknown_name_error


def frontend_for(
    card: TtsCard,
    voice: str | None = None,
    language: str | None = None,
    lexicon: Mapping[str, str] | None = None,
    *,
    max_characters: int | None = None,
) -> TextFrontend:
    """Returns the front end for `card`.

    `language`: one of the card's; None: the language of `voice`. `lexicon`: words and their phonemes, in the
    card's alphabet. Large resources are loaded once and shared; the first load takes a third of a second. Raises
    OptionError, UnknownPhoneme, ProgramMissing.
    """
    if language is not None and language not in card.languages:
        raise unknown_name_error("language", str(language)[:20], card.languages)
    resolved = language or card.language(voice)
    bounds = {} if max_characters is None else {"max_characters": max_characters}
    return TextFrontend(card.alphabet, lexicon, british=resolved == "en-gb", max_phonemes=card.max_phonemes, **bounds)


def preload_frontend(card: TtsCard) -> None:
    """Loads the dictionaries and rules of every language of a card, which would delay its first text by a second.

    Raises ProgramMissing.
    """
    for voice in {card.language(voice): voice for voice in card.voices}.values():
        next(frontend_for(card, voice).passages("One."))
