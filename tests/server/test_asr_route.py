"""POST /asr: FunASR's protocol, to the letter."""

from __future__ import annotations

import pytest

from asr_serve.protocols.funasr.asr import parse_asr_form

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."


def post(server, audio, **fields):
    return server.http.post("/asr", files={"file": ("audio.wav", audio)}, data=fields)


def test_the_answer_has_exactly_this_shape(server, cities):
    found = post(server, cities.read_bytes())
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    answer = found.json()
    assert list(answer) == ["text", "segments", "duration", "processing_time", "rtf"]
    assert len(answer["segments"]) > 1
    assert all(list(segment) == ["text", "start", "end", "words"] for segment in answer["segments"])
    for segment in answer["segments"]:
        words = segment["words"]
        assert all(list(word) == ["word", "start", "end"] for word in words)
        assert " ".join(word["word"] for word in words) == segment["text"]
        times = [segment["start"], *(time for word in words for time in (word["start"], word["end"]))]
        assert [*times, segment["end"]] == sorted([*times, segment["end"]])
    assert answer["text"] == " ".join(segment["text"] for segment in answer["segments"])
    times = [time for segment in answer["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] <= answer["duration"] == pytest.approx(44, abs=1)
    assert 0 < answer["processing_time"] < 60
    assert answer["rtf"] == pytest.approx(answer["processing_time"] / answer["duration"], abs=1e-3)


@pytest.mark.parametrize("language", ["English", "en", "", "null", "英文"])
def test_languages(server, beckett, language):
    assert post(server, beckett.read_bytes(), language=language).json()["text"] == BECKETT


@pytest.mark.parametrize("no", ["false", "False", "0", "off", "no", "f"])
def test_what_is_switched_off_is_accepted(server, beckett, no):
    found = post(server, beckett.read_bytes(), spk=no, timestamp=no, itn=no, hotwords="")
    assert found.json()["text"] == BECKETT
    (segment,) = found.json()["segments"]
    assert list(segment) == ["text", "start", "end"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"timestamp": "character"}, "option_error"),
        ({"num_speakers": "two"}, "option_error"),
        ({"num_speakers": "0"}, "option_error"),
        ({"hotwords": "x" * 201}, "option_error"),
        ({"language": "中文"}, "option_error"),
        ({"spk": "perhaps"}, "option_error"),
        ({"timestmap": "true"}, "option_error"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(server, beckett, fields, code):
    found = post(server, beckett.read_bytes(), **fields)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, code, next(iter(fields)))


def test_how_many_speak_asks_who_speaks(server, beckett):
    (segment,) = post(server, beckett.read_bytes(), num_speakers="1").json()["segments"]
    assert (segment["text"], segment["speaker"]) == (BECKETT, "SPK0")


def test_a_file_is_needed(server):
    found = server.http.post("/asr", files={"language": (None, "en")})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "file")
    found = server.http.post("/asr", data={"language": "en"})  # a form of another type
    assert (found.status_code, found.json()["error"]["code"]) == (400, "malformed_request")


def test_the_model_may_be_named(server, beckett):
    assert post(server, beckett.read_bytes(), model="whisper-1").json()["text"] == BECKETT
    assert post(server, beckett.read_bytes(), model="nobody").status_code == 404


def test_who_says_nothing_gets_what_the_protocol_says():
    options = parse_asr_form({}, complete=True).options
    assert (options.language, options.words, options.speakers, options.itn) == (None, None, False, None)
