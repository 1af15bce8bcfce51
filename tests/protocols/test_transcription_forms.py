"""Forms about recordings, OpenAI's and FunASR's, without a server: what they ask for, and what is refused."""

from __future__ import annotations

import base64

import pytest

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import KnownSpeaker
from asr_serve.protocols.funasr import asr
from asr_serve.protocols.openai import known_speakers
from asr_serve.protocols.openai.transcription_form import (
    FORMATS_WITH_WORDS,
    RESPONSE_FORMATS,
    parse_transcription_form,
    parse_translation_form,
)
from asr_serve.protocols.speaker_names import funasr_speaker, openai_speaker, speaker_number

GRANULARITIES = "timestamp_granularities[]"
VOICE = "data:audio/wav;base64," + base64.b64encode(b"RIFF").decode()


def sent(**fields: str | list[str]) -> dict[str, list[str]]:
    return {name: value if isinstance(value, list) else [value] for name, value in fields.items()}


# --- who speaks ---------------------------------------------------------------------------------------------


def test_speakers_by_the_names_of_each_protocol():
    assert [speaker_number(name) for name in ("SPEAKER_00", "SPEAKER_12", "agent", "SPEAKER_", "SPEAKER_1x")] == [
        *(0, 12),
        *(None, None, None),
    ]
    assert [funasr_speaker(name) for name in ("SPEAKER_00", "SPEAKER_31", "agent")] == ["SPK0", "SPK31", "agent"]
    assert [openai_speaker(f"SPEAKER_{n:02}") for n in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_a_letter_is_never_the_name_of_somebody_else():
    known = ["A", "C"]
    told = [openai_speaker(name, known) for name in ("A", "C", "SPEAKER_00", "SPEAKER_01", "SPEAKER_02")]
    assert told == ["A", "C", "B", "D", "E"]


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, False),
        ({"response_format": "verbose_json"}, None),  # FunASR's clients read them without asking
        ({"response_format": "verbose_json", GRANULARITIES: "word"}, True),
        ({"response_format": "verbose_json", GRANULARITIES: "segment"}, False),
        ({"response_format": "verbose_json", "timestamp_granularities": ["segment", "word"]}, True),
        ({"response_format": "srt"}, False),
        ({"response_format": "vtt", GRANULARITIES: "word"}, True),
        ({"response_format": "karaoke"}, None),
        ({"response_format": "karaoke", GRANULARITIES: "word"}, True),
        ({"response_format": "ctm"}, None),
        ({"response_format": "textgrid"}, None),
        ({"response_format": "rttm"}, False),
    ],
)
def test_who_wants_words(fields, words):
    assert parse_transcription_form(sent(**fields), complete=True).options.words is words


@pytest.mark.parametrize("form", [name for name in RESPONSE_FORMATS if name not in FORMATS_WITH_WORDS])
def test_times_are_for_forms_that_have_a_place_for_them(form):
    with pytest.raises(OptionError, match="verbose_json") as refused:
        parse_transcription_form(sent(response_format=form, **{GRANULARITIES: "word"}), complete=True)
    assert refused.value.param == GRANULARITIES
    parse_transcription_form(
        sent(response_format=form, **{GRANULARITIES: "word"}), complete=False
    )  # the format may come yet


def test_the_same_granularity_twice_is_one():
    asked = parse_transcription_form(
        sent(response_format="verbose_json", **{GRANULARITIES: ["segment", "segment"]}), complete=True
    )
    assert asked.granularities == ("segment",)
    assert not asked.options.words


# --- sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [parse_transcription_form, parse_translation_form])
def test_sampling_fields(read):
    def of(**fields):
        options = read(sent(**fields), complete=True).options
        return options.top_k, options.top_p

    assert of() == of(top_k="0") == of(top_k="-1") == of(top_k="", top_p="1") == (0, 1.0)
    assert of(top_k="5", top_p="0.25") == (5, 0.25)
    for name, values in (("top_k", ("-2", "1.5", "many", "1000001")), ("top_p", ("0", "-0.1", "1.1", "nan", "most"))):
        for value in values:
            with pytest.raises(OptionError, match=name) as refused:
                of(**{name: value})
            assert refused.value.param == name


# --- speakers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["diarized_json", "rttm"])
def test_forms_that_tell_who_speaks_need_no_spk(form):
    options = parse_transcription_form(sent(response_format=form, max_speakers="3"), complete=True).options
    assert (options.speakers, options.max_speakers) == (True, 3)
    with pytest.raises(OptionError, match="spk=false"):
        parse_transcription_form(sent(response_format=form, spk="false"), complete=True)


@pytest.mark.parametrize("read", [parse_transcription_form, asr.parse_asr_form], ids=["openai", "funasr"])
def test_how_many_speak(read):
    form = {} if read is asr.parse_asr_form else {"response_format": "verbose_json"}
    options = read(sent(spk="true", min_speakers="2", max_speakers="4", **form), complete=True).options
    assert (options.speakers, options.min_speakers, options.max_speakers) == (True, 2, 4)
    assert read(sent(spk="true", num_speakers="2", **form), complete=True).options.num_speakers == 2
    for name in ("num_speakers", "min_speakers", "max_speakers"):
        options = read(sent(**{name: "2"}, **form), complete=True).options
        assert (options.speakers, getattr(options, name)) == (True, 2)
    for wrong, param in (
        ({"spk": "false", "num_speakers": "2"}, "num_speakers"),
        ({"spk": "true", "num_speakers": "0"}, "num_speakers"),
        ({"spk": "true", "num_speakers": "33"}, "num_speakers"),
        ({"spk": "true", "num_speakers": "two"}, "num_speakers"),
        ({"spk": "true", "num_speakers": "2", "max_speakers": "3"}, "max_speakers"),
        ({"spk": "true", "min_speakers": "4", "max_speakers": "3"}, "min_speakers"),
        ({"spk": "some"}, "spk"),
        ({"itn": "some"}, "itn"),
    ):
        with pytest.raises(OptionError) as refused:
            read(sent(**form, **wrong), complete=True)
        assert refused.value.param == param


@pytest.mark.parametrize("form", [{}, {"stream": "true"}, {"response_format": "text", "stream": "true"}])
@pytest.mark.parametrize(("name", "value"), [("spk", "true"), ("num_speakers", "2"), ("max_speakers", "2")])
def test_speakers_are_for_forms_that_have_a_place_for_them(form, name, value):
    with pytest.raises(OptionError, match=f"{name}={value} with .*diarized_json") as refused:
        parse_transcription_form(sent(**form, **{name: value}), complete=True)
    assert refused.value.param == name
    assert parse_transcription_form(sent(spk="true"), complete=False).options.speakers  # the format may come yet
    assert parse_transcription_form(sent(response_format="text", spk="true"), complete=True).options.speakers


# --- speakers who are known ---------------------------------------------------------------------------------


def test_known_speakers():
    fields = sent(
        response_format="diarized_json",
        known_speaker_names=["agent", "customer"],
        known_speaker_references=[VOICE, "data:,RI%46F"],
    )
    options = parse_transcription_form(fields, complete=True).options
    assert options.known_speakers == (KnownSpeaker("agent", b"RIFF"), KnownSpeaker("customer", b"RIFF"))


def test_names_wait_for_references():
    assert parse_transcription_form(sent(known_speaker_names=["agent"]), complete=False).options.known_speakers == ()
    fields = sent(response_format="diarized_json", known_speaker_names=["agent"])
    assert parse_transcription_form(fields, complete=False).options.known_speakers == ()


FIVE = list("VWXYZ")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"known_speaker_names": ["agent"]}, known_speakers.NAMES_FIELD, "1 .* with 0 .*'agent'"),
        ({"known_speaker_references": [VOICE]}, known_speakers.REFERENCES_FIELD, "0 .* with 1 .*for reference 1"),
        (
            {"known_speaker_names": ["a", "b"], "known_speaker_references": [VOICE]},
            *(known_speakers.NAMES_FIELD, "what 'b' sounds like nobody says"),
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["data:audio/wav"]},
            *(known_speakers.REFERENCES_FIELD, "--form-string"),
        ),
        ({"known_speaker_names": FIVE, "known_speaker_references": [VOICE] * 5}, known_speakers.NAMES_FIELD, "up to 4"),
        (
            {"known_speaker_names": ["a", "a"], "known_speaker_references": [VOICE] * 2},
            known_speakers.NAMES_FIELD,
            "twice",
        ),
        (
            {"known_speaker_names": ["x" * 65], "known_speaker_references": [VOICE]},
            known_speakers.NAMES_FIELD,
            "64 characters",
        ),
        ({"known_speaker_names": ["a\nb"], "known_speaker_references": [VOICE]}, known_speakers.NAMES_FIELD, "printed"),
        (
            {"known_speaker_names": ["SPEAKER_00"], "known_speaker_references": [VOICE]},
            known_speakers.NAMES_FIELD,
            "not known",
        ),
        (
            {"known_speaker_names": ["SPK0"], "known_speaker_references": [VOICE]},
            known_speakers.NAMES_FIELD,
            "not known",
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["/etc/passwd"]},
            known_speakers.REFERENCES_FIELD,
            "fetched",
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["http://127.0.0.1/a.wav"]},
            *(known_speakers.REFERENCES_FIELD, "fetched"),
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["data:audio/wav;base64,UklG=R"]},
            *(known_speakers.REFERENCES_FIELD, "padding"),
        ),
        (
            {
                "known_speaker_names": ["a"],
                "known_speaker_references": ["data:," + "x" * known_speakers.MAX_REFERENCE_BYTES],
            },
            *(known_speakers.REFERENCES_FIELD, f"up to {known_speakers.MAX_REFERENCE_BYTES}"),
        ),
    ],
)
def test_known_speakers_that_cannot_be(fields, param, says):
    with pytest.raises(OptionError, match=says) as refused:
        parse_transcription_form(sent(response_format="diarized_json", **fields), complete=True)
    assert refused.value.param == param
    assert len(str(refused.value)) < 400


def test_known_speakers_are_for_those_who_ask_who_speaks():
    fields = sent(known_speaker_names=["agent"], known_speaker_references=[VOICE])
    with pytest.raises(OptionError, match="spk=true") as refused:
        parse_transcription_form(fields, complete=True)
    assert refused.value.param == known_speakers.NAMES_FIELD
    assert parse_transcription_form(fields, complete=False).options.known_speakers == ()


# --- hotwords, written form --------------------------------------------------------------------------------


def test_hot_words_keep_their_weights():
    assert parse_transcription_form(sent(hotwords="Ada:2.5, Charles Babbage"), complete=True).options.hotwords == (
        "Ada:2.5",
        "Charles Babbage",
    )
    assert parse_transcription_form(sent(keywords=["Ada:2.5", "a, b"]), complete=True).options.hotwords == (
        "Ada:2.5",
        "a, b",
    )
    assert asr.parse_asr_form(sent(hotwords="张三，北京"), complete=True).options.hotwords == ("张三", "北京")
    many = ",".join(f"word{n}" for n in range(10_000))
    assert len(parse_transcription_form(sent(hotwords=many), complete=True).options.hotwords) == 10_000
    with pytest.raises(OptionError, match="characters") as refused:
        parse_transcription_form(sent(hotwords="x" * ((1 << 20) + 1)), complete=True)
    assert refused.value.param == "hotwords"


def test_hot_words_are_refused_under_the_name_that_was_sent():
    assert parse_transcription_form(sent(keywords=["a:nan"]), complete=True).option_to_field["hotwords"] == "keywords[]"
    assert "hotwords" not in parse_transcription_form(sent(hotwords="a:nan"), complete=True).option_to_field


def test_the_written_form_is_asked_for():
    assert parse_transcription_form(sent(itn="true"), complete=True).options.itn
    assert not parse_transcription_form({}, complete=True).options.itn
    assert asr.parse_asr_form(sent(itn="1"), complete=True).options.itn


# --- FunASR's defaults, and translations --------------------------------------------------------------------


def test_funasr_times_words_unless_told_otherwise():
    assert asr.parse_asr_form({}, complete=True).options.words is None
    assert asr.parse_asr_form(sent(timestamp="true"), complete=True).options.words
    assert not asr.parse_asr_form(sent(timestamp="false"), complete=True).options.words
    assert not asr.parse_asr_form({}, complete=True).options.speakers


@pytest.mark.parametrize("name", ["spk", "itn", GRANULARITIES, "known_speaker_names[]", "language"])
def test_a_translation_tells_its_text_and_no_more(name):
    with pytest.raises(OptionError, match="unknown field"):
        parse_translation_form({name: ["true"]}, complete=True)
    assert not parse_translation_form(sent(response_format="verbose_json"), complete=True).options.words
    with pytest.raises(OptionError):
        parse_translation_form(sent(response_format="diarized_json"), complete=True)
