"""asr-serve voices, and what asr-serve clone refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.voices.cloned_voice import EXAMPLE, ClonedVoiceCard, Consent
from asr_serve.voices.voice_store import VoiceStore

TENSORS = b"tensors"


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    made = VoiceStore(tmp_path / "voices")
    made.add(
        ClonedVoiceCard(
            name="ada",
            created=1_790_000_000,
            model="fastpitch-en",
            fingerprint="f",
            consent=Consent(EXAMPLE, "tester", 1_790_000_000),
            clips=20,
            seconds=91.0,
            start="emma",
            similarity=0.76,
            ceiling=0.95,
            steps=100,
            seed=0,
            sha256=hashlib.sha256(TENSORS).hexdigest(),
            release="0.1.0",
        ),
        TENSORS,
    )
    return made


def run(store: VoiceStore, *words: str, code: int = 0) -> str:
    made = CliRunner().invoke(app, ["voices", *words, "--voices-dir", str(store.folder)])
    assert made.exit_code == code, made.output
    return made.output


def test_list_and_show(store):
    shown = run(store, "list")
    assert "ada" in shown
    assert "80 %" in shown
    assert json.loads(run(store, "list", "--json"))[0]["clips"] == 20
    assert EXAMPLE in run(store, "show", "ada")
    assert json.loads(run(store, "show", "ada", "--json"))["consent"]["statement"] == EXAMPLE


def test_no_voices(tmp_path):
    assert "there are no cloned voices" in run(VoiceStore(tmp_path / "none"), "list")


def test_rename_and_delete(store):
    assert "'grace' now" in run(store, "rename", "ada", "grace")
    assert "no cloned voice 'ada'" in run(store, "delete", "ada", code=2)
    assert "model's own" in run(store, "rename", "grace", "heart", code=2)
    assert "voice name" in run(store, "rename", "grace", "../x", code=2)
    assert "is deleted" in run(store, "delete", "grace")
    assert store.names() == []


def test_export_and_import(store, tmp_path):
    file = tmp_path / "ada.zip"
    assert str(file) in run(store, "export", "ada", "-o", str(file))
    assert "exists" in run(store, "export", "ada", "-o", str(file), code=2)
    run(store, "export", "ada", "-o", str(file), "--force")
    assert "already" in run(store, "import", str(file), code=2)
    assert EXAMPLE in run(store, "import", str(file), "--name", "countess")
    assert store.names() == ["ada", "countess"]
    assert "own" in run(store, "import", str(file), "--name", "heart", code=2)
    (tmp_path / "no.zip").write_bytes(b"no zip")
    assert "no voice" in run(store, "import", str(tmp_path / "no.zip"), code=2)
    assert "is not a file" in run(store, "import", str(tmp_path / "nowhere.zip"), code=2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--audio", "x", "--consent", EXAMPLE], "--name is missing"),
        (["--audio", "x", "--name", "ada"], "no statement of consent"),
        (["--audio", "x", "--name", "ada", "--consent", "ok"], "does not say who agrees"),
        (["--audio", "x", "--name", "A B", "--consent", EXAMPLE], "voice name"),
        (["--audio", "x", "--name", "ada", "--consent", EXAMPLE, "--texts", "nowhere.csv"], "--texts"),
        (["--audio", "x", "--name", "ada", "--consent", EXAMPLE, "--model", "hibari"], "taught voices"),
        (["--audio", "x", "--name", "ada", "--consent", EXAMPLE, "--model", "fastpich-en"], "did you mean"),
    ],
)
def test_clone_refuses(tmp_path, words, why):
    made = CliRunner().invoke(app, ["clone", *words, "--voices-dir", str(tmp_path)])
    assert made.exit_code == 2
    assert why in made.output
