"""A pipeline behind the routes that take files, with real weights: vosk-small-en, then whisper-tiny-en."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import WAIT_S, Running
from websockets.sync.client import connect

import asr_serve
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_files import write_ngrams
from asr_serve.errors import OptionError
from asr_serve.server.engine_registry import EngineRegistry, open_engine

ROUTE = "/v1/audio/transcriptions"
CHAIN, WHISPER = "vosk-small-en", "whisper-tiny-en"
TEXT = """
description = "rescored, and Whisper for short segments"

[[stage]]
kind = "recognize"
model = "vosk-small-en"
device = "cpu"

[[stage]]
kind = "rescore"
language_model = "titles.ngram.safetensors"
hypotheses = 20
weight = 1.0

[[stage]]
kind = "recognize"
model = "whisper-tiny-en"
when = "duration_s < 15"
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    sentences = [line.split() for line in ("it was the string of hope",) * 4]
    write_ngrams(train(sentences, 3), folder / "titles.ngram.safetensors")
    path = folder / "titles.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def running(file: Path) -> Iterator[Running]:
    engine = EngineConfig(prefix_bytes=0)
    config = ServeConfig(
        model=CHAIN,
        pipeline=str(file),
        aliases={"whisper-1": "titles"},
        admin_keys=("k-admin",),
        device="cpu",
        dtype="fp32",
        turn_model="none",
        voice="none",
        engine_threads=1,
        engine=engine,
    )
    started = Running(config, open_engine)
    yield started
    started.expect_empty()
    started.call(started.engines.close())
    started.stop()


def ask(running: Running, clip: Path, route: str = ROUTE, **data: Any) -> dict[str, Any]:
    answer: dict[str, Any] = running.http.post(route, files={"file": clip.read_bytes()}, data=data).json()
    return answer


def test_files_pass_through_the_stages(running: Running, file: Path, cities: Path) -> None:
    answer = ask(running, cities, response_format="verbose_json", timestamp_granularities="word")
    with asr_serve.load_pipeline(str(file), device="cpu", dtype="fp32") as pipeline:
        (transcript,) = pipeline.transcribe(cities, words=True)
        expected = pipeline.describe()["stages"]
    assert answer["text"] == transcript.text
    first, second = (segment["text"].strip() for segment in answer["segments"])
    assert "the string of hope" in first  # as the language model will have it
    assert second.startswith("In short,")  # Whisper's: the chain model writes no capitals
    assert running.engines.pipeline is not None
    assert running.engines.pipeline.recognizer.describe() == expected
    for name in ("titles", "whisper-1"):
        assert ask(running, cities, model=name)["text"] == transcript.text
    assert ask(running, cities, "/asr", model="titles")["text"] == transcript.text


def test_text_streams_segment_by_segment(running: Running, cities: Path) -> None:
    files = {"stream": (None, "true"), "file": cities.read_bytes()}
    lines = running.http.post(ROUTE, files=files).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [event["delta"] for event in events if event["type"] == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1]["text"] == ask(running, cities)["text"]


def test_its_models_are_served_too(running: Running, cities: Path) -> None:
    assert ask(running, cities, model=CHAIN)["text"].islower()
    assert "times" in ask(running, cities, model=WHISPER)["text"]


def test_models_are_listed_with_their_stages(running: Running) -> None:
    first, *models = running.http.get("/v1/models").json()["data"]
    assert first["id"] == "titles"
    assert (first["state"], first["aliases"], first["languages"]) == ("ready", ["whisper-1"], ["en"])
    assert first["stages"] == [
        {"kind": "recognize", "model": CHAIN},
        {"kind": "rescore", "model": "titles.ngram.safetensors"},
        {"kind": "recognize", "model": WHISPER},
    ]
    assert first["parameters"] == sum(each["parameters"] for each in models if each["id"] in (CHAIN, WHISPER))
    assert not any(each["stages"] for each in models)
    for name in ("titles", "whisper-1"):
        assert running.http.get(f"/v1/models/{name}").json() == first
    assert running.http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("route", "data", "param"),
    [
        (ROUTE, {"beam": "4"}, "beam"),
        (ROUTE, {"n_best": "2", "response_format": "verbose_json"}, "n_best"),
        (ROUTE, {"prompt": "Dickens"}, "prompt"),
        (ROUTE, {"hotwords": "Dickens"}, "hotwords"),
        (ROUTE, {"temperature": "0.4"}, "temperature"),
        (ROUTE, {"top_k": "5"}, "top_k"),
        (ROUTE, {"top_p": "0.5"}, "top_p"),
        (ROUTE, {"language": "de"}, "language"),
        (ROUTE, {"include[]": "logprobs"}, "include[]"),
        ("/asr", {"hotwords": "Dickens"}, "hotwords"),
        ("/v1/audio/translations", {}, "task"),
    ],
)
def test_options_of_one_model_are_refused(
    running: Running, cities: Path, route: str, data: dict[str, str], param: str
) -> None:
    answer = running.http.post(route, files={"file": cities.read_bytes()}, data=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "titles" in answer.text or param == "language"


@pytest.mark.parametrize("path", ["/v1/realtime?intent=transcription", "/v1/stream?", "/?", "/ws?"])
def test_live_callers_are_told_of_a_model(running: Running, path: str) -> None:
    url = f"ws://127.0.0.1:{running.port}{path}&model=titles"
    protocols = ["realtime"] if "realtime" in path else None
    with connect(url, subprotocols=protocols, open_timeout=WAIT_S) as socket:  # type: ignore[arg-type]
        received = str(socket.recv(WAIT_S))
    assert "titles is a pipeline, which transcribes files alone" in received
    assert CHAIN in received


def test_its_models_stay(running: Running) -> None:
    admin = {"authorization": "Bearer k-admin"}
    refused = running.http.post(f"/v1/models/{WHISPER}/unload", headers=admin)
    assert refused.status_code == 403
    assert "the pipeline titles uses whisper-tiny-en" in refused.text
    assert running.http.post("/v1/models/titles/unload", headers=admin).status_code == 400


def test_what_is_wrong_is_told_before_anything_is_loaded(tmp_path: Path, file: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(TEXT.replace("hypotheses = 20", "hypotheses = 0"))
    with pytest.raises(OptionError, match=r"broken\.toml, line 12, hypotheses"):
        EngineRegistry(ServeConfig(pipeline=str(broken)))
    for settings, param in (({"weights": "here"}, "weights"), ({"engine": EngineConfig(role="encode")}, "pipeline")):
        with pytest.raises(OptionError, match="beside pipeline") as caught:
            ServeConfig(pipeline=str(file), **settings)  # type: ignore[arg-type]
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ("titles.ngram.safetensors", "gone.arpa", "line 11, language_model: there is no language model"),
        ('device = "cpu"', 'device = "cuda:77"', "line 7, device: device 'cuda:77'"),
        ('device = "cpu"', 'weights = "empty"', "line 7, weights: no checkpoint of vosk-small-en"),
    ],
)
def test_a_server_tells_it_before_it_listens(tmp_path: Path, file: Path, before: str, after: str, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.toml").write_text(TEXT.replace(before, after))
    (tmp_path / "titles.ngram.safetensors").write_bytes((file.parent / "titles.ngram.safetensors").read_bytes())
    cli = "from asr_serve.api.cli import app; app()"
    command = [sys.executable, "-c", cli, "serve", "--pipeline", str(tmp_path / "broken.toml"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode != 0
    assert f"broken.toml, {place}" in " ".join((done.stdout + done.stderr).split())
    assert "listening" not in (done.stdout + done.stderr).lower()
