"""Choice of a voice by its language, over the cards of several models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asr_serve.errors import UnsupportedOption
from asr_serve.models.registry import tts_card
from asr_serve.server.tts.voice_catalog import VoiceCatalog, speaks, voice_languages
from asr_serve.voices.voice_store import VoiceStore

KOKORO, HIBARI, JOE = (tts_card(name) for name in ("kokoro", "hibari", "piper-joe"))
AMERICAN, BRITISH = KOKORO.voices[0], KOKORO.british[0]


class LoadedModels(list[Any]):
    """Models as the registry of engines lists them; the first is the server's own."""

    def get_tts(self, name: str | None) -> Any:
        return next(each for each in self if name in (None, each.name))

    def known_models(self) -> list[str]:
        return [each.name for each in self]

    def without_alias(self, name: str) -> str:
        return name


def catalog(folder: Path, *cards: Any) -> VoiceCatalog:
    engines = LoadedModels(SimpleNamespace(name=card.name, is_tts=True, tts_card=card) for card in cards)
    return VoiceCatalog(cast(Any, engines), VoiceStore(folder), {})


@pytest.mark.parametrize(
    ("cards", "language", "found"),
    [
        ((HIBARI, KOKORO), "en-GB", (KOKORO.name, BRITISH)),  # the tag itself, of whatever model
        ((JOE, KOKORO), "en_GB", (KOKORO.name, BRITISH)),
        ((HIBARI, KOKORO), "en", (HIBARI.name, HIBARI.voices[0])),
        ((KOKORO, HIBARI), "en-US", (KOKORO.name, AMERICAN)),
        ((HIBARI,), "en-GB", (HIBARI.name, HIBARI.voices[0])),  # no country of its own
        ((JOE,), "en-GB", (JOE.name, JOE.voices[0])),
    ],
)
def test_a_voice_is_chosen_by_its_language(
    tmp_path: Path, cards: tuple[Any, ...], language: str, found: tuple[str, str]
) -> None:
    assert catalog(tmp_path, *cards).voice_speaking(language) == found


def test_a_voice_speaks_its_own_language_and_not_all_of_its_models() -> None:
    assert voice_languages(KOKORO, AMERICAN) == ("en",)
    assert voice_languages(KOKORO, BRITISH) == ("en-gb",)
    assert voice_languages(HIBARI, "a cloned one") == HIBARI.languages


def test_a_voice_of_a_named_model_is_chosen_by_its_language(tmp_path: Path) -> None:
    voices = catalog(tmp_path, HIBARI, KOKORO)
    assert voices.voice_speaking("en-GB", HIBARI.name) == (HIBARI.name, HIBARI.voices[0])
    assert voices.voice_speaking("en-GB", KOKORO.name) == (KOKORO.name, BRITISH)


def test_a_language_that_nobody_speaks_is_refused(tmp_path: Path) -> None:
    voices = catalog(tmp_path, HIBARI, KOKORO)
    for language in ("de", "de-DE", "e", "eng", ""):
        with pytest.raises(UnsupportedOption, match="languages: en, en-gb") as refused:
            voices.voice_speaking(language)
        assert refused.value.param == "language"


@pytest.mark.parametrize(
    ("voice", "languages", "others"),
    [
        (AMERICAN, ("en", "en-US", "en-AU", "en-GB", "EN_us"), ("de", "de-DE")),
        (BRITISH, ("en", "en-GB", "en_gb"), ("en-US", "en-AU", "de")),
    ],
)
def test_languages_of_a_voice(voice: str, languages: tuple[str, ...], others: tuple[str, ...]) -> None:
    assert all(speaks(KOKORO, voice, language) for language in languages)
    assert not any(speaks(KOKORO, voice, language) for language in others)
