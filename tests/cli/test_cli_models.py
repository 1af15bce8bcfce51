from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asr_serve.cli import app
from asr_serve.errors import WeightsMissing
from asr_serve.models import weights
from asr_serve.models.card import Card, card


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


@pytest.fixture
def only_tiny_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        weights, "locate", lambda card: Path("/weights/tiny") if card.name == "moonshine-tiny-en" else None
    )


@pytest.mark.usefixtures("only_tiny_is_here")
def test_list_says_what_is_here_and_how_to_get_the_rest() -> None:
    lines = invoke("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "LANGUAGES", "SIZE", "LICENCE", "WEIGHTS"]
    tiny = next(line for line in lines if line.startswith("moonshine-tiny-en "))
    base = next(line for line in lines if line.startswith("moonshine-base-en "))
    assert tiny.endswith("here")
    assert base.endswith("missing: asr-serve models fetch moonshine-base-en")
    rows = json.loads(invoke("list", "--json").stdout)
    assert {row["name"]: row["present"] for row in rows}["moonshine-tiny-en"] is True


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
    fetched: list[Card] = []

    def fetch(chosen: Card, progress: Callable[[str], None]) -> Path:
        progress("fetching")
        fetched.append(chosen)
        return Path("/weights/base")

    monkeypatch.setattr(weights, "fetch", fetch)
    result = invoke("fetch", "moonshine-base-en")
    assert (result.stdout, result.stderr) == ("/weights/base\n", "fetching\n")
    assert invoke("fetch", "moonshine-tiny-en").stdout == "/weights/tiny\n"
    assert fetched == [card("moonshine-base-en")]


@pytest.mark.usefixtures("only_tiny_is_here")
def test_a_hub_out_of_reach_is_an_error_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(chosen: Card, progress: Callable[[str], None]) -> Path:
        raise WeightsMissing("could not fetch", "a reachable hub", "pip install it")

    monkeypatch.setattr(weights, "fetch", fetch)
    result = invoke("fetch", "moonshine-base-en")
    assert result.stderr == "error: could not fetch. a reachable hub. pip install it.\n"
    assert result.exit_code == 1
