"""FunASR's WebSocket frames, field by field, without a socket."""

from __future__ import annotations

import json

import msgspec
import pytest

from asr_serve.errors import OptionError, UnknownCommand, UnsupportedProtocol
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.protocols.form_fields import FormFields
from asr_serve.protocols.funasr import websocket
from asr_serve.protocols.funasr.websocket import (
    FlagCommand,
    FunAsrOptions,
    HotwordsCommand,
    LanguageCommand,
    SentenceEncoder,
    StartCommand,
    StopCommand,
    parse_command,
)
from asr_serve.types import Segment, Word

HELLO = Segment(4_800, 19_200, "你好")
WORLD = Segment(20_000, 40_008, 'the "world"')


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("START", StartCommand()),
        (" STOP\n", StopCommand()),
        ("LANGUAGE:中文", LanguageCommand("中文", "zh")),
        ("LANGUAGE: English ", LanguageCommand("English", "en")),
        ("LANGUAGE:", LanguageCommand("", None)),
        ("LANGUAGE:auto", LanguageCommand("auto", None)),
        ("HOTWORDS:词一,word 2, ,", HotwordsCommand(("词一", "word 2"))),
        ("HOTWORDS:", HotwordsCommand(())),
        ("HOTWORDS:a:b", HotwordsCommand(("a:b",))),
        ("SPK:true", FlagCommand("spk", True)),
        ("WORDS: On", FlagCommand("words", True)),
        ("ITN:0", FlagCommand("itn", False)),
    ],
)
def test_commands(text, found):
    assert parse_command(text) == found


@pytest.mark.parametrize("text", ["", "start", "STAR", "START:", "STOP:now", "LANGUAGE", '{"type":"START"}', "\0"])
def test_what_is_no_command_is_told_which_there_are(text):
    with pytest.raises(UnknownCommand, match="START, STOP, LANGUAGE:, HOTWORDS:"):
        parse_command(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"mode":"2pass","chunk_size":[5,10,5],"wav_name":"x","is_speaking":true}',
        ' {"mode": "offline", "wav_name": "x", "is_speaking": true}',
        '{"is_speaking": false}',
    ],
)
def test_the_runtime_protocol_is_refused_by_name_among_commands(text):
    with pytest.raises(UnsupportedProtocol, match=r"runtime protocol.* begun with commands.* START"):
        parse_command(text)


@pytest.mark.parametrize("text", ['{"mode"', "[1]", '{"a":' * 100_000])
def test_json_of_no_protocol_is_no_command(text):
    with pytest.raises(UnknownCommand):
        parse_command(text)


def test_the_nearest_command_is_named():
    with pytest.raises(UnknownCommand, match="did you mean 'START'"):
        parse_command("start")
    with pytest.raises(UnknownCommand, match="did you mean 'LANGUAGE:'"):
        parse_command("LANG:en")


def test_a_long_text_is_not_shown_again():
    with pytest.raises(UnknownCommand) as refused:
        parse_command("HOTWORDS:" + "x" * 2_000_000)
    assert len(str(refused.value)) < 300
    with pytest.raises(UnknownCommand) as refused:
        parse_command("x" * 60_000)
    assert len(str(refused.value)) < 300


def test_events():
    assert websocket.STARTED == '{"event":"started"}'
    assert websocket.STOPPED == '{"event":"stopped"}'
    assert websocket.language_answer("中文") == '{"event":"language_set","language":"中文"}'
    assert json.loads(websocket.hotwords_answer(["a"])) == {"event": "hotwords_set", "hotwords": ["a"], "used": True}
    told = json.loads(websocket.hotwords_answer(["a", "b"], websocket.NOT_STARTED))
    assert told == {"event": "hotwords_set", "hotwords": ["a", "b"], "used": False, "message": websocket.NOT_STARTED}
    assert json.loads(websocket.error_answer("at_capacity", "full", 200)) == {
        "event": "error",
        "code": "at_capacity",
        "message": "full",
        "retry_after_ms": 200,
    }
    assert "retry_after_ms" not in websocket.error_answer("x", "y")


@pytest.mark.parametrize("text", ["SPK:", "SPK:2", "WORDS:perhaps", "ITN:numbers"])
def test_flags_are_true_or_false(text):
    with pytest.raises(OptionError, match="true or false") as refused:
        parse_command(text)
    assert refused.value.param == text.partition(":")[0].lower()


def test_what_a_query_wants():
    assert FunAsrOptions.from_query(FormFields({}, websocket.FLAGS)) == FunAsrOptions()
    query = {"spk": ["1"], "words": ["true"], "itn": ["yes"]}
    assert FunAsrOptions.from_query(FormFields(query, websocket.FLAGS)) == FunAsrOptions(spk=True, words=True, itn=True)


def test_who_says_how_many_speak_wants_them():
    known = (*websocket.FLAGS, "num_speakers", "min_speakers", "max_speakers")
    wants = FunAsrOptions.from_query(FormFields({"num_speakers": ["2"]}, known))
    assert wants == FunAsrOptions(spk=True, numbers=(("num_speakers", 2),))
    for options in (TranscribeOptions, ListenOptions):
        asked = options(**wants.pipeline_options())
        assert (asked.speakers, asked.num_speakers) == (True, 2)
        off = options(**msgspec.structs.replace(wants, spk=False).pipeline_options())  # SPK:false
        assert (off.speakers, off.num_speakers) == (False, None)
    for query, param in (
        ({"num_speakers": ["0"]}, "num_speakers"),
        ({"num_speakers": ["2"], "max_speakers": ["3"]}, "max_speakers"),
        ({"num_speakers": ["2"], "spk": ["false"]}, "num_speakers"),
    ):
        with pytest.raises(OptionError) as refused:
            FunAsrOptions.from_query(FormFields(query, known))
        assert refused.value.param == param
    told = json.loads(websocket.flag_answer(FlagCommand("spk", True)))
    assert told == {"event": "spk_set", "spk": True, "used": True}
    told = json.loads(websocket.flag_answer(FlagCommand("itn", False), websocket.NOT_STARTED))
    assert told == {"event": "itn_set", "itn": False, "used": False, "message": websocket.NOT_STARTED}


def test_words_and_speakers_of_sentences():
    hello = Segment(
        4_800,
        19_200,
        "你好",
        words=(Word("你", 4_800, 9_600, 0.9), Word("好", 9_600, 19_200, 0.8)),
        speaker="SPEAKER_01",
    )
    words = [{"word": "你", "start": 300, "end": 600}, {"word": "好", "start": 600, "end": 1_200}]
    sentence = {"text": "你好", "start": 300, "end": 1_200, "spk": 1}
    said, wordy = SentenceEncoder(spk=True), SentenceEncoder(words=True)
    for each in (said, wordy):
        each.add_segment(hello)
    assert json.loads(said.encode_partial(""))["sentences"] == [sentence]
    assert json.loads(wordy.encode_partial(""))["sentences"] == [sentence | {"words": words}]


@pytest.mark.parametrize("only_new", [False, True])
def test_at_the_end_speakers_may_turn_out_to_be_others(only_new):
    """All sentences are told once more, to a client that wants only new ones, too: it has others."""
    said = SentenceEncoder(spk=True, only_new=only_new)
    for speaker in ("", "SPEAKER_00", "SPEAKER_01"):
        said.add_segment(Segment(0, 16_000, "word", speaker=speaker))
    first = json.loads(said.encode_partial(""))["sentences"]
    assert [each.get("spk") for each in first] == [None, 0, 1]
    said.relabel_speakers(["SPEAKER_00", "SPEAKER_00", "agent"])
    assert [each["spk"] for each in json.loads(said.encode_final(0))["sentences"]] == [0, 0, "agent"]


def test_answers_hold_all_that_is_locked():
    said = SentenceEncoder()
    assert json.loads(said.encode_partial("")) == {"sentences": [], "partial": "", "is_final": False, "duration_ms": 0}
    said.add_segment(HELLO)
    hello = {"text": "你好", "start": 300, "end": 1_200}
    assert json.loads(said.encode_partial("世界", 20_000, 32_000)) == {
        "sentences": [hello],
        "partial": "世界",
        "partial_start_ms": 1_250,
        "is_final": False,
        "duration_ms": 2_000,
    }
    said.add_segment(WORLD)
    world = {"text": 'the "world"', "start": 1_250, "end": 2_501}
    assert json.loads(said.encode_partial(""))["sentences"] == [hello, world]
    assert json.loads(said.encode_final(82_720)) == {
        "sentences": [hello, world],
        "is_final": True,
        "duration_ms": 5_170,
    }


def test_a_language_that_was_heard_is_told_with_its_probability():
    said = SentenceEncoder()
    said.add_segment(HELLO, "zh", 0.98765)
    said.add_segment(WORLD, "en", 0.0)
    zh, en = json.loads(said.encode_partial(""))["sentences"]
    assert (zh["language"], zh["language_probability"]) == ("zh", 0.9877)
    assert set(en) == {"text", "start", "end"}
    whole = json.loads(said.encode_final(16_000, "zh", 0.5))
    assert (whole["language"], whole["language_probability"], whole["duration_ms"]) == ("zh", 0.5, 1_000)
    assert set(json.loads(said.encode_final(16_000, "en"))) == {"sentences", "is_final", "duration_ms"}


def test_answers_may_hold_only_what_is_new():
    said = SentenceEncoder(only_new=True)
    said.add_segment(HELLO)
    assert [s["text"] for s in json.loads(said.encode_partial(""))["sentences"]] == ["你好"]
    assert json.loads(said.encode_partial("x"))["sentences"] == []
    said.add_segment(WORLD)
    assert [s["text"] for s in json.loads(said.encode_final(0))["sentences"]] == ['the "world"']
