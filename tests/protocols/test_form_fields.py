"""Form fields: kinds, bounds, names; and languages by their names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.registry import asr_cards
from asr_serve.protocols.form_fields import MAX_FIELD_CHARACTERS, FormFields, parse_word_list
from asr_serve.protocols.funasr import asr
from asr_serve.protocols.openai import transcription_form
from asr_serve.protocols.stream import client_messages
from asr_serve.text import languages

KNOWN = ("model", "stream", "temperature", "max_segment_ms", "include[]", "prompt")


def read(**sent: str) -> FormFields:
    return FormFields({name: [value] for name, value in sent.items()}, KNOWN)


def test_brackets_may_be_left_out_of_lists_and_not_put_elsewhere():
    fields = FormFields({"include": ["a"], "include[]": ["b", " c ", ""]}, KNOWN)
    assert fields.repeated("include[]") == ["a", "b", "c"]
    with pytest.raises(OptionError, match="did you mean 'model'") as refused:
        FormFields({"model[]": ["a"]}, KNOWN)
    assert refused.value.param == "model[]"


def test_empty_is_as_good_as_none():
    fields = read(model=" ", stream="", temperature="", prompt="")
    assert (fields.text("model"), fields.flag("stream"), fields.number("temperature", 0, 1)) == (None, None, None)
    fields.reject_unsupported("prompt", "none is taken")
    assert "model" in read(model="x")
    assert "model" not in read(stream="1")


@pytest.mark.parametrize("value", ["true", "True", "1", "yes", "on", "t", "Y", " true "])
def test_true(value):
    assert read(stream=value).flag("stream") is True


@pytest.mark.parametrize("value", ["0", "1", ".5", "0.5", "1.", "5e-1", "+1"])
def test_numbers(value):
    assert read(temperature=value).number("temperature", 0, 1) == float(value)


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "inf", "1_0", "0x1", "٠", "1e", "one", "1 0", "0" * 1_001])
def test_no_numbers(value):
    with pytest.raises(OptionError) as refused:
        read(temperature=value).number("temperature", 0, 1)
    assert refused.value.param == "temperature"
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", ["", "12", "+12", "012"])
def test_whole_numbers(value):
    assert read(max_segment_ms=value).integer("max_segment_ms", 1, 100) in (None, 12)


@pytest.mark.parametrize("value", ["0", "101", "1.0", "1e1", "٣", "9" * 100])
def test_no_whole_numbers(value):
    with pytest.raises(OptionError):
        read(max_segment_ms=value).integer("max_segment_ms", 1, 100)


def test_refusals_say_what_there_is_instead():
    with pytest.raises(UnsupportedOption, match=r"prompt is not supported\. none is taken"):
        read(prompt="x").reject_unsupported("prompt", "none is taken")


@pytest.mark.parametrize(
    "read_form", [transcription_form.parse_transcription_form, asr.parse_asr_form], ids=["openai", "funasr"]
)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(transcription_form.TRANSCRIPTION_FIELDS + asr.ASR_FIELDS), st.text(max_size=40)),
        st.lists(
            st.one_of(st.text(max_size=50), st.just("true"), st.just("x" * (MAX_FIELD_CHARACTERS + 1))),
            min_size=1,
            max_size=3,
        ),
        max_size=5,
    ),
    st.booleans(),
)
def test_any_form_is_read_or_refused(read_form, sent, complete):
    """Whatever is sent, nothing but OptionError comes out, and it is no essay."""
    refused: OptionError | None = None
    try:
        read_form(sent, complete=complete)
    except OptionError as error:
        refused = error
    assert refused is None or refused.param is not None
    assert len(str(refused)) < 2_000


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("English", "en"),
        ("中文", "zh"),
        ("ESPAÑOL", "es"),
        ("pt_BR", "pt"),
        ("zh-Hans-CN", "zh"),
        ("yue", "yue"),
        ("klingon", "klingon"),
        (" en ", "en"),
    ],
)
def test_languages(name, code):
    assert languages.language_code(name) == code
    assert languages.requested_language_code(name) == code


@pytest.mark.parametrize("name", [None, "", " ", "auto", "Null", "NONE"])
def test_no_language(name):
    assert languages.requested_language_code(name) is None


def test_every_language_of_every_model_has_a_name():
    known = languages.languages_by_name(sorted({code for card in asr_cards().values() for code in card.languages}))
    assert known["german"] == "de"
    assert {code for name, code in known.items() if name != code} == set(known.values())


@pytest.mark.parametrize(
    ("came", "openais", "funasrs", "streams"),
    [
        ("diarize", "spk", "spk", "speakers"),
        ("diarization", "spk", "spk", "speakers"),
        ("speaker_labels", "spk", "spk", "speakers"),
        ("word_timestamps", "timestamp_granularities[]", "timestamp", "words"),
        ("word_times", "timestamp_granularities[]", "timestamp", "words"),
        ("hot_words", "hotwords", "hotwords", "hotwords"),
        ("keywords", None, "hotwords", "hotwords"),
        ("Boost", "hotwords", "hotwords", "hotwords"),
        ("spk", None, None, "speakers"),
        ("speakers", "spk", "spk", None),
        ("words", "timestamp_granularities[]", "timestamp", None),
        ("lang", "language", "language", "language"),
    ],
)
def test_an_unknown_field_names_the_one_that_is_meant(came, openais, funasrs, streams):
    for known, near in (
        (transcription_form.TRANSCRIPTION_FIELDS, openais),
        (asr.ASR_FIELDS, funasrs),
        (client_messages.QUERY, streams),
    ):
        if near is None:
            FormFields({came: ["true"]}, known)
            continue
        with pytest.raises(OptionError, match=re.escape(f"did you mean {near!r}?")) as refused:
            FormFields({came: ["true"]}, known)
        assert refused.value.param == came


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Ada,Babbage:2", ("Ada", "Babbage:2")),
        ("Ada\nBabbage\r\n\n", ("Ada", "Babbage")),
        ('["Ada", "Charles Babbage", " "]', ("Ada", "Charles Babbage")),
        ('{"Ada": 2, "Babbage": 0.5}', ("Ada:2", "Babbage:0.5")),
    ],
)
def test_words_come_in_the_forms_of_clients(text: str, found: tuple[str, ...]) -> None:
    assert parse_word_list(text) == found


@pytest.mark.parametrize("text", ['{"Ada": "much"}', "[1, 2]", "{Ada}", "[" * 100_000])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="a JSON list of them") as refused:
        parse_word_list(text)
    assert refused.value.param == "hotwords"
