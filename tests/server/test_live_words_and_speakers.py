"""Words and who says them while somebody speaks: our own stream, our client, FunASR's sockets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from running_server import PAID, PAID_WRITTEN, Running
from stream_client import TRANSPORTS, Event, WebSocket, pcm_of, pour
from test_funasr_websocket import STARTED, calling, expect_words
from test_words_and_speakers_routes import needs_speakers
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.api.client.stream import StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.audio.reader import read_audio
from asr_serve.protocols.stream.server_events import SpeakersEvent

NAGG = "Do you hear me?"


@pytest.fixture(scope="module")
def endgame_pcm(packaged_speech: Path) -> bytes:
    """Two people, 28 s."""
    return pcm_of(packaged_speech / "endgame_nagg_nell.wav")


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def expect_words_of(segment: Event) -> None:
    words = segment["words"]
    assert " ".join(word["text"] for word in words) == segment["text"]
    times = [time for word in words for time in (word["start_s"], word["end_s"])]
    whole = [segment["start_s"], *times, segment["end_s"]]
    assert whole == sorted(whole)
    assert all(0 < word["confidence"] <= 1 for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSPORTS, ids=lambda kind: kind.__name__)
@pytest.mark.repeats(kind={*TRANSPORTS[1:]})
def test_words_of_our_stream(server: Running, endgame_pcm: bytes, kind: Any) -> None:
    with kind(server.port, words="true") as line:
        pour(line, endgame_pcm)
        line.end()
        events = line.rest()
    segments = of(events, "segment")
    assert len(segments) > 1
    for segment in segments:
        expect_words_of(segment)
        assert not {"speaker", "spoken"} & set(segment)
    assert not of(events, "speakers")
    with kind(server.port) as line:
        pour(line, endgame_pcm)
        line.end()
        plain = of(line.rest(), "segment")
    assert [segment["text"] for segment in plain] == [segment["text"] for segment in segments]
    assert all("words" not in segment for segment in plain)


def test_numbers_as_one_writes_them(server: Running, paid_wav: bytes) -> None:
    """What is locked is what was said: a segment has that beside its text."""
    pcm = (read_audio(paid_wav) * 32_767).astype("<i2").tobytes()
    with WebSocket(server.port, itn="true", words="true") as line:
        pour(line, pcm)
        line.end()
        events = line.rest()
    (segment,) = of(events, "segment")
    assert (segment["text"], segment["spoken"]) == (PAID_WRITTEN, PAID)
    expect_words_of(segment)
    assert PAID.startswith("".join(event["text"] for event in of(events, "locked")))
    for path in ("/", "/ws"):
        with calling(server, path) as caller:
            assert caller.ask("ITN:true") == {"event": "itn_set", "itn": True, "used": True}
            assert caller.ask("START") == STARTED
            caller.pour(pcm)
            caller.send("STOP")
            assert [each["text"] for each in caller.until_stopped()[-2]["sentences"]] == [PAID_WRITTEN]


@needs_speakers
def test_speakers_of_our_stream(server: Running, endgame_pcm: bytes) -> None:
    with WebSocket(server.port, speakers="true") as line:
        pour(line, endgame_pcm)
        line.end()
        events = line.rest()
    segments = of(events, "segment")
    assert all("words" not in segment for segment in segments)
    assert segments[0]["speaker"] == "SPEAKER_00"
    said_by = [segment["speaker"] for segment in segments]
    (told,) = of(events, "speakers")
    assert events.index(told) == events.index(of(events, "end")[0]) - 1
    for other in told["segments"]:
        assert said_by[other["index"]] != other["speaker"]
        said_by[other["index"]] = other["speaker"]
    assert set(said_by) == {"SPEAKER_00", "SPEAKER_01"}
    (asks,) = [i for i, segment in enumerate(segments) if "Do you remember" in segment["text"]]
    *_, praises = [i for i, segment in enumerate(segments) if "that's a good story" in segment["text"]]
    assert said_by[asks] != said_by[praises]


@needs_speakers
def test_a_number_of_speakers_holds_at_the_end(server: Running, endgame_pcm: bytes) -> None:
    with WebSocket(server.port, num_speakers="1") as line:
        pour(line, endgame_pcm)
        line.end()
        events = line.rest()
    said_by = [segment["speaker"] for segment in of(events, "segment")]
    assert len(set(said_by)) > 1, "while it was heard"
    (told,) = of(events, "speakers")
    for other in told["segments"]:
        said_by[other["index"]] = other["speaker"]
    assert set(said_by) == {"SPEAKER_00"}


@needs_speakers
@pytest.mark.parametrize("path", ["/", "/ws"])
def test_a_number_of_speakers_for_funasrs_sockets(server: Running, endgame_pcm: bytes, path: str) -> None:
    with calling(server, path, num_speakers="1") as caller:
        assert caller.ask("START") == STARTED
        caller.pour(endgame_pcm)
        caller.send("STOP")
        *_, final, _ = caller.until_stopped()
    assert {sentence["spk"] for sentence in final["sentences"]} == {0}


@needs_speakers
def test_speakers_of_funasrs_runtime_protocol(server: Running, endgame_pcm: bytes) -> None:
    with calling(server, num_speakers="1") as caller:
        caller.send('{"mode": "offline", "is_speaking": true}')
        caller.pour(endgame_pcm)
        answer = caller.ask('{"is_speaking": false}')
    assert answer["spk_name"] == "SPK0"


@needs_speakers
def test_our_python_client_knows_them(server: Running, endgame_pcm: bytes) -> None:
    known, told = SessionTranscript(), list[SpeakersEvent]()
    with StreamClient(server.url, words=True, speakers=True) as stream:

        def speak() -> None:
            stream.send(endgame_pcm)
            stream.end()

        speaking = threading.Thread(target=speak)
        speaking.start()
        for event in stream:
            known.note(event)
            if isinstance(event, SpeakersEvent):
                told.append(event)
        speaking.join(60)
    assert len(told) == 1
    assert {segment.speaker for segment in known.segments} == {"SPEAKER_00", "SPEAKER_01"}
    for segment in known.segments:
        assert segment.words is not None
        assert " ".join(word.text for word in segment.words) == segment.text


@needs_speakers
def test_speakers_are_told_again_after_a_connection_was_lost(server: Running, endgame_pcm: bytes) -> None:
    """In the middle, and where everything but the last two events had come."""
    with WebSocket(server.port, speakers="true", words="true", max_segment_ms="16000") as line:
        session = line.hear("session")["session_id"]
        pour(line, endgame_pcm[:640_000])
        line.hear("segment")
        line.cut(reset=True)
    with WebSocket(server.port, session=session, after=0) as line:
        pour(line, endgame_pcm[line.hear("session")["received_bytes"] :])
        line.end()
        events = line.rest()
    (told,) = of(events, "speakers")
    numbers = [event["seq"] for event in events if "seq" in event]
    assert numbers == [*range(1, len(numbers) + 1)]
    for segment in of(events, "segment"):
        assert segment["speaker"]
        expect_words_of(segment)
    with WebSocket(server.port, session=session, after=told["seq"] - 1) as line:
        again = line.rest()
    assert [event for event in again if "seq" in event] == [told, events[-1]]


@needs_speakers
@pytest.mark.parametrize("path", ["/", "/ws"])
def test_a_client_that_hangs_up_takes_its_speakers_along(server: Running, endgame_pcm: bytes, path: str) -> None:
    with calling(server, path, spk="true", words="true") as caller:
        assert caller.ask("START") == STARTED
        caller.pour(endgame_pcm)
        caller.send("STOP")
    server.expect_empty()


@needs_speakers
@pytest.mark.parametrize("path", ["/", "/ws"])
def test_speakers_of_funasrs_sockets(server: Running, endgame_pcm: bytes, path: str) -> None:
    with calling(server, path, words="true") as caller:
        assert caller.ask("SPK:true") == {"event": "spk_set", "spk": True, "used": True}
        assert caller.ask("START") == STARTED
        caller.pour(endgame_pcm)
        caller.send("STOP")
        *_, final, _ = caller.until_stopped()
    assert final["is_final"]
    expect_words(final)
    assert final["sentences"][0]["text"].startswith(NAGG)
    assert final["sentences"][0]["spk"] == 0
    assert {sentence["spk"] for sentence in final["sentences"]} == {0, 1}


@needs_speakers
def test_whoever_takes_only_new_sentences_is_told_all_at_the_end(server: Running, endgame_pcm: bytes) -> None:
    with calling(server, "/", sentences="new", spk="true") as caller:
        assert caller.ask("START") == STARTED
        caller.pour(endgame_pcm)
        before = caller.until(lambda answer: answer["sentences"])
        caller.send("STOP")
        *after, final, _ = caller.until_stopped()
    told = [sentence["text"] for answer in before + after for sentence in answer["sentences"]]
    assert [sentence["text"] for sentence in final["sentences"]][: len(told)] == told


def test_a_format_of_words_gets_them_of_a_server(server: Running, packaged_speech: Path, tmp_path: Path) -> None:
    written = tmp_path / "talk.ctm"
    path = str(packaged_speech / "beckett.wav")
    done = CliRunner().invoke(app, ["listen", path, "--server", f"http://127.0.0.1:{server.port}", "-o", str(written)])
    assert done.exit_code == 0, done.output
    assert len(written.read_text("utf-8").splitlines()) == len(done.stdout.split())
