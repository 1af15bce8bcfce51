"""Forms about recordings, OpenAI's and FunASR's, without a server: what they ask for, and what is refused."""

from __future__ import annotations

import base64

import pytest

from asr_serve.errors import OptionError
from asr_serve.pipelines.options import KnownSpeaker
from asr_serve.protocols.speakers import letter, number, spk
from asr_serve.protocols.transcriptions import funasr, known
from asr_serve.protocols.transcriptions.openai import FORMATS, WITH_WORDS, ask, ask_translation

GRANULARITIES = "timestamp_granularities[]"
VOICE = "data:audio/wav;base64," + base64.b64encode(b"RIFF").decode()


def sent(**fields: str | list[str]) -> dict[str, list[str]]:
    return {name: value if isinstance(value, list) else [value] for name, value in fields.items()}


# --- who speaks ---------------------------------------------------------------------------------------------


def test_speakers_by_the_names_of_each_protocol():
    assert [number(name) for name in ("SPEAKER_00", "SPEAKER_12", "agent", "SPEAKER_", "SPEAKER_1x")] == [
        *(0, 12),
        *(None, None, None),
    ]
    assert [spk(name) for name in ("SPEAKER_00", "SPEAKER_31", "agent")] == ["SPK0", "SPK31", "agent"]
    assert [letter(f"SPEAKER_{n:02}") for n in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_a_letter_is_never_the_name_of_somebody_else():
    known = ["A", "C"]
    told = [letter(name, known) for name in ("A", "C", "SPEAKER_00", "SPEAKER_01", "SPEAKER_02")]
    assert told == ["A", "C", "B", "D", "E"]


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, False),
        ({"response_format": "verbose_json"}, True),  # FunASR's clients read them without asking
        ({"response_format": "verbose_json", GRANULARITIES: "word"}, True),
        ({"response_format": "verbose_json", GRANULARITIES: "segment"}, False),
        ({"response_format": "verbose_json", "timestamp_granularities": ["segment", "word"]}, True),
        ({"response_format": "srt"}, False),
        ({"response_format": "vtt", GRANULARITIES: "word"}, True),
        ({"response_format": "karaoke"}, True),
        ({"response_format": "ctm"}, True),
        ({"response_format": "textgrid"}, True),
        ({"response_format": "rttm"}, False),
    ],
)
def test_who_wants_words(fields, words):
    assert ask(sent(**fields), complete=True).options.words is words


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in WITH_WORDS])
def test_times_are_for_forms_that_have_a_place_for_them(form):
    with pytest.raises(OptionError, match="verbose_json") as refused:
        ask(sent(response_format=form, **{GRANULARITIES: "word"}), complete=True)
    assert refused.value.param == GRANULARITIES
    ask(sent(response_format=form, **{GRANULARITIES: "word"}), complete=False)  # the format may come yet


def test_the_same_granularity_twice_is_one():
    asked = ask(sent(response_format="verbose_json", **{GRANULARITIES: ["segment", "segment"]}), complete=True)
    assert asked.granularities == ("segment",)
    assert not asked.options.words


# --- speakers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["diarized_json", "rttm"])
def test_forms_that_tell_who_speaks_need_no_spk(form):
    options = ask(sent(response_format=form, max_speakers="3"), complete=True).options
    assert (options.speakers, options.max_speakers) == (True, 3)
    with pytest.raises(OptionError, match="spk=false"):
        ask(sent(response_format=form, spk="false"), complete=True)


@pytest.mark.parametrize("read", [ask, funasr.ask], ids=["openai", "funasr"])
def test_how_many_speak(read):
    form = {} if read is funasr.ask else {"response_format": "verbose_json"}
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
        ask(sent(**form, **{name: value}), complete=True)
    assert refused.value.param == name
    assert ask(sent(spk="true"), complete=False).options.speakers  # the format may come yet
    assert ask(sent(response_format="text", spk="true"), complete=True).options.speakers


# --- speakers who are known ---------------------------------------------------------------------------------


def test_known_speakers():
    fields = sent(
        response_format="diarized_json",
        known_speaker_names=["agent", "customer"],
        known_speaker_references=[VOICE, "data:,RI%46F"],
    )
    options = ask(fields, complete=True).options
    assert options.known_speakers == (KnownSpeaker("agent", b"RIFF"), KnownSpeaker("customer", b"RIFF"))


def test_names_wait_for_references():
    assert ask(sent(known_speaker_names=["agent"]), complete=False).options.known_speakers == ()
    fields = sent(response_format="diarized_json", known_speaker_names=["agent"])
    assert ask(fields, complete=False).options.known_speakers == ()


FIVE = list("VWXYZ")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"known_speaker_names": ["agent"]}, known.NAMES, "1 .* with 0 .*'agent'"),
        ({"known_speaker_references": [VOICE]}, known.REFERENCES, "0 .* with 1 .*for reference 1"),
        (
            {"known_speaker_names": ["a", "b"], "known_speaker_references": [VOICE]},
            *(known.NAMES, "what 'b' sounds like nobody says"),
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["data:audio/wav"]},
            *(known.REFERENCES, "--form-string"),
        ),
        ({"known_speaker_names": FIVE, "known_speaker_references": [VOICE] * 5}, known.NAMES, "up to 4"),
        ({"known_speaker_names": ["a", "a"], "known_speaker_references": [VOICE] * 2}, known.NAMES, "twice"),
        ({"known_speaker_names": ["x" * 65], "known_speaker_references": [VOICE]}, known.NAMES, "64 characters"),
        ({"known_speaker_names": ["a\nb"], "known_speaker_references": [VOICE]}, known.NAMES, "printed"),
        ({"known_speaker_names": ["SPEAKER_00"], "known_speaker_references": [VOICE]}, known.NAMES, "not known"),
        ({"known_speaker_names": ["SPK0"], "known_speaker_references": [VOICE]}, known.NAMES, "not known"),
        ({"known_speaker_names": ["a"], "known_speaker_references": ["/etc/passwd"]}, known.REFERENCES, "fetched"),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["http://127.0.0.1/a.wav"]},
            *(known.REFERENCES, "fetched"),
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["data:audio/wav;base64,UklG=R"]},
            *(known.REFERENCES, "padding"),
        ),
        (
            {"known_speaker_names": ["a"], "known_speaker_references": ["data:," + "x" * known.MOST_BYTES]},
            *(known.REFERENCES, f"up to {known.MOST_BYTES}"),
        ),
    ],
)
def test_known_speakers_that_cannot_be(fields, param, says):
    with pytest.raises(OptionError, match=says) as refused:
        ask(sent(response_format="diarized_json", **fields), complete=True)
    assert refused.value.param == param
    assert len(str(refused.value)) < 400


def test_known_speakers_are_for_those_who_ask_who_speaks():
    fields = sent(known_speaker_names=["agent"], known_speaker_references=[VOICE])
    with pytest.raises(OptionError, match="spk=true") as refused:
        ask(fields, complete=True)
    assert refused.value.param == known.NAMES
    assert ask(fields, complete=False).options.known_speakers == ()


# --- hot words, written form --------------------------------------------------------------------------------


def test_hot_words_keep_their_weights():
    assert ask(sent(hotwords="Ada:2.5, Charles Babbage"), complete=True).options.hotwords == (
        "Ada:2.5",
        "Charles Babbage",
    )
    assert ask(sent(keywords=["Ada:2.5", "a, b"]), complete=True).options.hotwords == ("Ada:2.5", "a, b")
    assert funasr.ask(sent(hotwords="张三，北京"), complete=True).options.hotwords == ("张三", "北京")
    many = ",".join(f"word{n}" for n in range(10_000))
    assert len(ask(sent(hotwords=many), complete=True).options.hotwords) == 10_000
    with pytest.raises(OptionError, match="characters") as refused:
        ask(sent(hotwords="x" * ((1 << 20) + 1)), complete=True)
    assert refused.value.param == "hotwords"


def test_hot_words_are_refused_under_the_name_that_was_sent():
    assert ask(sent(keywords=["a:nan"]), complete=True).params["hotwords"] == "keywords[]"
    assert "hotwords" not in ask(sent(hotwords="a:nan"), complete=True).params


def test_the_written_form_is_asked_for():
    assert ask(sent(itn="true"), complete=True).options.itn
    assert not ask({}, complete=True).options.itn
    assert funasr.ask(sent(itn="1"), complete=True).options.itn


# --- FunASR's defaults, and translations --------------------------------------------------------------------


def test_funasr_times_words_unless_told_otherwise():
    assert funasr.ask({}, complete=True).options.words
    assert funasr.ask(sent(timestamp="true"), complete=True).options.words
    assert not funasr.ask(sent(timestamp="false"), complete=True).options.words
    assert not funasr.ask({}, complete=True).options.speakers


@pytest.mark.parametrize("name", ["spk", "itn", GRANULARITIES, "known_speaker_names[]", "language"])
def test_a_translation_tells_its_text_and_no_more(name):
    with pytest.raises(OptionError, match="unknown field"):
        ask_translation({name: ["true"]}, complete=True)
    assert not ask_translation(sent(response_format="verbose_json"), complete=True).options.words
    with pytest.raises(OptionError):
        ask_translation(sent(response_format="diarized_json"), complete=True)
