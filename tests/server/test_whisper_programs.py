"""POST /asr and /detect-language of whisper-asr-webservice, and POST /inference of whisper.cpp, on the real server."""

from __future__ import annotations

import json

import pytest
from raw_http import told
from running_server import eventually

from asr_serve.audio.reader import read_audio

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."


@pytest.fixture(scope="module")
def pcm(packaged_speech):
    """What Bazarr sends with encode=false."""
    return (read_audio(packaged_speech / "beckett.wav") * 32_767).astype("<i2").tobytes()


def post(server, path, audio, field="audio_file", name="beckett.wav", **data):
    return server.http.post(path, files={field: (name, audio)}, data=data)


@pytest.mark.parametrize("complete", [True, False])
def test_bazarrs_request_is_answered_with_subtitles(server, pcm, complete):
    """Short as it is, or so slow that it is transcribed while it arrives."""
    query = "/asr?task=transcribe&language=en&output=srt&encode=false&video_file=%2Ftv%2Fshow.mkv"
    if complete:
        answer = post(server, query, pcm, name="audio_file")
    else:
        head, tail = server.http.build_request("POST", query, files={"audio_file": ("audio_file", pcm)}), []
        body = head.read()
        at = len(body) // 2

        def slowly():
            yield body[:at]
            eventually(lambda: server.held()["users"])
            tail.append(1)
            yield body[at:]

        answer = server.http.post(query, content=slowly(), headers={"content-type": head.headers["content-type"]})
        assert tail
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["asr-engine"] == "asr-serve"
    assert answer.headers["content-disposition"] == 'attachment; filename="audio_file.srt"'
    assert answer.headers["x-ignored"] == "video_file"
    lines = answer.text.splitlines()
    assert (lines[0], lines[2]) == ("1", "Ever tried, ever failed,")


def test_the_file_field_tells_the_programs_apart(server, beckett):
    audio = beckett.read_bytes()
    plain = post(server, "/asr?output=txt", audio)
    assert (plain.status_code, plain.text) == (200, f"{BECKETT}\n")
    assert post(server, "/asr", audio, field="file").json()["text"] == BECKETT
    answer = post(server, "/asr?output=json&word_timestamps=true", audio).json()
    assert (answer["language"], answer["text"]) == ("en", BECKETT)
    (segment,) = answer["segments"]
    assert "".join(word["word"] for word in segment["words"]) == BECKETT
    status, code, param, message = refusal(post(server, "/asr?language=en", audio, field="file"))
    assert (status, code, param) == (400, "option_error", "language")  # FunASR's options are in its form
    assert "belongs in the form" in message
    both = server.http.post("/asr", files=[("file", ("a.wav", audio)), ("audio_file", ("b.wav", audio))])
    assert refusal(both)[:2] == (400, "malformed_request")


def refusal(answer):
    return told(answer.status_code, dict(answer.headers), answer.content)


@pytest.mark.parametrize(
    ("path", "field", "data", "code", "param"),
    [
        ("/asr?output=ass", "audio_file", {}, "option_error", "output"),
        ("/asr?task=translate", "audio_file", {}, "unsupported_option", "task"),
        ("/asr?initial_prompt=Ada", "audio_file", {}, "unsupported_option", "initial_prompt"),
        ("/asr?language=fr", "audio_file", {}, "option_error", "language"),
        ("/detect-language?encode=2", "audio_file", {}, "option_error", "encode"),
        ("/detect-language", "audio_file", {}, "unsupported_option", "model"),
        ("/detect-language", "file", {}, "malformed_request", None),
        ("/inference", "audio_file", {}, "malformed_request", None),
        ("/inference", "file", {"translate": "true"}, "unsupported_option", "translate"),
        ("/inference", "file", {"prompt": "Ada"}, "unsupported_option", "prompt"),
        ("/inference", "file", {"response_format": "xml"}, "option_error", "response_format"),
        ("/inference", "file", {"duration": "5000"}, "unsupported_option", "duration"),
        ("/inference?language=en", "file", {}, "option_error", "language"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(server, beckett, path, field, data, code, param):
    status, found, named, _ = refusal(post(server, path, beckett.read_bytes(), field=field, **data))
    assert (status, found, named) == (400, code, param)


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [("/asr", "file", "file"), ("/detect-language", "audio_file", "audio_file"), ("/inference", "file", "file")],
)
def test_a_file_is_needed(server, path, field, param):
    assert refusal(server.http.post(path, files={"other": (None, "x")}))[:3] == (400, "option_error", param)
    text = refusal(server.http.post(path, files={field: (None, "/etc/passwd")}))
    assert text[:3] == (400, "option_error", param)
    assert "came as text" in text[3]


def test_raw_pcm_without_a_sample_is_no_audio(server):
    status, code, _, _ = refusal(post(server, "/asr?encode=false", b""))
    assert (status, code) == (400, "empty_audio")


def test_whisper_cpps_client_gets_its_answers(server, beckett):
    audio = beckett.read_bytes()
    asked = {"temperature": "0.0", "temperature_inc": "0.2", "response_format": "json", "entropy_thold": "2.4"}
    answer = post(server, "/inference", audio, field="file", **asked)
    assert (answer.status_code, answer.json()) == (200, {"text": f"{BECKETT}\n"})
    assert answer.headers["x-ignored"] == "entropy_thold"
    assert post(server, "/inference", audio, field="file", response_format="text").text == f"{BECKETT}\n"
    verbose = post(server, "/inference", audio, field="file", response_format="verbose_json").json()
    assert (verbose["task"], verbose["language"]) == ("transcribe", "english")
    assert [word["word"] for word in verbose["segments"][0]["words"]] == BECKETT.split()
    vtt = post(server, "/inference", audio, field="file", response_format="vtt")
    assert (vtt.headers["content-type"], vtt.text[:7]) == ("text/vtt; charset=utf-8", "WEBVTT\n")


def test_these_routes_need_the_key(serve, beckett):
    server = serve(api_keys=("secret",))
    for path, field in (("/asr", "audio_file"), ("/detect-language", "audio_file"), ("/inference", "file")):
        assert refusal(post(server, path, beckett.read_bytes(), field=field))[:2] == (401, "invalid_api_key")
    allowed = server.http.post(
        "/inference", files={"file": beckett.read_bytes()}, headers={"authorization": "Bearer secret"}
    )
    assert json.loads(allowed.text)["text"] == f"{BECKETT}\n"
