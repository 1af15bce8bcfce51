"""POST /v1/audio/transcriptions with OpenAI's own client, and by hand where that client cannot."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_http import FILE_END, FORM_END, Raw, field, file_head, form
from running_server import MODEL, Running, eventually

from asr_serve.protocols.openai.events import Problem, server_sent_event
from asr_serve.protocols.openai.transcription_form import TranscriptionRequest, parse_transcription_form
from asr_serve.protocols.openai.transcription_response import TextDelta
from asr_serve.server.transcription_job import TranscriptionExecutor, TranscriptionJob
from asr_serve.text.tokenizers import token_texts

ROUTE = "/v1/audio/transcriptions"
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
RATE_HZ = 16_000


@pytest.fixture(scope="module")
def long_wav(wav):
    """One minute: sixteen seconds of speech and four of silence, three times over."""
    once = wav(16, 4)
    made = io.BytesIO()
    with wave.open(io.BytesIO(once)) as part, wave.open(made, "wb") as whole:
        whole.setparams(part.getparams())
        frames = part.readframes(part.getnframes())
        for _ in range(3):
            whole.writeframes(frames)
    return made.getvalue()


@pytest.fixture(scope="module")
def long_text(shared_server, long_wav):
    found = shared_server.openai().audio.transcriptions.create(model=MODEL, file=("long.wav", long_wav))
    assert found.text.count("It was the best of times") == 3
    return found.text


# --- the unmodified client ----------------------------------------------------------------------------


def test_json_is_the_default(server, beckett):
    found = server.openai().audio.transcriptions.create(model=MODEL, file=beckett)
    assert found.text == BECKETT
    assert (found.usage.type, found.usage.seconds) == ("duration", 10)
    assert found.logprobs is None
    assert found._request_id.startswith("req_")


def test_verbose_json(server, beckett):
    found = server.openai().audio.transcriptions.create(
        model=MODEL, file=beckett, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (found.text, found.language, found.task) == (BECKETT, "en", "transcribe")
    assert found.usage.seconds == ceil(found.duration) == 10
    (segment,) = found.segments
    assert 0 <= segment.start < segment.end <= found.duration
    assert segment.text == BECKETT
    assert segment.tokens
    assert -1 < segment.avg_logprob < 0
    assert segment.no_speech_prob == 0


@pytest.mark.parametrize(
    ("form", "kind", "begins"),
    [
        ("text", "text/plain", BECKETT),
        ("srt", "application/x-subrip", "1\n00:00:00,102 --> 00:00:"),
        ("vtt", "text/vtt", "WEBVTT\n\n00:00:00.102 --> 00:00:"),
    ],
)
def test_plain_formats(server, beckett, form, kind, begins):
    raw = server.openai().audio.transcriptions.with_raw_response.create(model=MODEL, file=beckett, response_format=form)
    assert raw.headers["content-type"] == f"{kind}; charset=utf-8"
    assert raw.parse().startswith(begins)
    assert raw.parse().endswith("\n")


def test_logprobs_spell_the_text(server, beckett):
    found = server.openai().audio.transcriptions.create(model=MODEL, file=beckett, include=["logprobs"])
    assert "".join(each.token for each in found.logprobs) == found.text
    assert b"".join(bytes(map(int, each.bytes)) for each in found.logprobs).decode() == found.text
    assert all(each.logprob <= 0 for each in found.logprobs)
    assert any(each.logprob < -0.1 for each in found.logprobs)


def test_stream(server, cities):
    client = server.openai()
    events = list(client.audio.transcriptions.create(model=MODEL, file=cities, stream=True, include=["logprobs"]))
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert len(deltas) > 1
    assert "".join(delta.delta for delta in deltas) == done.text
    for said, heard in [(delta.delta, delta.logprobs) for delta in deltas] + [(done.text, done.logprobs)]:
        assert "".join(each.token for each in heard) == said
    assert client.audio.transcriptions.create(model=MODEL, file=cities).text == done.text


def test_stream_with_times(server, cities):
    create = partial(server.openai().audio.transcriptions.create, model=MODEL, response_format="verbose_json")
    *deltas, done = create(file=cities, stream=True)
    whole = create(file=cities)
    assert whole.text == done.text
    times = [(delta.model_extra["start"], delta.model_extra["end"]) for delta in deltas]
    assert times == [(segment.start, segment.end) for segment in whole.segments]


async def test_async_client(shared_server, beckett, cities):
    async with openai.AsyncOpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
        plain, stream = await asyncio.gather(
            client.audio.transcriptions.create(model=MODEL, file=beckett, response_format="text"),
            client.audio.transcriptions.create(model=MODEL, file=cities, stream=True),
        )
        assert plain == BECKETT + "\n"
        events = [event async for event in stream]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text


def test_everything_the_client_can_say(server, cities):
    """Every field that is honoured, as the client writes it."""
    found = server.openai().audio.transcriptions.create(
        model="whisper-1",
        file=("cities.wav", cities.read_bytes()),
        language="en",
        prompt="",
        response_format="json",
        temperature=0.0,
        stream=False,
        include=["logprobs"],
        chunking_strategy={
            "type": "server_vad",
            "threshold": 0.4,
            "prefix_padding_ms": 200,
            "silence_duration_ms": 300,
        },
        extra_body={
            "vad": True,
            "max_segment_ms": 8_000,
            "spk": False,
            "hotwords": " , ",
            "keywords": [""],
            "beam": 2,
            "n_best": 1,
            "long_form": "parallel",
        },
    )
    assert "best of times" in found.text
    auto = server.openai().audio.transcriptions.create(model=MODEL, file=cities, chunking_strategy="auto")
    assert "best of times" in auto.text


def test_chunking_strategy_cuts(server, wav):
    def cuts(**options: Any) -> int:
        found = server.openai().audio.transcriptions.create(
            model=MODEL, file=("talk.wav", speech), response_format="verbose_json", **options
        )
        return len(found.segments)

    speech = wav(20)
    whole = cuts()
    assert cuts(chunking_strategy={"type": "server_vad", "silence_duration_ms": 200}) > whole
    assert cuts(extra_body={"silence_schedule": "inf:200"}) > whole
    assert cuts(extra_body={"max_segment_ms": 5_000}) > whole
    as_json = {"chunking_strategy": '{"type": "server_vad", "silence_duration_ms": 200}'}
    assert cuts(extra_body=as_json) > whole


def test_padding_before_speech(server, beckett):
    def start_s(**strategy: Any) -> float:
        found = server.openai().audio.transcriptions.create(
            model=MODEL,
            file=beckett,
            response_format="verbose_json",
            chunking_strategy={"type": "server_vad", **strategy},
        )
        return found.segments[0].start

    assert start_s(prefix_padding_ms=0) == pytest.approx(start_s() + 0.25)
    assert start_s(prefix_padding_ms=0, threshold=0.95) >= start_s(prefix_padding_ms=0, threshold=0.05)


def test_alternatives_of_a_beam(server, beckett):
    def ask(**data: Any) -> dict[str, Any]:
        return dict(
            server.http.post("/v1/audio/transcriptions", files={"file": beckett.read_bytes()}, data=data).json()
        )

    plain = ask(response_format="verbose_json", beam="4")
    assert "alternatives" not in plain["segments"][0]
    found = ask(response_format="verbose_json", beam="4", n_best="3")
    assert found["text"] == plain["text"]
    for segment in found["segments"]:
        best, *others = segment["alternatives"]
        assert (best["text"], best["words"]) == (segment["text"], segment["words"])
        assert 1 <= len(others) <= 2
        assert len({each["text"] for each in segment["alternatives"]}) == len(segment["alternatives"])
        for each in others:
            assert " ".join(word["word"] for word in each["words"]) == each["text"]
            assert all(segment["start"] <= word["start"] <= word["end"] <= segment["end"] for word in each["words"])
    # The beam may follow the file.
    form = {"response_format": (None, "verbose_json"), "n_best": (None, "3"), "file": beckett.read_bytes()}
    late = server.http.post("/v1/audio/transcriptions", files=form | {"beam": (None, "4")}).json()
    assert [each["alternatives"] for each in late["segments"]] == [each["alternatives"] for each in found["segments"]]


def test_temperature_is_used(server, beckett):
    found = server.openai().audio.transcriptions.create(
        model=MODEL, file=beckett, temperature=0.7, response_format="verbose_json"
    )
    assert {segment.temperature for segment in found.segments} == {0.7}


def test_the_likeliest_token_alone_is_greedy_at_any_temperature(server, beckett):
    for truncation in ({"top_k": 1}, {"top_p": 1e-9}):
        found = server.openai().audio.transcriptions.create(
            model=MODEL, file=beckett, temperature=1, response_format="verbose_json", extra_body=truncation
        )
        assert (found.text, {segment.temperature for segment in found.segments}) == (BECKETT, {1.0})


def test_many_clients_get_their_own(server, beckett, cities):
    clips = [beckett, cities] * 3

    def one(clip):
        return server.openai().audio.transcriptions.create(model=MODEL, file=clip).text

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(one, clips))
    assert len(set(found)) == 2
    assert all((text == BECKETT) == (clip == beckett) for text, clip in zip(found, clips, strict=True))


# --- what is refused ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "Dickens"}, "prompt", "unsupported_option"),
    ({"hotwords": "Dickens", "keywords[]": "Dickens"}, "keywords[]", "option_error"),
    ({"hotwords": ["Dickens", "Beckett"]}, "hotwords", "option_error"),
    ({"prompt": "x" * 16_385}, "prompt", "option_error"),
    ({"hotwords": "x" * 16_385}, "hotwords", "option_error"),
    ({"hotwords": ",".join(f"word{n}" for n in range(10_001))}, "hotwords", "option_error"),
    ({"beam": "9"}, "beam", "option_error"),
    ({"beam": "65"}, "beam", "option_error"),
    ({"beam": "0"}, "beam", "option_error"),
    ({"beam": "-1"}, "beam", "option_error"),
    ({"beam": "2.5"}, "beam", "option_error"),
    ({"beam": "many"}, "beam", "option_error"),
    ({"beam": ["2", "3"]}, "beam", "option_error"),
    ({"n_best": "51", "response_format": "verbose_json"}, "n_best", "option_error"),
    ({"n_best": "2", "beam": "2"}, "n_best", "option_error"),
    ({"n_best": "2", "response_format": "verbose_json", "stream": "true"}, "n_best", "option_error"),
    ({"n_best": "2", "response_format": "verbose_json"}, "n_best", "unsupported_option"),
    ({"n_best": "3", "beam": "2", "response_format": "verbose_json"}, "n_best", "unsupported_option"),
    ({"n_best": "2", "beam": "2", "spk": "true", "response_format": "verbose_json"}, "n_best", "option_error"),
    (
        {"n_best": "2", "beam": "2", "hotwords": "Nagg", "response_format": "verbose_json"},
        "n_best",
        "unsupported_option",
    ),
    ({"top_k": "-2"}, "top_k", "option_error"),
    ({"top_p": "0"}, "top_p", "option_error"),
    ({"max_alternatives": "2"}, "max_alternatives", "option_error"),
    ({"long_form": "parallell"}, "long_form", "option_error"),
    ({"long_form": "sequential"}, "long_form", "unsupported_option"),
    ({"spk": "true"}, "spk", "option_error"),
    ({"spk": "true", "response_format": "text", "stream": "true"}, "spk", "option_error"),
    ({"num_speakers": "2"}, "num_speakers", "option_error"),
    ({"response_format": "diarized_json", "num_speakers": "none"}, "num_speakers", "option_error"),
    ({"response_format": "diarized_json", "min_speakers": "3", "max_speakers": "2"}, "min_speakers", "option_error"),
    ({"known_speaker_names[]": "agent"}, "known_speaker_names[]", "option_error"),
    ({"known_speaker_references[]": "data:,"}, "known_speaker_references[]", "option_error"),
    (
        {
            "response_format": "diarized_json",
            "known_speaker_names[]": "agent",
            "known_speaker_references[]": "http://127.0.0.1/agent.wav",
        },
        "known_speaker_references[]",
        "option_error",
    ),
    ({"response_format": "rttm", "stream": "true"}, "stream", "option_error"),
    ({"response_format": "diarized_json", "include[]": "logprobs"}, "include[]", "option_error"),
    ({"itn": "numbers"}, "itn", "option_error"),
    (
        {"response_format": "verbose_json", "timestamp_granularities[]": "character"},
        "timestamp_granularities[]",
        "option_error",
    ),
    ({"languages[]": ["en", "de"]}, "languages[]", "unsupported_option"),
    ({"response_format": "yaml"}, "response_format", "option_error"),
    ({"response_format": "srt", "stream": "true"}, "stream", "option_error"),
    ({"response_format": "vtt", "stream": "true"}, "stream", "option_error"),
    ({"response_format": "text", "include[]": "logprobs"}, "include[]", "option_error"),
    ({"include[]": "everything"}, "include[]", "option_error"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "option_error"),
    ({"timestamp_granularities[]": ["segment", "word"]}, "timestamp_granularities[]", "option_error"),
    ({"stream": "maybe"}, "stream", "option_error"),
    ({"temperature": "hot"}, "temperature", "option_error"),
    ({"temperature": "1.1"}, "temperature", "option_error"),
    ({"temperature": "nan"}, "temperature", "option_error"),
    ({"temperature": ["0", "0.2"]}, "temperature", "option_error"),
    ({"model": [MODEL, MODEL]}, "model", "option_error"),
    ({"language": "fr"}, "language", "option_error"),
    ({"language": "en", "languages[]": "en"}, "languages[]", "option_error"),
    ({"max_segment_ms": "0"}, "max_segment_ms", "option_error"),
    ({"max_segment_ms": "3600000"}, "max_segment_ms", "option_error"),
    ({"silence_schedule": "5000:1500"}, "silence_schedule", "option_error"),
    ({"chunking_strategy": "manual"}, "chunking_strategy", "option_error"),
    ({"chunking_strategy": '{"threshold": 0.5}'}, "chunking_strategy[type]", "option_error"),
    ({"chunking_strategy": '{"type": "server_vad", "treshold": 1}'}, "chunking_strategy[treshold]", "option_error"),
    ({"chunking_strategy[type]": "semantic_vad"}, "chunking_strategy[type]", "option_error"),
    ({"chunking_strategy[threshold]": "0.5"}, "chunking_strategy[type]", "option_error"),
    (
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"},
        "chunking_strategy[threshold]",
        "option_error",
    ),
    ({"vad": "false", "silence_schedule": "inf:300"}, "vad", "option_error"),
    ({"respnse_format": "json"}, "respnse_format", "option_error"),
]


@pytest.mark.parametrize("before", [True, False], ids=["fields-first", "file-first"])
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[str(each[0])[:60] for each in REFUSED])
def test_refused_by_name(server, beckett, fields, param, code, before):
    pairs = [
        (name, value) for name, values in fields.items() for value in (values if isinstance(values, list) else [values])
    ]
    audio = beckett.read_bytes()
    with Raw(server.port) as raw:
        raw.post(ROUTE, form(pairs, audio) if before else form([], audio, pairs))
        status, headers, body = raw.answer()
    error = json.loads(body)["error"]
    assert status == 400
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert error["message"]
    assert headers["content-type"] == "application/json"


def test_an_unknown_field_gets_the_nearest_name(server, beckett):
    found = server.http.post(ROUTE, files={"file": beckett.read_bytes()}, data={"langauge": "en"})
    assert "did you mean 'language'?" in found.json()["error"]["message"]


@pytest.mark.parametrize("value", ["en", "EN", "English", "en-GB", "英文", "auto", ""])
def test_languages_by_any_name(value):
    assert parse_transcription_form({"language": [value]}, complete=True).options.language in ("en", None)


def test_an_unknown_model_is_not_found(server, beckett):
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai().audio.transcriptions.create(model="moonshine-tiny", file=beckett)
    assert refused.value.code == "model_not_found"
    assert f"did you mean '{MODEL}'?" in refused.value.message
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai().audio.transcriptions.create(model="moonshine-base-en", file=beckett)
    assert refused.value.code == "model_not_loaded"


def test_only_bytes_that_were_sent_are_heard(server, beckett):
    for value in (str(beckett), f"file://{beckett}", "http://127.0.0.1/audio.wav"):
        body = file_head(filename=None) + value.encode() + FILE_END + FORM_END
        with Raw(server.port) as raw:
            raw.post(ROUTE, body)
            status, _, answer = raw.answer()
        assert status == 400
        assert json.loads(answer)["error"]["param"] == "file"
    # The name of a file is a label, whatever it says.
    found = server.http.post(ROUTE, files={"file": (str(beckett), b"not audio")})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "not_audio")
    found = server.http.post(ROUTE, files={"file": ("/etc/passwd", beckett.read_bytes())})
    assert found.json()["text"] == BECKETT


def test_no_file(server):
    found = server.http.post(ROUTE, files={"model": (None, MODEL)})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("audio", "code"),
    [
        (b"", "empty_audio"),
        (b"\0" * 100_000, "not_audio"),
        (b"RIFF\xff\xff\xff\xffWAVE", "not_audio"),
        (b"#EXTM3U\nhttp://127.0.0.1:9/a.wav\n", "not_audio"),
    ],
)
def test_bad_audio(server, audio, code):
    found = server.http.post(ROUTE, files={"file": ("a.wav", audio)})
    assert found.status_code == 400
    assert found.json()["error"]["code"] in (code, "unsupported_audio", "truncated_audio", "corrupt_audio")


def test_bad_audio_has_a_status_in_a_stream_too(server):
    with pytest.raises(openai.BadRequestError):
        server.openai().audio.transcriptions.create(model=MODEL, file=("a.wav", b"no audio"), stream=True)


def test_too_long_and_too_large(serve, beckett):
    server = serve(max_duration_s=5, max_body_bytes=1_000_000)
    found = server.http.post(ROUTE, files={"file": beckett.read_bytes()})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "audio_too_long")
    with pytest.raises(openai.APIStatusError) as refused:
        server.openai().audio.transcriptions.create(model=MODEL, file=("a.wav", bytes(3_000_000)))
    assert (refused.value.status_code, refused.value.code) == (413, "audio_too_large")
    with Raw(server.port) as raw:  # no length said beforehand
        raw.head(ROUTE)
        raw.chunk(file_head())
        with pytest.raises(OSError):  # noqa: PT012  which of the chunks meets the closed door is chance
            for _ in range(200):
                raw.chunk(bytes(100_000))
            raise ConnectionError("everything was taken")
    server.expect_empty()


# --- while the upload is under way --------------------------------------------------------------------


def test_text_comes_while_the_upload_goes_on(server, long_wav, long_text):
    half = len(long_wav) // 2
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("model", MODEL) + field("stream", "true") + file_head())
        raw.chunk(long_wav[:half])
        head = raw.until(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0]
        assert b"text/event-stream" in head
        first = raw.event()
        assert first["delta"].startswith("It was the best of times")
        raw.chunk(long_wav[half:])
        raw.chunk(FILE_END + FORM_END)
        raw.end()
        said = first["delta"]
        while (event := raw.event())["type"] == "transcript.text.delta":
            said += event["delta"]
        raw.until(b"0\r\n\r\n")
    assert event == {"type": "transcript.text.done", "text": said}
    assert said == long_text


def test_an_upload_that_is_heard_before_it_is_whole(server, long_wav, long_text):
    """Without stream, too: the answer is there soon after the last byte."""
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + long_wav[:-20_000])
        eventually(lambda: server.held()["sessions"] == 1)
        eventually(lambda: server.engines.get().client.describe()["audio_s"] > 0)
        raw.chunk(long_wav[-20_000:] + FILE_END + field("model", MODEL) + FORM_END)
        raw.end()
        status, _, body = raw.answer()
    assert (status, json.loads(body)["text"]) == (200, long_text)


def test_fields_after_the_file_count(server, beckett, long_wav, cities):
    """As curl -F file=@... -F response_format=... sends them, in one go and slowly."""
    for audio, slow in ((beckett.read_bytes(), False), (beckett.read_bytes(), True), (long_wav, True)):
        after = [("response_format", "verbose_json"), ("max_segment_ms", "6000")]
        with Raw(server.port) as raw:
            raw.head(ROUTE)
            raw.chunk(file_head() + audio)
            if slow:
                time.sleep(0.3)  # longer than anybody waits for the rest of a short upload
            raw.chunk(FILE_END + b"".join(field(*each) for each in after) + FORM_END)
            raw.end()
            status, _, body = raw.answer()
        found = json.loads(body)
        assert status == 200
        assert len(found["segments"]) > 1
        assert all(segment["end"] - segment["start"] <= 6 for segment in found["segments"])


SAYS_NOTHING_NEW = [("model", "whisper-1"), ("language", "English"), ("max_segment_ms", "28000")]


@pytest.mark.parametrize("late", SAYS_NOTHING_NEW)
def test_what_a_streamed_file_was_heard_by_is_no_change(server, long_wav, long_text, late):
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("stream", "true") + file_head() + long_wav)
        raw.until(b"\r\n\r\n")
        assert raw.event()["type"] == "transcript.text.delta"
        raw.chunk(FILE_END + field(*late) + FORM_END)
        raw.end()
        while (event := raw.event())["type"] == "transcript.text.delta":
            pass
    assert event["text"] == long_text


@pytest.mark.parametrize("late", [*SAYS_NOTHING_NEW, ("max_segment_ms", "6000")])
def test_what_is_heard_again_and_what_is_not(server, long_wav, monkeypatch, late):
    begun, users = [], []
    begin, over = TranscriptionExecutor.start, TranscriptionJob.wait_closed

    async def noted(job: TranscriptionJob) -> None:
        await over(job)
        users.append(server.engines.get()._users)

    monkeypatch.setattr(TranscriptionExecutor, "start", lambda *given: begun.append(given) or begin(*given))
    monkeypatch.setattr(TranscriptionJob, "wait_closed", noted)
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + long_wav)
        eventually(lambda: begun)
        raw.chunk(FILE_END + field(*late) + FORM_END)
        raw.end()
        assert raw.answer()[0] == 200
    server.expect_empty()
    again = late[1] == "6000"
    assert len(begun) == 1 + again
    assert users == [1] * (1 + again)  # between two jobs, too, nobody may close the engine


def test_stream_asked_for_after_the_file(server, beckett):
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + beckett.read_bytes())
        time.sleep(0.3)
        raw.chunk(FILE_END + field("stream", "true") + FORM_END)
        raw.end()
        raw.until(b"\r\n\r\n")
        assert raw.event() == {"type": "transcript.text.delta", "delta": BECKETT}
        assert raw.event() == {"type": "transcript.text.done", "text": BECKETT}


@pytest.mark.parametrize(
    "late", [("temprature", "0"), ("max_segment_ms", "5000"), ("model", "nobody"), ("include[]", "logprobs")]
)
def test_a_late_field_that_comes_too_late_is_an_event(server, long_wav, late):
    """Text is out: an error can only be told in the stream."""
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("stream", "true") + file_head() + long_wav)
        raw.until(b"\r\n\r\n")
        assert raw.event()["type"] == "transcript.text.delta"
        raw.chunk(FILE_END + field(*late) + FORM_END)
        raw.end()
        while "delta" in (event := raw.event()):
            pass
        raw.until(b"0\r\n\r\n")
    assert event["type"] == "error"
    assert event["error"]["type"] == "invalid_request_error"
    assert event["error"]["message"]


def test_the_client_library_raises_an_error_event():
    """It sends its whole request before it reads, so the answer is played to it from a record."""
    error = {"type": "error", "error": Problem("the decoder gave up", "invalid_request_error", None, "corrupt_audio")}
    record = server_sent_event(TextDelta("Ever tried,")) + b"event: error\n" + server_sent_event(error)
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + record

    def play() -> None:
        connection, _ = door.accept()
        with connection:
            while b"--\r\n" not in connection.recv(65_536)[-10:]:
                pass
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=play).start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            events = client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"audio"), stream=True)
            assert next(events).delta == "Ever tried,"
            with pytest.raises(openai.APIError, match="the decoder gave up"):
                next(events)


def test_a_file_that_is_cut_off(server, long_wav):
    half = long_wav[: len(long_wav) // 2]
    found = server.http.post(ROUTE, files={"file": half})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "truncated_audio")


def test_bad_audio_is_told_at_once(server):
    """Without waiting for the rest of it: a WAV of no channels."""
    header = (b"RIFF", 1 << 30, b"WAVE", b"fmt ", 16, 1, 0, RATE_HZ, 0, 0, 16, b"data", 1 << 30)
    no_channels = struct.pack("<4sI4s4sIHHIIHH4sI", *header)
    with Raw(server.port) as raw:
        raw.head(ROUTE, 1 << 30)
        raw.socket.sendall(file_head() + no_channels + bytes(200_000))
        status, _, body = raw.answer()
    assert (status, json.loads(body)["error"]["code"]) == (400, "unsupported_audio")


def test_a_bad_field_is_told_at_once(server):
    with Raw(server.port) as raw:
        raw.head(ROUTE, 50_000_000)
        raw.socket.sendall(field("temperature", "9") + file_head() + bytes(100_000))
        status, _, body = raw.answer()
    assert (status, json.loads(body)["error"]["param"]) == (400, "temperature")


def test_an_upload_that_stands_still(serve):
    server = serve(upload_idle_s=0.3)
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + bytes(10))
        status, _, body = raw.answer()
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    server.expect_empty()


# --- clients that go away -----------------------------------------------------------------------------


def gone(server: Running) -> float:
    return server.counted("asr_serve_requests_total", route=ROUTE, method="POST", status="499")


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("share", [0.6, 1.0], ids=["half", "whole"])
def test_a_client_that_leaves_stops_the_work(server, long_wav, stream, share):
    before = gone(server)
    audio = long_wav * 4  # a header that is too short is nothing to a stream
    body = field("stream", stream) + file_head() + audio + FILE_END + FORM_END
    with Raw(server.port) as raw:
        raw.head(ROUTE, len(body))
        raw.socket.sendall(body[: int(share * len(body))])
        eventually(lambda: server.held()["pages"] > 0)
    server.expect_empty()
    eventually(lambda: gone(server) == before + 1)
    assert server.counted("asr_serve_rejections_total", reason="client_gone") >= 1


def test_leaving_before_the_file(server):
    before = gone(server)
    with Raw(server.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("model", MODEL))
        eventually(lambda: server.held()["inside"] == 1)
    server.expect_empty()
    eventually(lambda: gone(server) == before + 1)


def test_many_who_leave_and_stay(server, beckett, long_wav):
    answers: list[str] = []

    def leave(at: float) -> None:
        body = form([("stream", "true")], long_wav)
        with Raw(server.port) as raw:
            raw.head(ROUTE, len(body))
            raw.socket.sendall(body[: int(at * len(body))])
            time.sleep(0.2 * at)

    def stay() -> None:
        answers.append(server.openai().audio.transcriptions.create(model=MODEL, file=beckett).text)

    threads = [threading.Thread(target=leave, args=(n / 8,)) for n in range(1, 9)]
    threads += [threading.Thread(target=stay) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [BECKETT] * 8
    server.expect_empty()


# --- form and tokens, without a server ----------------------------------------------------------------


def test_a_form_says_nothing_by_default():
    found = parse_transcription_form({}, complete=True)
    assert found == TranscriptionRequest(None, found.options)
    assert found.options.priority == "interactive"


def test_what_a_later_field_may_put_right_passes_at_first():
    half = {"timestamp_granularities[]": ["word"]}
    assert parse_transcription_form(half, complete=False).response_format == "json"
    with pytest.raises(Exception, match="verbose_json"):
        parse_transcription_form(half, complete=True)
    parse_transcription_form({"chunking_strategy[threshold]": ["0.5"]}, complete=False)


@pytest.mark.parametrize("form", ["json", "text", "verbose_json"])
def test_segments_are_openais_default_and_no_mistake_where_there_is_no_place_for_times(form):
    sent = {"timestamp_granularities[]": ["segment"], "response_format": [form]}
    assert parse_transcription_form(sent, complete=True).response_format == form


def test_tokens_that_share_a_character():
    pieces = [b" caf", b"\xc3", b"\xa9", b" \xf0\x9f", b"\x98\x80", b"\xff"]

    def spell(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace").strip()

    found = token_texts(range(len(pieces)), spell)
    assert "".join(found) == spell(list(range(len(pieces))))
    assert found[:3] == ["caf", "", "é"]


PIECES = [b" ", b"a", b" the", b"\xc3", b"\xa9", b" \xf0\x9f", b"\x98\x80", b"\xff", "\u3042".encode(), b"", b". "]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_any_tokens_add_up_to_their_text(tokens):
    def spell(some: list[int]) -> str:
        return b"".join(PIECES[token] for token in some).decode(errors="replace").strip()

    found = token_texts(tokens, spell)
    assert len(found) == len(tokens)
    assert "".join(found) == spell(tokens)


def test_a_long_text_is_spelt_in_linear_time():
    spelt = 0

    def spell(some: list[int]) -> str:
        nonlocal spelt
        spelt += len(some)
        return "".join(" word" for _ in some).strip()

    assert len(token_texts(range(10_000), spell)) == 10_000
    assert spelt < 50_000
