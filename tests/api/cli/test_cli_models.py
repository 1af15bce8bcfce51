from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asr_serve.api.cli import app
from asr_serve.errors import WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import AsrCard, asr_card


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


@pytest.fixture
def only_tiny_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        store, "locate", lambda card: Path("/weights/tiny") if card.name == "moonshine-tiny-en" else None
    )


@pytest.mark.usefixtures("only_tiny_is_here")
def test_list_has_installed_models_and_how_to_fetch_the_rest() -> None:
    lines = invoke("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "LANGUAGES", "SIZE", "TASK", "LATENCY", "HEADS", "LICENCE", "WEIGHTS"]
    tiny = next(line for line in lines if line.startswith("moonshine-tiny-en "))
    base = next(line for line in lines if line.startswith("moonshine-base-en "))
    assert tiny.endswith("here")
    assert base.endswith("missing: asr-serve models fetch moonshine-base-en")
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json").stdout)}
    assert rows["moonshine-tiny-en"]["present"] is True
    assert (rows["smart-turn"]["present"], rows["smart-turn"]["task"]) == (False, "turn")
    turn = next(line for line in lines if line.startswith("smart-turn "))
    assert "ar bn da de and 19 more" in turn
    assert turn.endswith("missing: pip install --no-deps pipecat-ai==1.14.0")


@pytest.mark.usefixtures("only_tiny_is_here")
def test_tts_models_are_listed_with_their_voices() -> None:
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in invoke("list").stdout.splitlines()}
    assert lines["hibari"] == "en 6.2 M synthesis, 1 voice - - Apache-2.0 missing: pip install hibari-tts==0.2.1"
    assert "synthesis, 28 voices" in lines["fastpitch-en"]
    assert "any 13.9 M vocoder" in lines["hifigan-universal"]
    shown = json.loads(invoke("show", "hibari", "--json").stdout)
    assert (shown["task"], shown["voices"], shown["rate_hz"]) == ("tts", ["heart"], 24_000)


@pytest.mark.usefixtures("only_tiny_is_here")
def test_streaming_models_are_listed_with_their_latency() -> None:
    rows = {row["name"]: row for row in json.loads(invoke("list", "--json").stdout)}

    def of(name: str) -> list[object]:
        return [rows[name][field] for field in ("streaming", "heads", "chunk_ms", "lag_ms")]

    assert of("fastconformer-streaming-medium-en") == [True, ["rnnt", "ctc"], 160, 173]
    assert of("armspeech-hy") == [True, ["ctc"], 320, 532]
    assert of("moonshine-tiny-en") == [False, [], None, None]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in invoke("list").stdout.splitlines()}
    assert "32.0 M chunks of 160 ms 173 ms rnnt,ctc CC-BY-4.0" in lines["fastconformer-streaming-medium-en"]
    assert "27.1 M utterances - - MIT" in lines["moonshine-tiny-en"]
    assert re.search(r"^lag ms +173$", invoke("show", "fastconformer-streaming-medium-en").stdout, re.MULTILINE)


@pytest.mark.usefixtures("only_tiny_is_here")
def test_show() -> None:
    told = json.loads(invoke("show", "moonshine-tiny-en", "--json").stdout)
    assert told["licence"] == "MIT"
    assert told["package"] == "moonshine-voice==0.1.0"
    assert told["folder"] == "/weights/tiny"
    assert "asr-serve models fetch moonshine-base-en" in invoke("show", "moonshine-base-en").stdout


@pytest.mark.parametrize("command", ["show", "fetch"])
def test_an_unknown_model_names_the_nearest(command: str) -> None:
    result = invoke(command, "moonshine-tiny")
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "moonshine-tiny-en" in result.stderr
    assert result.exit_code == 2


@pytest.mark.usefixtures("only_tiny_is_here")
def test_fetch_prints_the_folder_and_fetches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[AsrCard] = []

    def fetch(chosen: AsrCard, progress: Callable[[str], None]) -> Path:
        progress("fetching")
        fetched.append(chosen)
        return Path("/weights/base")

    monkeypatch.setattr(store, "fetch", fetch)
    monkeypatch.setattr(store, "resolve", lambda card, progress: Path(f"/converted/{card.name}"))
    result = invoke("fetch", "moonshine-base-en")
    assert (result.stdout, result.stderr) == ("/weights/base\n", "fetching\n")
    assert invoke("fetch", "moonshine-tiny-en").stdout == "/converted/moonshine-tiny-en\n"
    assert fetched == [asr_card("moonshine-base-en")]


@pytest.mark.usefixtures("only_tiny_is_here")
def test_turn_models_are_shown_and_fetched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(invoke("show", "smart-turn", "--json").stdout)
    assert (told["files"], told["hears_ms"], told["present"]) == (["smart-turn-v3.2-cpu.onnx"], 8_000, False)
    monkeypatch.setattr(store, "fetch", lambda chosen, progress: Path("/weights") / chosen.name)
    assert invoke("fetch", "smart-turn").stdout == "/weights/smart-turn\n"
    assert "did you mean 'smart-turn'" in invoke("fetch", "smart-turm").stderr


@pytest.mark.usefixtures("only_tiny_is_here")
def test_a_hub_out_of_reach_is_an_error_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(chosen: AsrCard, progress: Callable[[str], None]) -> Path:
        raise WeightsMissing("could not fetch", "a reachable hub", "pip install it")

    monkeypatch.setattr(store, "fetch", fetch)
    monkeypatch.setattr(store, "resolve", lambda card, progress: Path(f"/converted/{card.name}"))
    result = invoke("fetch", "moonshine-base-en")
    assert result.stderr == "error: could not fetch. a reachable hub. pip install it.\n"
    assert result.exit_code == 1
