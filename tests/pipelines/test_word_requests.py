"""Words with times are what a model has: named where they are demanded, left out where a format only shows them."""

from __future__ import annotations

import json

import pytest

from asr_serve.errors import UnsupportedOption
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.segments import requests_words
from asr_serve.protocols.funasr import asr
from asr_serve.protocols.openai.transcription_form import parse_transcription_form
from asr_serve.protocols.openai.transcription_response import render_verbose_json
from asr_serve.types import Segment, Transcript, Word

TIMED, UNTIMED = asr_card("moonshine-tiny-en"), asr_card("glm-asr-nano")


@pytest.mark.parametrize("speakers", [False, True])
def test_what_is_requested_of_a_model(speakers: bool) -> None:
    for words, of_timed in ((True, True), (None, True), (False, speakers)):
        assert requests_words([TIMED], words, speakers=speakers) is of_timed
    for words in (None, False):
        assert requests_words([UNTIMED], words, speakers=speakers) is False
        assert requests_words([UNTIMED, TIMED], words, speakers=speakers) is (words is None or speakers)
    for cards in ([UNTIMED], [TIMED, UNTIMED]):
        with pytest.raises(UnsupportedOption, match="glm-asr-nano has no times of words") as refused:
            requests_words(cards, True, speakers=speakers)
        assert refused.value.param == "words"


SAID = Segment(0, 16_000, "Ada", words=(Word("Ada", 1_600, 8_000, 0.5),))
UNSAID = Segment(0, 16_000, "Ada")


@pytest.mark.parametrize(("sent", "shows"), [({}, True), ({"timestamp": ["false"]}, False)])
def test_asr_answers_have_the_words_that_there_are(sent: dict[str, list[str]], shows: bool) -> None:
    request = asr.parse_asr_form(sent, complete=True)
    for segment, has in ((SAID, shows), (UNSAID, False)):
        transcript = Transcript("a", "Ada", "en", 16_000, [segment] if shows else [UNSAID], "m")
        (found,) = json.loads(asr.render_asr_answer(transcript, request, 0.1))["segments"]
        assert ("words" in found) is has


def test_verbose_json_has_the_words_that_there_are() -> None:
    request = parse_transcription_form({"response_format": ["verbose_json"]}, complete=True)
    for segment, has in ((SAID, True), (UNSAID, False)):
        transcript = Transcript("a", "Ada", "en", 16_000, [segment], "m")
        (found,) = render_verbose_json(transcript, request)["segments"]
        assert ("words" in found) is has


def test_options_take_three_values() -> None:
    assert [TranscribeOptions(words=words).words for words in (True, None, False)] == [True, None, False]
