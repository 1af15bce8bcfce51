"""Deepgram's `/v1/listen` and `/v1/speak` over the real server: HTTP, WebSockets, and what is refused."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import MODEL, VOICE, WAIT_S, Running
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.audio.reader import open_audio
from asr_serve.protocols.deepgram.listen_response import render_listen_answer
from asr_serve.server.routes import deepgram

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
LISTEN, SPEAK = "/v1/listen", "/v1/speak"
RATE_BYTES = 32_000


@pytest.fixture(scope="module")
def beckett_pcm(beckett: Path) -> bytes:
    with wave.open(str(beckett)) as file:
        assert file.getframerate() == 16_000
        return file.readframes(file.getnframes())


@contextmanager
def calling(server: Running, path: str, **options: Any) -> Iterator[ClientConnection]:
    url = f"{server.url.replace('http', 'ws', 1)}{path}"
    with connect(url, max_size=None, open_timeout=WAIT_S, **options) as line:
        yield line


def rest(line: ClientConnection) -> tuple[list[Any], int]:
    """Everything until the server closes, and its code."""
    found: list[Any] = []
    try:
        while True:
            message = line.recv(WAIT_S)
            found.append(message if isinstance(message, bytes) else json.loads(message))
    except ConnectionClosed as closed:
        return found, closed.rcvd.code if closed.rcvd else 1_006


def kind(line: ClientConnection, **command: Any) -> None:
    line.send(json.dumps(command))


def transcript(result: dict[str, Any]) -> str:
    text: str = result["channel"]["alternatives"][0]["transcript"]
    return text


# --- recordings -------------------------------------------------------------------------------------------


def test_a_recording(server, beckett):
    audio = beckett.read_bytes()
    query = {"model": "nova-3", "smart_format": "true", "utterances": "true", "tag": "mine", "dictation": "true"}
    answer = server.http.post(LISTEN, params=query, content=audio, headers={"content-type": "audio/wav"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    [channel] = found["results"]["channels"]
    [alternative] = channel["alternatives"]
    assert alternative["transcript"] == BECKETT
    assert [word["word"] for word in alternative["words"]][:4] == ["ever", "tried", "ever", "failed"]
    assert alternative["words"][1]["punctuated_word"] == "tried,"
    starts = [word["start"] for word in alternative["words"]]
    assert starts == sorted(starts)
    assert 0 < alternative["confidence"] <= 1
    assert alternative["paragraphs"]["transcript"] == BECKETT
    assert " ".join(each["transcript"] for each in found["results"]["utterances"]) == BECKETT
    metadata = found["metadata"]
    assert metadata["sha256"] == hashlib.sha256(audio).hexdigest()
    assert metadata["model_info"][metadata["models"][0]]["name"] == MODEL
    assert (metadata["channels"], metadata["tags"]) == (1, ["mine"])
    assert metadata["request_id"] == answer.headers["x-request-id"] == answer.headers["dg-request-id"]
    assert "dictation" in answer.headers["x-ignored"]


def test_an_answer_is_not_rendered_on_the_event_loop(server, beckett, monkeypatch):
    """That of a recording of hours is megabytes."""
    threads = []

    def render(*arguments):
        threads.append(threading.current_thread())
        return render_listen_answer(*arguments)

    monkeypatch.setattr(deepgram, "render_listen_answer", render)
    assert server.http.post(LISTEN, content=beckett.read_bytes()).status_code == 200
    assert threads
    assert server._thread not in threads


def test_samples_without_a_header_and_plain_text(server, beckett_pcm):
    query = {"encoding": "linear16", "sample_rate": "16000", "punctuate": "false"}
    answer = server.http.post(LISTEN, params=query, content=beckett_pcm)
    [alternative] = answer.json()["results"]["channels"][0]["alternatives"]
    assert alternative["transcript"] == "ever tried ever failed no matter try again fail again fail better"
    assert "utterances" not in answer.json()["results"]


BAD = {
    "url": (b'{"url": "http://127.0.0.1/a.wav"}', "application/json", "", 400, "unsupported_option"),
    "form": (b"--x--", "multipart/form-data; boundary=x", "", 415, "unsupported_media_type"),
    "empty": (b"", "audio/wav", "", 400, "empty_audio"),
    "no audio": (b"this is no audio at all" * 50, "audio/wav", "", 400, "not_audio"),
    "feature": (b"", "audio/wav", "summarize=v2", 400, "unsupported_option"),
    "redact": (b"", "audio/wav", "redact=pci", 400, "unsupported_option"),
    "model": (b"", "audio/wav", "model=no-such", 404, "model_not_found"),
    "language": (b"RIFF", "audio/wav", "language=xx", 400, "option_error"),
    "misspelt": (b"", "audio/wav", "langauge=en", 400, "option_error"),
    "keywords": (b"RIFF", "audio/wav", "keywords=Ada:99", 400, "option_error"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_recording_that_is_refused(server, name):
    body, media_type, query, status, code = BAD[name]
    answer = server.http.post(f"{LISTEN}?{query}", content=body, headers={"content-type": media_type})
    found = answer.json()
    assert (answer.status_code, found["err_code"]) == (status, code), found
    assert found["error"]["code"] == code
    assert found["err_msg"] == found["error"]["message"]
    assert found["request_id"] == answer.headers["x-request-id"]


# --- live -------------------------------------------------------------------------------------------------


def test_live_words(server, beckett_pcm):
    query = "model=nova-2&encoding=linear16&sample_rate=16000&interim_results=true&vad_events=true"
    with calling(server, f"{LISTEN}?{query}&utterance_end_ms=1000&endpointing=300") as line:
        kind(line, type="KeepAlive")
        for at in range(0, len(beckett_pcm), RATE_BYTES):
            line.send(beckett_pcm[at : at + RATE_BYTES])
        line.send(bytes(2 * RATE_BYTES))
        kind(line, type="CloseStream")
        found, code = rest(line)
    assert code == 1_000
    *messages, metadata = found
    results = [each for each in messages if each["type"] == "Results"]
    finals = [each for each in results if each["is_final"]]
    assert " ".join(filter(None, map(transcript, finals))).lower().startswith("ever tried")
    assert finals[-1]["speech_final"]
    kinds = [each["type"] for each in messages]
    assert kinds[0] == "SpeechStarted"
    assert kinds.count("SpeechStarted") == sum(each["speech_final"] for each in finals) > 1
    assert kinds[-1] == "UtteranceEnd"
    assert messages[-1]["last_word_end"] == finals[-1]["channel"]["alternatives"][0]["words"][-1]["end"]
    assert metadata["type"] == "Metadata"
    assert metadata["duration"] == round(len(beckett_pcm) / RATE_BYTES + 2, 3)
    assert metadata["sha256"] == hashlib.sha256(beckett_pcm + bytes(2 * RATE_BYTES)).hexdigest()


def test_packets_of_any_size_and_a_header_change_no_word(server, beckett, beckett_pcm):
    texts = []
    for query, audio, step in (
        ("encoding=linear16&sample_rate=16000", beckett_pcm, 3_333),
        ("", beckett.read_bytes(), 1_001),
    ):
        with calling(server, f"{LISTEN}?{query}") as line:
            for at in range(0, len(audio), step):
                line.send(audio[at : at + step])
            kind(line, type="CloseStream")
            found, code = rest(line)
        assert code == 1_000
        texts.append([transcript(each) for each in found[:-1]])
    assert texts[0] == texts[1]
    assert " ".join(filter(None, texts[0])) == BECKETT


def test_finalize_makes_all_text_final(server, beckett_pcm):
    with calling(server, f"{LISTEN}?encoding=linear16&sample_rate=16000") as line:
        line.send(beckett_pcm[: 3 * RATE_BYTES // 2])
        kind(line, type="Finalize")
        result = json.loads(line.recv(WAIT_S))
        assert (result["is_final"], result["from_finalize"]) == (True, True)
        assert transcript(result).startswith("Ever")
        kind(line, type="Configure", keyterms=["Ada"])
        assert json.loads(line.recv(WAIT_S))["type"] == "ConfigureFailure"
        kind(line, type="CloseStream")
        assert rest(line)[1] == 1_000


def test_without_audio_only_the_metadata_come(server):
    with calling(server, LISTEN) as line:
        kind(line, type="Finalize")
        kind(line, type="CloseStream")
        [empty, metadata], code = rest(line)
    assert (transcript(empty), empty["from_finalize"], metadata["duration"], code) == ("", True, 0.0, 1_000)


@pytest.mark.parametrize(
    ("query", "message", "code", "close"),
    [
        ("encoding=speex", None, "option_error", 1_008),
        ("redact=pci", None, "unsupported_option", 1_008),
        ("model=no-such", None, "model_not_found", 1_008),
        ("language=xx", None, "option_error", 1_008),
        ("", b"ID3\x03" + bytes(100), "unsupported_audio", 1_008),
        ("encoding=opus", b"\xff" * 5_000, "corrupt_audio", 1_008),
        ("", "hello", "malformed_request", None),
        ("", '{"type": "Finalise"}', "unknown_command", None),
    ],
)
def test_what_is_refused_live(server, query, message, code, close):
    with calling(server, f"{LISTEN}?{query}") as line:
        if message is not None:
            line.send(message)
        error = json.loads(line.recv(WAIT_S))
        assert (error["type"], error["variant"], error["code"]) == ("Error", code, code), error
        assert error["description"] == error["message"]
        if close is None:  # the connection goes on
            kind(line, type="CloseStream")
            assert rest(line)[1] == 1_000
        else:
            assert rest(line) == ([], close)


def test_a_client_that_leaves_leaves_nothing(server, beckett_pcm):
    with calling(server, f"{LISTEN}?encoding=linear16") as line:
        line.send(beckett_pcm[: 2 * RATE_BYTES])


# --- keys -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(serve) -> Running:
    made: Running = serve(api_keys=("secret",))
    return made


def test_keys_as_deepgrams_clients_send_them(locked):
    for header, status in (("Token secret", 400), ("token secret", 400), ("Bearer secret", 400), ("Token x", 401)):
        answer = locked.http.post(LISTEN, content=b"", headers={"Authorization": header})
        assert answer.status_code == status, header
    assert locked.http.post(LISTEN, content=b"").status_code == 401
    for offered in (["token", "secret"], ["bearer", "secret"]):
        with calling(locked, LISTEN, subprotocols=offered) as line:
            assert line.subprotocol == offered[0]
            kind(line, type="CloseStream")
            assert rest(line)[1] == 1_000
    with calling(locked, LISTEN, subprotocols=["token", "wrong"]) as line:
        [error], code = rest(line)
        assert (error["code"], code) == ("invalid_api_key", 1_008)


# --- speech -----------------------------------------------------------------------------------------------


def test_speech(speaker):
    answer = speaker.http.post(f"{SPEAK}?model=aura-2-thalia-en&encoding=linear16", json={"text": "Ever tried."})
    assert answer.status_code == 200, answer.text
    assert answer.content[:4] == b"RIFF"
    assert (answer.headers["dg-model-name"], answer.headers["dg-char-count"]) == (VOICE, "11")
    plain = speaker.http.post(
        f"{SPEAK}?encoding=linear16&container=none&bit_rate=9",
        content=b"Ever tried.",
        headers={"content-type": "text/plain"},
    )
    assert plain.content == answer.content[-len(plain.content) :]
    assert plain.headers["x-ignored"] == "bit_rate"
    mulaw = speaker.http.post(f"{SPEAK}?model=heart&encoding=mulaw", json={"text": "Ever tried."})
    assert (mulaw.headers["content-type"], mulaw.content[:4]) == ("audio/wav", b"RIFF")
    samples = {}
    for encoding, tag in (("mulaw", 7), ("alaw", 6)):
        query = f"{SPEAK}?model=heart&encoding={encoding}"
        file = speaker.http.post(query, json={"text": "Ever tried."}).content
        assert struct.unpack_from("<HHIIHH", file, 20) == (tag, 1, 8_000, 8_000, 1, 8)
        samples[encoding] = speaker.http.post(f"{query}&container=none", json={"text": "Ever tried."})
        assert file[44:] == samples[encoding].content
        decoded = np.concatenate(list(open_audio(file)))
        assert abs(len(decoded) - 2 * len(samples[encoding].content)) <= 2
    assert samples["mulaw"].headers["content-type"] == "audio/basic"
    assert abs(len(samples["mulaw"].content) - len(plain.content) / 6) < 100


@pytest.mark.parametrize(
    ("query", "body", "code"),
    [
        ("model=nobody", {"text": "x"}, "unknown_voice"),
        ("encoding=midi", {"text": "x"}, "option_error"),
        ("callback=http://127.0.0.1", {"text": "x"}, "unsupported_option"),
        ("", {}, "missing_option"),
        ("", {"text": 7}, "option_error"),
        ("", {"text": ""}, "empty_text"),
    ],
)
def test_speech_that_is_refused(speaker, query, body, code):
    answer = speaker.http.post(f"{SPEAK}?{query}", json=body)
    assert (answer.status_code, answer.json()["err_code"]) == (400, code), answer.text


def test_live_speech(speaker):
    whole = speaker.http.post(
        f"{SPEAK}?encoding=linear16&container=none&sample_rate=16000", json={"text": "Ever tried."}
    )
    with calling(speaker, f"{SPEAK}?encoding=linear16&sample_rate=16000") as line:
        metadata = json.loads(line.recv(WAIT_S))
        assert (metadata["type"], metadata["model_name"]) == ("Metadata", VOICE)
        for number in range(2):
            kind(line, type="Speak", text="Ever ")
            kind(line, type="Speak", text="tried.")
            kind(line, type="Flush")
            audio = b""
            while isinstance(message := line.recv(WAIT_S), bytes):
                audio += message
            assert json.loads(message) == {"type": "Flushed", "sequence_id": number}
            assert audio == whole.content
        kind(line, type="Speak", text="Never to be heard, since it is cleared.")
        kind(line, type="Clear")
        while isinstance(message := line.recv(WAIT_S), bytes):
            pass
        assert json.loads(message) == {"type": "Cleared", "sequence_id": 0}
        kind(line, type="Speak", text="Fail again.")
        kind(line, type="Close")
        found, code = rest(line)
    assert code == 1_000
    assert b"".join(found)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\x00", "malformed_request"),
        ("[" * 4_000, "malformed_request"),
        ('{"type": "speak"}', "unknown_command"),
        ('{"type": "Speak"}', "missing_option"),
    ],
)
def test_live_speech_that_is_refused(speaker, message, code):
    with calling(speaker, SPEAK) as line:
        line.recv(WAIT_S)
        line.send(message)
        error = json.loads(line.recv(WAIT_S))
        assert (error["type"], error["code"]) == ("Error", code)
        kind(line, type="Close")
        assert rest(line) == ([], 1_000)
