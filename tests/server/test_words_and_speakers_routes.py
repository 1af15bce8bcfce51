"""Words and who says them, over every route that tells of recordings, asked by OpenAI's own client and by hand."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from raw_http import Raw, form
from running_server import MODEL, PAID, PAID_WRITTEN, Running

from asr_serve.audio.reader import read_audio

ROUTE = "/v1/audio/transcriptions"
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
NAGG, NELL = "Do you hear me?", "laugh less heartily, so we have still that resource."


needs_speakers = pytest.mark.usefixtures("hears_speakers")


@pytest.fixture(scope="module")
def endgame(packaged_speech: Path) -> Path:
    """Two people, 28 s."""
    return packaged_speech / "endgame_nagg_nell.wav"


@pytest.fixture(scope="module")
def cut(endgame: Path) -> Callable[[float, float], bytes]:
    """`cut(4.9, 7.9)`: these seconds of it, as a file."""
    pcm = read_audio(endgame)

    def made(start_s: float, end_s: float) -> bytes:
        return as_wav(pcm[int(start_s * 16_000) : int(end_s * 16_000)])

    return made


def as_wav(pcm: np.ndarray) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((pcm * 32_767).astype("<i2").tobytes())
    return made.getvalue()


def data_url(audio: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(audio).decode()}"


def expect_in_order(words: list[Any], start_s: float, end_s: float) -> None:
    times = [start_s, *(time for word in words for time in (word.start, word.end)), end_s]
    assert times == sorted(times)
    assert all(word.start < word.end for word in words)


# --- words ----------------------------------------------------------------------------------------------------


def test_words_through_openais_client(server: Running, cities: Path) -> None:
    create = partial(
        server.openai().audio.transcriptions.create, model=MODEL, file=cities, response_format="verbose_json"
    )
    found = create(timestamp_granularities=["word"])
    assert " ".join(word.word for word in found.words) == found.text
    expect_in_order(found.words, 0, found.duration)
    assert all(0 < word.confidence <= 1 for word in found.words)
    assert len(found.segments) > 1
    inside = [word for segment in found.segments for word in segment.words]
    assert [word["word"] for word in inside] == [word.word for word in found.words]
    for segment in found.segments:
        assert segment.start <= segment.words[0]["start"] < segment.words[-1]["end"] <= segment.end
    both = create(timestamp_granularities=["word", "segment"])
    assert (both.words, both.segments) == (found.words, found.segments)
    segments = create(timestamp_granularities=["segment"])
    assert segments.words is None
    assert all("words" not in (segment.model_extra or {}) for segment in segments.segments)
    assert segments.text == found.text
    nobody_asked = create()  # as FunASR's clients do
    assert nobody_asked.words is None
    assert nobody_asked.segments == found.segments


def test_words_in_a_stream(server: Running, cities: Path) -> None:
    create = partial(
        server.openai().audio.transcriptions.create,
        model=MODEL,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    *deltas, done = create(file=cities, stream=True)
    whole = create(file=cities)
    assert done.text == whole.text
    assert [delta.words for delta in deltas] == [segment.words for segment in whole.segments]


@pytest.mark.parametrize("first", [True, False], ids=["fields-first", "file-first"])
def test_fields_behind_the_file_count_too(server: Running, beckett: Path, first: bool) -> None:
    """What is heard is begun anew where they want words, or others."""
    fields = [("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]
    audio = beckett.read_bytes()
    with Raw(server.port) as raw:
        raw.post(ROUTE, form(fields, audio) if first else form([], audio, fields))
        status, _, body = raw.answer()
    assert status == 200
    found = json.loads(body)
    assert " ".join(word["word"] for word in found["words"]) == found["text"] == BECKETT


def test_formats_of_words(server: Running, beckett: Path) -> None:
    create = partial(server.openai().audio.transcriptions.with_raw_response.create, model=MODEL, file=beckett)
    words = create(response_format="verbose_json", timestamp_granularities=["word"]).parse().words
    ctm = create(response_format="ctm")
    assert ctm.headers["content-type"] == "text/plain; charset=utf-8"
    lines = [line.split() for line in ctm.text.splitlines() if line and not line.startswith(";;")]
    assert [line[4] for line in lines] == [word.word for word in words]
    assert [float(line[2]) for line in lines] == pytest.approx([word.start for word in words], abs=0.011)
    grid = create(response_format="textgrid").text
    assert 'class = "IntervalTier"' in grid
    assert all(f'"{word.word}"' in grid for word in words)
    karaoke = create(response_format="vtt", timestamp_granularities=["word"]).text
    assert karaoke.startswith("WEBVTT")
    assert "<00:00:01." in karaoke
    assert "<00:00:01." not in create(response_format="vtt").text
    assert create(response_format="karaoke").text == karaoke


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("monday 7.wav", "monday_7"),
        ("calls/tuesday; late.v2.wav", "tuesday_late.v2"),
        ("C:\\calls\\Mittwoch früh.wav", "Mittwoch_früh"),
        ("nameless", "nameless"),
    ],
)
def test_a_recording_is_told_by_its_files_name(server: Running, beckett: Path, sent: str, told: str) -> None:
    create = server.openai().audio.transcriptions.with_raw_response.create
    ctm = create(model=MODEL, file=(sent, beckett.read_bytes()), response_format="ctm").text
    assert {line.split()[0] for line in ctm.splitlines()} == {told}


# --- the written form ------------------------------------------------------------------------------------------


def test_numbers_as_one_writes_them(server: Running, paid_wav: bytes) -> None:
    create = partial(server.openai().audio.transcriptions.create, model=MODEL, file=("paid.wav", paid_wav))
    assert create().text == PAID
    assert create(extra_body={"itn": True}).text == PAID_WRITTEN
    found = create(response_format="verbose_json", extra_body={"itn": True}, timestamp_granularities=["word"])
    plain = create(response_format="verbose_json", timestamp_granularities=["word"])
    assert found.text == PAID_WRITTEN
    assert found.segments[0].spoken == PAID
    assert {word.word: word.spoken for word in found.words if "spoken" in word.model_extra} == {
        "$25": "twenty five dollars",
        "1999.": "nineteen ninety nine",
    }
    times = {word.word: (word.start, word.end) for word in plain.words}
    written = {word.word: (word.start, word.end) for word in found.words}
    assert written["$25"] == (times["twenty"][0], times["dollars"][1])
    assert "spoken" not in plain.segments[0].model_extra
    logprobs = create(include=["logprobs"], extra_body={"itn": True})
    assert "".join(each.token for each in logprobs.logprobs) == PAID  # those of what was said
    answer = server.http.post("/asr", files={"file": paid_wav}, data={"itn": "true"}).json()
    assert answer["text"] == PAID_WRITTEN
    assert [word["word"] for word in answer["segments"][0]["words"]] == PAID_WRITTEN.split()


# --- who speaks -----------------------------------------------------------------------------------------------


@needs_speakers
def test_diarized_through_openais_client(server: Running, endgame: Path) -> None:
    create = partial(server.openai().audio.transcriptions.create, model=MODEL, response_format="diarized_json")
    found = create(file=endgame, chunking_strategy="auto")
    assert {segment.speaker for segment in found.segments} == {"A", "B"}
    assert [segment.id for segment in found.segments[:2]] == ["seg_001", "seg_002"]
    assert found.segments[0].speaker == "A"
    assert found.segments[0].text.startswith(NAGG)
    (answer,) = [segment for segment in found.segments if segment.text.lower().endswith(NELL)][-1:]
    assert answer.speaker == "B"
    assert " ".join(segment.text for segment in found.segments) == found.text
    assert all(one.end <= other.start for one, other in pairwise(found.segments))
    assert found.usage.seconds == 29
    *events, done = create(file=endgame, stream=True)
    deltas, segments = events[::2], events[1::2]
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert {event.type for event in segments} == {"transcript.text.segment"}
    assert [delta.segment_id for delta in deltas] == [segment.id for segment in segments]
    assert [segment.model_dump() for segment in segments] == [segment.model_dump() for segment in found.segments]
    assert "".join(delta.delta for delta in deltas) == done.text == found.text


@pytest.mark.slow
@needs_speakers
def test_known_speakers_through_openais_client(server: Running, endgame: Path, cut: Any) -> None:
    create = partial(
        server.openai().audio.transcriptions.create, model=MODEL, file=endgame, response_format="diarized_json"
    )
    plain = create()
    named = {"A": "Nagg", "B": "Nell"}
    nagg, nell = data_url(cut(4.9, 7.9)), data_url(cut(8.7, 11.3))
    both = create(known_speaker_names=["Nell", "Nagg"], known_speaker_references=[nell, nagg])
    assert [each.speaker for each in both.segments] == [named[each.speaker] for each in plain.segments]
    one = create(known_speaker_names=["Nell"], known_speaker_references=[nell])
    assert [each.speaker for each in one.segments] == [{"A": "A", "B": "Nell"}[each.speaker] for each in plain.segments]


@needs_speakers
@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (lambda cut: b"RIFF", "cannot be read"),
        (lambda cut: cut(4.9, 5.9), "2 to 10 s"),
        (lambda cut: cut(0, 11), "2 to 10 s"),
        (lambda cut: as_wav(np.zeros(48_000, np.float32)), "there is no speech"),
    ],
    ids=["no-audio", "short", "long", "silence"],
)
def test_references_that_tell_nothing(server: Running, endgame: Path, cut: Any, reference: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        server.openai().audio.transcriptions.create(
            model=MODEL,
            file=endgame,
            response_format="diarized_json",
            known_speaker_names=["Nagg"],
            known_speaker_references=[data_url(reference(cut))],
        )
    assert (refused.value.param, refused.value.code) == ("known_speaker_references[]", "option_error")


@pytest.mark.slow
@needs_speakers
def test_speakers_as_funasr_tells_them(server: Running, endgame: Path) -> None:
    found = server.openai().audio.transcriptions.create(
        model=MODEL, file=endgame, response_format="verbose_json", extra_body={"spk": True, "num_speakers": 2}
    )
    speakers = [segment.speaker for segment in found.segments]
    assert set(speakers) == {"SPK0", "SPK1"}
    for segment in found.segments:
        assert {word["speaker"] for word in segment.words} == {segment.speaker}
    answer = server.http.post("/asr", files={"file": endgame.read_bytes()}, data={"spk": "true"}).json()
    assert [segment["speaker"] for segment in answer["segments"]] == speakers
    assert list(answer["segments"][0]) == ["text", "start", "end", "speaker", "words"]
    one = server.http.post(
        "/asr", files={"file": endgame.read_bytes()}, data={"spk": "1", "num_speakers": "1", "timestamp": "0"}
    ).json()
    assert {segment["speaker"] for segment in one["segments"]} == {"SPK0"}
    assert "words" not in one["segments"][0]


@pytest.mark.slow
@needs_speakers
def test_speakers_in_files(server: Running, endgame: Path) -> None:
    create = partial(server.openai().audio.transcriptions.with_raw_response.create, model=MODEL, file=endgame)
    voices = create(response_format="vtt", extra_body={"spk": True}).text
    assert "<v SPEAKER_00>" in voices
    assert "<v SPEAKER_01>" in voices
    turns = [line.split() for line in create(response_format="rttm").text.splitlines()]
    assert {line[0] for line in turns} == {"SPEAKER"}
    assert {line[7] for line in turns} == {"SPEAKER_00", "SPEAKER_01"}
    assert [float(line[3]) for line in turns] == sorted(float(line[3]) for line in turns)
    assert {line[1] for line in turns} == {"endgame_nagg_nell"}
    assert create(response_format="vtt", extra_body={"num_speakers": 2}).text == voices


@needs_speakers
@pytest.mark.parametrize(
    "heard",
    [
        lambda cut: as_wav(np.zeros(5 * 16_000, np.float32)),
        lambda cut: as_wav(0.1 * np.random.default_rng(3).standard_normal(5 * 16_000).astype(np.float32)),
        lambda cut: as_wav(0.3 * np.sin(np.arange(5 * 16_000) * 0.172).astype(np.float32)),
    ],
    ids=["silence", "noise", "tone"],
)
def test_nobody_speaks(server: Running, cut: Any, heard: Any) -> None:
    found = server.openai().audio.transcriptions.create(
        model=MODEL, file=("nobody.wav", heard(cut)), response_format="diarized_json"
    )
    assert (found.text, found.segments) == ("", [])


@needs_speakers
def test_a_second_of_speech_is_one_speakers(server: Running, cut: Any) -> None:
    found = server.openai().audio.transcriptions.create(
        model=MODEL, file=("second.wav", cut(2.4, 3.4)), response_format="diarized_json"
    )
    assert {segment.speaker for segment in found.segments} == {"A"}


@needs_speakers
def test_a_client_that_leaves_takes_its_speakers_along(server: Running, endgame: Path) -> None:
    """Nothing of it is left in the engine: the fixture looks."""
    with Raw(server.port) as raw:
        raw.post(ROUTE, form([("response_format", "diarized_json")], endgame.read_bytes()))
