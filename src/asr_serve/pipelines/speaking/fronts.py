"""Which front end reads for a voice."""

from __future__ import annotations

from collections.abc import Mapping

from asr_serve.models.card import VoiceCard
from asr_serve.text.spoken.front import Front
from asr_serve.values import unknown


def front_of(
    card: VoiceCard,
    voice: str | None = None,
    language: str | None = None,
    lexicon: Mapping[str, str] | None = None,
    *,
    max_characters: int | None = None,
) -> Front:
    """`language`: one of the card's; None: the voice's own. `lexicon`: words and their phonemes, in
    the card's alphabet.

    What is large is loaded once for all; a third of a second the first time. Raises OptionError, UnknownPhoneme,
    ProgramMissing.
    """
    if language is not None and language not in card.languages:
        raise unknown("language", str(language)[:20], card.languages)
    spoken = language or card.language(voice)
    bounds = {} if max_characters is None else {"max_characters": max_characters}
    return Front(card.alphabet, lexicon, british=spoken == "en-gb", max_phonemes=card.max_phonemes, **bounds)
