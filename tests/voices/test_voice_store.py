"""Cloned voices on disk: whole or not there, whoever else works on the folder, and whatever a name says."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import Child

from asr_serve.errors import MissingOption, OptionError, UnknownVoice, WeightsCorrupt
from asr_serve.voices.cloned_voice import EXAMPLE, ClonedVoiceCard, Consent, check_voice_name, validated_consent
from asr_serve.voices.voice_store import MOST_BYTES, VoiceStore

TENSORS = b"tensors of a voice"


def card(name: str = "ada", tensors: bytes = TENSORS, **more: Any) -> ClonedVoiceCard:
    known: dict[str, Any] = {
        "name": name,
        "created": 1_790_000_000,
        "model": "fastpitch-en",
        "fingerprint": "f" * 64,
        "consent": Consent("I, Ada, agree that my voice is cloned.", "tester", 1_790_000_000),
        "clips": 20,
        "seconds": 90.5,
        "start": "emma",
        "similarity": 0.81,
        "ceiling": 0.95,
        "steps": 300,
        "seed": 0,
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "release": "0.1.0",
    }
    return ClonedVoiceCard(**{**known, **more})


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path / "voices")


def test_an_absent_folder_holds_no_voices(store):
    assert store.names() == []
    assert store.cards() == []
    with pytest.raises(UnknownVoice, match="cloned voices: none"):
        store.path("ada")


def test_an_added_voice_is_found(store):
    store.add(card(), TENSORS)
    assert store.names() == ["ada"]
    assert store.card("ada") == card()
    assert store.path("ada").read_bytes() == TENSORS
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".part")]


def test_a_name_is_taken_once(store):
    store.add(card(), TENSORS)
    with pytest.raises(OptionError, match="already"):
        store.add(card(), TENSORS)
    with pytest.raises(OptionError, match="model's own"):
        store.add(card("emma"), TENSORS, reserved=("emma",))
    assert store.names() == ["ada"]


@pytest.mark.parametrize(
    "name", ["", "Ada", "../ada", "a/b", ".ada", "-ada", "a" * 65, "ad a", "adä", "ada\n", "a\0b", "jobs", "..", "a.b"]
)
def test_invalid_names_are_refused(store, name):
    with pytest.raises(OptionError, match="name"):
        check_voice_name(name)
    store.add(card(), TENSORS)
    with pytest.raises(OptionError):
        store.add(card(name), TENSORS)
    for ask in (store.card, store.path, store.delete, store.export_voice):
        with pytest.raises(UnknownVoice):
            ask(name)
    with pytest.raises(OptionError):
        store.rename("ada", name)
    assert sorted(path.name for path in store.folder.iterdir()) == [".lock", "ada.json", "ada.safetensors"]


def test_an_unknown_name_suggests_the_nearest(store):
    store.add(card(), TENSORS)
    with pytest.raises(UnknownVoice, match="did you mean 'ada'"):
        store.card("adda")


def test_tensors_of_another_voice_are_refused(store):
    with pytest.raises(WeightsCorrupt, match="sha256"):
        store.add(card(), b"others")
    assert store.names() == []


def test_renaming_keeps_all_but_the_name(store):
    store.add(card(), TENSORS)
    store.add(card("bob"), TENSORS)
    assert store.rename("ada", "grace") == card("grace")
    assert store.names() == ["bob", "grace"]
    assert store.card("grace") == card("grace")
    with pytest.raises(OptionError, match="already"):
        store.rename("grace", "bob")
    assert store.rename("grace", "grace") == card("grace")
    with pytest.raises(UnknownVoice):
        store.rename("ada", "eve")


def test_deleting_leaves_nothing(store):
    store.add(card(), TENSORS)
    assert store.delete("ada") == card()
    assert [path.name for path in store.folder.iterdir()] == [".lock"]
    with pytest.raises(UnknownVoice):
        store.delete("ada")


def test_export_and_import_keep_the_consent(store, tmp_path):
    store.add(card(), TENSORS)
    whole = store.export_voice("ada")
    with zipfile.ZipFile(io.BytesIO(whole)) as parts:
        assert "I, Ada, agree" in parts.read("CONSENT.txt").decode()
    other = VoiceStore(tmp_path / "other")
    assert other.import_voice(io.BytesIO(whole)) == card()
    assert other.import_voice(io.BytesIO(whole), "countess") == card("countess")
    assert other.path("countess").read_bytes() == TENSORS
    with pytest.raises(OptionError, match="already"):
        other.import_voice(io.BytesIO(whole))
    assert store.export_voice("ada") == whole, "the same voice is the same file"


def zipped(**parts: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, data in parts.items():
            file.writestr(name.replace("__", "."), data)
    return made.getvalue()


EXPORT, CARD_JSON = "asr-serve voices export", msgspec.json.encode(card())


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"", OptionError, EXPORT),
        (b"no zip at all", OptionError, EXPORT),
        (zipped(other=b""), OptionError, EXPORT),
        (zipped(voice__json=b"{}", voice__safetensors=TENSORS), OptionError, EXPORT),
        (zipped(voice__json=b"not json", voice__safetensors=TENSORS), OptionError, EXPORT),
        (zipped(voice__json=CARD_JSON), OptionError, EXPORT),
        (zipped(voice__json=CARD_JSON[:-1] + b',"more":1}', voice__safetensors=b""), OptionError, EXPORT),
        (zipped(voice__json=b" " * (2 << 20), voice__safetensors=TENSORS), OptionError, EXPORT),
        (
            zipped(voice__json=msgspec.json.encode(card("../../evil")), voice__safetensors=TENSORS),
            OptionError,
            "voice name",
        ),
        (zipped(voice__json=CARD_JSON, voice__safetensors=b"changed"), WeightsCorrupt, "sha256"),
    ],
    ids=["empty", "bytes", "other", "no-card", "no-json", "no-tensors", "more", "long", "path", "damaged"],
)
def test_an_invalid_export_is_refused(store, data, error, match):
    with pytest.raises(error, match=match):
        store.import_voice(io.BytesIO(data))
    assert store.names() == []


def test_a_zip_bomb_is_not_unpacked(store):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("voice.json", msgspec.json.encode(card()))
        file.writestr("voice.safetensors", bytes(MOST_BYTES + 2))
    assert len(made.getvalue()) < MOST_BYTES / 100
    with pytest.raises(OptionError, match="longer than"):
        store.import_voice(made)


def test_half_written_voices_are_ignored_and_removed(store):
    store.add(card(), TENSORS)
    (store.folder / "eve.safetensors").write_bytes(TENSORS)
    (store.folder / ".part-x").write_bytes(b"half")
    assert store.names() == ["ada"]
    with pytest.raises(UnknownVoice):
        store.path("eve")
    store.add(card("eve"), TENSORS)
    assert store.names() == ["ada", "eve"]
    assert not (store.folder / ".part-x").exists()


def test_a_broken_card_is_left_out_of_lists(store):
    store.add(card(), TENSORS)
    store.add(card("eve"), TENSORS)
    (store.folder / "eve.json").write_bytes(b"{")
    assert [each.name for each in store.cards()] == ["ada"]
    with pytest.raises(WeightsCorrupt):
        store.card("eve")


@pytest.mark.parametrize(
    "blocked", [pytest.param("folder", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write")), "file"]
)
def test_a_folder_that_cannot_be_used(tmp_path, blocked):
    if blocked == "folder":
        tmp_path.chmod(0o500)
    else:
        (tmp_path / "voices").write_text("")
    with pytest.raises(OptionError, match="voices_dir"):
        VoiceStore(tmp_path / "voices").add(card(), TENSORS)


ONE_OF_MANY = """
import sys, pathlib
sys.path[:0] = sys.argv[3:]
from asr_serve.errors import OptionError
from asr_serve.voices.voice_store import VoiceStore
from test_voice_store import TENSORS, card
store, got = VoiceStore(pathlib.Path(sys.argv[1])), 0
for number in range(12):
    try:
        store.add(card(f"v{number}", TENSORS, seed=int(sys.argv[2])), TENSORS)
        got += 1
    except OptionError:
        pass
print(got)
"""


def test_of_concurrent_processes_one_gets_a_name(store):
    here = [str(Path(__file__).parent), *sys.path]
    several = [
        Child([sys.executable, "-c", ONE_OF_MANY, str(store.folder), str(seed), *here], stdout=subprocess.PIPE)
        for seed in range(3)
    ]
    got = [int(each.communicate(timeout=60)[0]) for each in several]
    assert sum(got) == 12
    assert store.names() == sorted(f"v{number}" for number in range(12))
    assert [sum(each.seed == seed for each in store.cards()) for seed in range(3)] == got


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        *((blank, MissingOption) for blank in (None, "", "   ", "\n")),
        *((vague, OptionError) for vague in ("yes", "I agree", "ok " * 20, "x" * 5_000)),
        ("this is a voice of somebody that I know well", OptionError),
    ],
)
def test_a_statement_must_say_who_agrees_to_what(statement, error):
    with pytest.raises(error, match="consent"):
        validated_consent(statement, "tester")


def test_a_statement_is_kept_verbatim():
    found = validated_consent(f"  {EXAMPLE}\n", "key-1", 12.9)
    assert found == Consent(EXAMPLE, "key-1", 12)
