"""Which front end reads for a voice."""

from __future__ import annotations

from collections.abc import Mapping

from asr_serve.models.card import VoiceCard
from asr_serve.text.spoken.front import Front
from asr_serve.text.spoken.normal import LANGUAGES
from asr_serve.values import unknown

BRITISH = frozenset(("alice", "emma", "isabella", "lily", "daniel", "fable", "george", "lewis"))
"""Of Kokoro's English voices, by which ours were taught; its own have the accent and the speaker before the name:
bf_emma."""
KOKORO = 3
"""Characters of that prefix."""


def language_of(voice: str) -> str:
    """What a voice was taught to say: en, or en-gb."""
    return "en-gb" if voice in BRITISH or (voice[:1] == "b" and voice[KOKORO:] in BRITISH) else "en"


def front_of(
    card: VoiceCard,
    voice: str | None = None,
    language: str | None = None,
    lexicon: Mapping[str, str] | None = None,
    *,
    max_characters: int | None = None,
) -> Front:
    """`language`: en or en-gb; None: the voice's own. `lexicon`: words and their phonemes, in the card's alphabet.

    What is large is loaded once for all; a third of a second the first time. Raises OptionError, UnknownPhoneme,
    ProgramMissing.
    """
    if language is not None and language not in LANGUAGES:
        raise unknown("language", str(language)[:20], LANGUAGES)
    spoken = language or language_of(voice or card.voices[0])
    bounds = {} if max_characters is None else {"max_characters": max_characters}
    return Front(card.alphabet, lexicon, british=spoken == "en-gb", max_phonemes=card.max_phonemes, **bounds)
