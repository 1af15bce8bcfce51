"""Forms and answers of whisper-asr-webservice and whisper.cpp, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols.ignored_fields import IgnoredFields, collect_ignored_fields
from asr_serve.protocols.whisper_asr import asr
from asr_serve.protocols.whisper_asr.asr import (
    ASR_FIELDS,
    DETECTION_FIELDS,
    parse_detection,
    parse_whisper_asr,
    render_detection,
    render_whisper_asr,
)
from asr_serve.protocols.whisper_cpp.inference import (
    INFERENCE_FIELDS,
    WITHOUT_EFFECT,
    parse_inference_form,
    render_inference,
)
from asr_serve.types import Segment, Transcript, Word

HELLO = Segment(
    16_000,
    48_000,
    "Hello, my dear.",
    (5, 6),
    -0.5,
    words=(Word("Hello,", 16_000, 24_000, 0.9), Word("my", 24_000, 32_000, 0.8), Word("dear.", 32_000, 48_000, 0.7)),
)
BYE = Segment(64_000, 80_000, "Bye.", (7,), -0.25, words=(Word("Bye.", 64_000, 80_000, 0.5),))
TALK = Transcript("talk.wav", "Hello, my dear. Bye.", "en", 96_000, (HELLO, BYE), "whisper-base", 0, 0.98765)


def whisper_asr(query="", **form):
    return parse_whisper_asr({name: [value] for name, value in form.items()}, complete=True, query=query)


def inference(**form):
    return parse_inference_form({name: [value] for name, value in form.items()}, complete=True, max_beam=4)


def detection(**form):
    return parse_detection({name: [value] for name, value in form.items()}, complete=True, query="")


LONG = "x" * 100_000
INFERENCE_FLAGS = (
    *("detect_language", "translate", "diarize", "vad"),
    *("no_language_probabilities", "no_timestamps", "token_timestamps"),
)


def test_the_query_of_bazarr_is_what_is_asked():
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        asked = whisper_asr("task=translate&language=fr&output=srt&encode=false&video_file=%2Ftv%2Fa.mkv")
    assert (asked.options.task, asked.options.language, asked.output, asked.raw_pcm) == ("translate", "fr", "srt", True)
    assert (asked.options.vad, asked.options.words, asked.options.speakers) == (True, False, False)
    assert str(ignored) == "video_file"


def test_further_options_of_that_program():
    asked = whisper_asr(
        "initial_prompt=Ada&word_timestamps=true&vad_filter=false&diarize=true&max_speakers=3", model="whisper-base"
    )
    options = asked.options
    assert (options.prompt, options.words, options.vad, options.speakers) == ("Ada", True, False, True)
    assert (options.max_speakers, asked.model, asked.output, asked.raw_pcm) == (3, "whisper-base", "txt", False)
    asked = parse_detection({}, complete=True, query="encode=false")
    assert (asked.raw_pcm, asked.options.limits.head_s, asked.options.language) == (True, 30, None)


WRONG_VALUES: list[tuple[Callable[..., object], dict[str, str], str, str]] = [
    (partial(whisper_asr, "output=ass"), {}, "output", "one of: txt, vtt, srt, tsv, json"),
    (partial(whisper_asr, "task=sing"), {}, "task", "one of: transcribe, translate"),
    (partial(whisper_asr, "encode=perhaps"), {}, "encode", "true or false"),
    (partial(whisper_asr, "outptu=srt"), {}, "outptu", "did you mean 'output'"),
    (partial(whisper_asr, "output=srt&output=vtt"), {}, "output", "came 2 times"),
    (partial(whisper_asr, "output=srt"), {"output": "vtt"}, "output", "came 2 times"),
    (partial(whisper_asr, "diarize=false&min_speakers=2"), {}, "min_speakers", "diarize=false"),
    (partial(whisper_asr, "max_speakers=0"), {}, "max_speakers", "1 to 32"),
    (partial(whisper_asr, "min_speakers=two"), {}, "min_speakers", "a whole number"),
    (partial(whisper_asr, "diarize=2"), {}, "diarize", "true or false"),
    (partial(whisper_asr, "vad_filter=maybe"), {}, "vad_filter", "true or false"),
    (partial(whisper_asr, "word_timestamps=segment"), {}, "word_timestamps", "true or false"),
    (whisper_asr, {"language": LONG}, "language", "up to 1000"),
    (whisper_asr, {"model": LONG}, "model", "up to 1000"),
    (whisper_asr, {"initial_prompt": LONG}, "initial_prompt", f"up to {MAX_PROMPT_CHARACTERS}"),
    (whisper_asr, {"hotwords": '{"Ada": "many"}'}, "hotwords", "words with commas"),
    (detection, {"encode": "2"}, "encode", "true or false"),
    (detection, {"model": LONG}, "model", "up to 1000"),
    (detection, {"modle": "whisper-base"}, "modle", "did you mean 'model'"),
    (inference, {"response_format": "lrc"}, "response_format", "one of: json, text, srt, vtt, verbose_json"),
    (inference, {"temperature": "2"}, "temperature", "from 0 to 1"),
    (inference, {"temperature_inc": "-0.1"}, "temperature_inc", "from 0 to 1"),
    (inference, {"beam_size": "5"}, "beam_size", "up to 4 on this server"),
    (inference, {"max_len": "1"}, "max_len", "leave max_len out"),
    (inference, {"offset_t": "500"}, "offset_t", "the whole recording"),
    (inference, {"duration": "x"}, "duration", "a number"),
    (inference, {"vad_threshold": "0"}, "vad_threshold", "0.01 to 1"),
    (inference, {"vad_speech_pad_ms": "5001"}, "vad_speech_pad_ms", "0 to 5000"),
    (inference, {"language": LONG}, "language", "up to 1000"),
    (inference, {"model": LONG}, "model", "up to 1000"),
    (inference, {"prompt": LONG}, "prompt", f"up to {MAX_PROMPT_CHARACTERS}"),
    (inference, {"hotwords": '["Ada"'}, "hotwords", "words with commas"),
    *((inference, {name: "perhaps"}, name, "true or false") for name in INFERENCE_FLAGS),
    (inference, {"respones_format": "srt"}, "respones_format", "did you mean 'response_format'"),
]


@pytest.mark.parametrize(("parse", "form", "param", "says"), WRONG_VALUES)
def test_wrong_values_are_refused_by_name(parse, form, param, says):
    with pytest.raises(OptionError) as refused:
        parse(**form)
    assert refused.value.param == param
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (whisper_asr, set(ASR_FIELDS)),
        (detection, set(DETECTION_FIELDS)),
        (inference, set(INFERENCE_FIELDS) - set(WITHOUT_EFFECT)),
    ],
)
def test_every_field_has_a_wrong_value(parse, fields):
    tried = {param for tried, _, param, _ in WRONG_VALUES if getattr(tried, "func", tried) is parse}
    assert not fields - tried


def test_answers_of_whisper_asr_webservice():
    def body(query):
        return render_whisper_asr(TALK, whisper_asr(query))

    assert body("") == body("output=txt") == "Hello, my dear.\nBye.\n"
    assert body("output=tsv") == "start\tend\ttext\n1000\t3000\tHello, my dear.\n4000\t5000\tBye.\n"
    assert body("output=srt").startswith("1\n00:00:01,000 --> 00:00:0")
    assert body("output=vtt").startswith("WEBVTT\n\n00:00:01.000 --> ")
    answer = json.loads(body("output=json&word_timestamps=true"))
    assert list(answer) == ["language", "segments", "text"]
    assert (answer["language"], answer["text"]) == ("en", TALK.text)
    assert [segment["id"] for segment in answer["segments"]] == [1, 2]
    words = answer["segments"][0]["words"]
    assert words[1] == {"start": 1.5, "end": 2.0, "word": " my", "probability": 0.8}
    assert "".join(word["word"] for word in words) == answer["segments"][0]["text"]
    assert json.loads(body("output=json"))["segments"][0]["words"] is None
    assert asr.response_headers('a "b"/é.mkv', "srt")["Content-Disposition"] == (
        'attachment; filename="a%20%22b%22%2F%C3%A9.mkv.srt"'
    )


def test_a_detected_language_by_code_name_and_probability():
    told = json.loads(render_detection(TALK))
    assert told == {"detected_language": "english", "language_code": "en", "confidence": 0.9877}
    with pytest.raises(UnsupportedOption, match="hold no speech"):
        render_detection(Transcript("quiet.wav", "", "", 96_000, ()))


def test_a_form_of_whisper_cpp_is_what_is_asked():
    asked = inference(
        language="de", temperature="0.2", temperature_inc="0.4", translate="true", beam_size="4", prompt="Ada"
    )
    options = asked.options
    assert (options.language, options.task, options.beam, options.prompt) == ("de", "translate", 4, "Ada")
    assert (options.temperatures, options.words) == ((0.2, 0.6), False)
    assert inference(temperature="0", temperature_inc="0").options.temperatures == (0.0,)
    assert inference(temperature="0.0", temperature_inc="0.2").options.temperatures == inference().options.temperatures
    assert inference(temperature="0.3").options.temperatures == (0.3, 0.5)
    assert inference(language="de", detect_language="true").options.language is None
    assert inference(language="auto", beam_size="-1").options.beam == 1
    assert inference(response_format="verbose_json").options.words is None
    assert inference(response_format="verbose_json", no_timestamps="true").options.words is False


def test_settings_of_another_decoder_are_told_to_have_no_effect():
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        inference(entropy_thold="2.4", best_of="2", user="me")
    assert str(ignored) == "user, best_of, entropy_thold"
    assert inference(**dict.fromkeys(WITHOUT_EFFECT, "1"), offset_t="0", max_len="0") == inference()


def test_answers_of_whisper_cpp():
    def body(**form):
        return render_inference(TALK, inference(**form))

    assert body() == (b'{"text":"Hello, my dear.\\nBye.\\n"}', "application/json")
    assert body(response_format="text") == (b"Hello, my dear.\nBye.\n", "text/plain; charset=utf-8")
    assert body(response_format="srt")[0].startswith(b"1\n00:00:01,000 --> ")
    assert body(response_format="vtt")[0].startswith(b"WEBVTT\n\n")
    answer = json.loads(body(response_format="verbose_json")[0])
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "english", 6.0)
    assert (answer["detected_language"], answer["language_probabilities"]) == ("english", {"en": 0.9877})
    first = answer["segments"][0]
    assert (first["id"], first["start"], first["end"], first["tokens"]) == (0, 1.0, 3.0, [5, 6])
    assert first["words"][2] == {"word": "dear.", "start": 2.0, "end": 3.0, "t_dtw": -1, "probability": 0.7}
    plain = json.loads(body(response_format="verbose_json", no_timestamps="true", no_language_probabilities="true")[0])
    assert "detected_language" not in plain
    assert "start" not in plain["segments"][0]
