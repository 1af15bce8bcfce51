"""POST /v1/audio/translations: with OpenAI's client against a model that cannot, and what an answer looks like."""

from __future__ import annotations

import json

import openai
import pytest
from running_server import MODEL

from asr_serve.errors import OptionError
from asr_serve.models.registry import asr_card, asr_cards
from asr_serve.protocols.openai.transcription_form import parse_translation_form
from asr_serve.protocols.openai.transcription_response import render_transcription
from asr_serve.types import Segment, Transcript

ROUTE = "/v1/audio/translations"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's word for gpt-4o's models
def test_a_model_that_cannot_says_so(server, beckett):
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai().audio.translations.create(model=MODEL, file=beckett)
    problem = refused.value.body
    assert (problem["code"], problem["param"]) == ("unsupported_option", "task")
    assert "can only transcribe" in problem["message"]


def test_what_a_transcription_takes_and_a_translation_does_not(server, beckett):
    answer = server.http.post(ROUTE, files={"file": beckett.read_bytes()}, data={"promtp": "x"})
    problem = answer.json()["error"]
    assert (answer.status_code, problem["param"]) == (400, "promtp")
    assert "prompt, response_format, temperature" in problem["message"]


def test_a_form_becomes_what_is_asked():
    asked = parse_translation_form(
        {"temperature": ["0.4"], "response_format": ["srt"], "vad": ["false"]}, complete=True
    )
    assert (asked.options.task, asked.options.language, asked.options.temperatures) == ("translate", None, (0.4,))
    assert (asked.response_format, asked.options.vad, asked.stream) == ("srt", False, False)
    read = parse_translation_form({"prompt": ["Said."], "hotwords": ["Ada,Bob"], "beam": ["5"]}, complete=True).options
    assert (read.prompt, read.hotwords, read.beam) == ("Said.", ("Ada", "Bob"), 5)
    with pytest.raises(OptionError, match=r"beam=5\. up to 4 on this server"):
        parse_translation_form({"beam": ["5"]}, complete=True, max_beam=4)
    with pytest.raises(OptionError, match="stream"):
        parse_translation_form({"stream": ["true"]}, complete=True)


def test_an_answer_is_english_whatever_was_spoken():
    transcript = Transcript("a", "Good day.", "fr", 32_000, (Segment(0, 32_000, "Good day."),))
    asked = parse_translation_form({"response_format": ["verbose_json"]}, complete=True)
    told = json.loads(render_transcription(transcript, asked, lambda tokens: ""))
    assert (told["task"], told["language"], told["text"]) == ("translate", "en", "Good day.")


def test_cards_say_who_translates_and_who_tells_languages_apart():
    able = {name for name, each in asr_cards().items() if "translate" in each.tasks}
    assert {"whisper-tiny", "whisper-base", "whisper-large-v3"} <= able
    assert not able & {"whisper-tiny-en", "distil-large-v3", MODEL}
    assert asr_card("whisper-base").language() == ""
    assert asr_card("whisper-base").language("fr") == "fr"
    assert asr_card("whisper-tiny-en").language() == "en"
