"""FunASR's runtime protocol without a server: messages to options, live events to answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asr_serve.errors import AsrServeError
from asr_serve.pipelines.live.events import LivePartial
from asr_serve.protocols.funasr.runtime import RuntimeAnswers, RuntimeOptions, is_runtime_message, parse_runtime_message
from asr_serve.protocols.ignored_fields import IgnoredFields, collect_ignored_fields
from asr_serve.types import Segment, Word

MS = 16


def test_the_first_message_of_funasrs_python_client():
    text = json.dumps(
        {
            "mode": "2pass",
            "chunk_size": [5, 10, 5],
            "chunk_interval": 10,
            "encoder_chunk_look_back": 4,
            "decoder_chunk_look_back": 0,
            "audio_fs": 8000,
            "wav_name": "demo",
            "wav_format": "pcm",
            "is_speaking": True,
            "hotwords": '{"阿里巴巴":20,"Ada":1000}',
            "itn": False,
            "svs_lang": "auto",
        }
    )
    assert is_runtime_message(text)
    message = parse_runtime_message(text, RuntimeOptions())
    assert message.options == RuntimeOptions("2pass", "demo", "pcm", 8_000, ("阿里巴巴:2", "Ada:10"), itn=False)
    assert message.is_speaking is True
    end = parse_runtime_message('{"is_speaking": false, "is_end": true}', message.options)
    assert (end.options, end.is_speaking, end.is_end) == (message.options, False, True)


@pytest.mark.parametrize("wav_format", ["pcm", "others"])
def test_the_client_of_funasrs_offline_server_sends_no_mode(wav_format):
    """funasr-wss-client takes the first answer for the text of its file, and closes."""
    sent = {"chunk_size": [5, 10, 5], "wav_name": "a", "wav_format": wav_format, "audio_fs": 16_000}
    sent["is_speaking"] = True
    message = parse_runtime_message(json.dumps(sent), RuntimeOptions())
    assert message.options == RuntimeOptions("offline", "a", wav_format)
    again = parse_runtime_message('{"is_speaking": true}', message.options)
    assert again.options == message.options


@pytest.mark.parametrize(("sent", "found"), [("Ada, Babbage", ("Ada", "Babbage")), ("", ()), ({"Ada": 10}, ("Ada:1",))])
def test_hotwords(sent, found):
    text = json.dumps({"mode": "online", "hotwords": sent})
    assert parse_runtime_message(text, RuntimeOptions(hotwords=("old",))).options.hotwords == found


@pytest.mark.parametrize(("sent", "found"), [({}, "zh"), ({"svs_lang": "auto"}, None), ({"svs_lang": "ja"}, "ja")])
def test_a_language_stands_until_another_or_none_comes(sent, found):
    message = parse_runtime_message(json.dumps({"mode": "2pass", **sent}), RuntimeOptions(language="zh"))
    assert message.options.language == found


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"mode": "3pass"}, "mode"),
        ({"mode": "2pass", "wav_format": "mp3"}, "wav_format"),
        ({"mode": "2pass", "audio_fs": 4_000}, "audio_fs"),
        ({"mode": "2pass", "audio_fs": "much"}, "audio_fs"),
        ({"mode": "2pass", "itn": "perhaps"}, "itn"),
        ({"mode": "2pass", "hotwords": [1]}, "hotwords"),
        ({"mode": "2pass", "wav_name": "x" * 300}, "wav_name"),
        ({"mode": "2pass", "hotwrods": "x"}, "hotwrods"),
        ({"mode": 7}, "mode"),
    ],
)
def test_what_is_refused_is_named(sent, param):
    with pytest.raises(AsrServeError) as caught, collect_ignored_fields(IgnoredFields()):
        parse_runtime_message(json.dumps(sent), RuntimeOptions())
    assert caught.value.param == param


@pytest.mark.parametrize("text", ["", "START", "[1]", '{"a": 1}', '{"mode"', '{"mode":' * 50_000])
def test_what_is_no_message_of_this_protocol(text):
    assert not is_runtime_message(text)
    with pytest.raises(AsrServeError):
        parse_runtime_message(text, RuntimeOptions())


# --- answers ----------------------------------------------------------------------------------------------


def segment(text: str, start_ms: int = 0, spoken: str = "") -> Segment:
    words = text.split()
    timed = [Word(word, (start_ms + 100 * at) * MS, (start_ms + 100 * at + 90) * MS) for at, word in enumerate(words)]
    return Segment(start_ms * MS, (start_ms + 100 * len(words)) * MS, text, words=tuple(timed), spoken=spoken)


def partial(locked: str, tentative: str = "") -> LivePartial:
    return LivePartial(0, 0, locked, tentative)


def told(answers: RuntimeAnswers, *events: Any) -> list[tuple[str, str]]:
    found: list[str] = []
    for event in events:
        if isinstance(event, Segment):
            found += answers.segment(event)
        elif answer := answers.partial(event):
            found.append(answer)
    return [(each["mode"], each["text"]) for each in map(json.loads, found)]


def test_two_pass_sends_all_but_a_new_last_word_then_the_sentence():
    answers = RuntimeAnswers(RuntimeOptions("2pass", "a"))
    found = told(
        answers,
        partial("", "Ever."),
        partial("", "ever tried."),
        partial("", "Ever, tried over"),
        partial("", "Never tried, ever"),
        partial("", "Never tried, ever failed?"),
        segment("Never tried, ever failed."),
        partial("", "No"),
        partial("", "No!"),
        segment("No matter.", 1_000),
    )
    assert found == [
        ("2pass-online", "ever"),
        ("2pass-online", " tried"),
        ("2pass-online", " ever"),
        ("2pass-offline", "Never tried, ever failed."),
        ("2pass-online", " No"),
        ("2pass-offline", " No matter."),
    ]


def test_two_pass_begins_anew_after_text_that_was_no_speech():
    answers = RuntimeAnswers(RuntimeOptions("2pass", "a"))
    found = told(answers, partial("", "Thank you so"), partial("", ""), partial("", "Ever tried"))
    assert found == [("2pass-online", "Thank you"), ("2pass-online", "Ever")]


def test_online_sends_locked_words_and_at_the_end_the_rest():
    answers = RuntimeAnswers(RuntimeOptions("online", "a"))
    found = told(
        answers,
        partial("", "Ever tried"),
        partial("Ever", " tried, ever"),
        partial("Ever tried,", " ever"),
        segment("Ever tried, ever failed."),
        segment("It was $5.", 1_000, spoken="It was five dollars."),
    )
    assert found == [
        ("online", "Ever"),
        ("online", " tried,"),
        ("online", " ever failed."),
        ("online", " It was five dollars."),
    ]


def test_scripts_without_spaces_are_joined_without_any():
    answers = RuntimeAnswers(RuntimeOptions("2pass", "a"))
    found = told(answers, partial("", "你好"), partial("", "你好吗"), segment("你好吗?"), segment("再见。"))
    assert found == [
        ("2pass-online", "你"),
        ("2pass-online", "好"),
        ("2pass-offline", "你好吗?"),
        ("2pass-offline", "再见。"),
    ]


def test_times_and_sentences():
    [answer] = RuntimeAnswers(RuntimeOptions("2pass", "name")).segment(segment("Ever tried, it's me.", 500))
    found = json.loads(answer)
    assert found["wav_name"] == "name"
    assert found["is_final"] is False
    assert (found["start_time"], found["end_time"]) == (500, 900)
    assert json.loads(found["timestamp"]) == [[500, 590], [600, 690], [700, 790], [800, 890]]
    assert found["stamp_sents"] == [
        {"text_seg": "Ever tried", "punc": ",", "start": 500, "end": 690, "ts_list": [[500, 590], [600, 690]]},
        {"text_seg": "it's me", "punc": ".", "start": 700, "end": 890, "ts_list": [[700, 790], [800, 890]]},
    ]


def test_the_end_of_each_mode():
    for mode, ending in (("2pass", "2pass-offline"), ("online", "online"), ("offline", "offline")):
        answers = RuntimeAnswers(RuntimeOptions(mode, "a"))
        assert json.loads(answers.end(is_end=True)) == {
            "mode": ending,
            "text": "",
            "wav_name": "a",
            "is_final": True,
            "is_end": True,
        }
        assert "is_end" not in json.loads(answers.end(is_end=False))
    whole = json.loads(RuntimeAnswers(RuntimeOptions("offline", "a")).whole([segment("Hi.")], "Hi.", is_end=False))
    assert (whole["text"], whole["is_final"], whole["timestamp"]) == ("Hi.", True, "[[0,90]]")
