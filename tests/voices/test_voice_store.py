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


def test_a_folder_that_is_not_there_holds_no_voices(store):
    assert store.names() == []
    assert store.cards() == []
    with pytest.raises(UnknownVoice, match="cloned voices: none"):
        store.path("ada")


def test_what_is_put_in_is_there(store):
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
    "name",
    ["", "Ada", "../ada", "a/b", ".ada", "-ada", "a" * 65, "ad a", "adä", "ada\n", "a\0b", "jobs", "..", "a.b"],
)
def test_bad_names_lead_nowhere(store, name):
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


def test_a_near_name_is_suggested(store):
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


def test_an_exported_voice_can_be_taken_elsewhere_with_its_consent(store, tmp_path):
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


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zip at all",
        zipped(other=b""),
        zipped(voice__json=b"{}", voice__safetensors=TENSORS),
        zipped(voice__json=b"not json", voice__safetensors=TENSORS),
        zipped(voice__json=msgspec.json.encode(card())),
        zipped(
            voice__json=msgspec.json.encode({**msgspec.to_builtins(card()), "more": 1}), voice__safetensors=b""
        ),
        zipped(voice__json=b" " * (2 << 20), voice__safetensors=TENSORS),
    ],
    ids=["empty", "bytes", "other", "no-card", "no-json", "no-tensors", "more", "long"],
)
def test_what_is_no_voice_is_not_taken(store, data):
    with pytest.raises(OptionError, match="asr-serve voices export"):
        store.import_voice(io.BytesIO(data))
    assert store.names() == []


def test_a_bomb_is_not_unpacked(store):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("voice.json", msgspec.json.encode(card()))
        file.writestr("voice.safetensors", bytes(MOST_BYTES + 2))
    assert len(made.getvalue()) < MOST_BYTES / 100
    with pytest.raises(OptionError, match="longer than"):
        store.import_voice(made)


def test_a_name_out_of_a_zip_is_no_way_out(store):
    data = zipped(voice__json=msgspec.json.encode(card("../../evil")), voice__safetensors=TENSORS)
    with pytest.raises(OptionError, match="voice name"):
        store.import_voice(io.BytesIO(data))


def test_a_damaged_zip_is_refused(store, tmp_path):
    store.add(card(), TENSORS)
    data = zipped(voice__json=msgspec.json.encode(card()), voice__safetensors=b"changed")
    with pytest.raises(WeightsCorrupt):
        VoiceStore(tmp_path / "other").import_voice(io.BytesIO(data))


def test_what_was_left_half_written_is_no_voice_and_goes_away(store):
    store.add(card(), TENSORS)
    (store.folder / "eve.safetensors").write_bytes(TENSORS)
    (store.folder / ".part-x").write_bytes(b"half")
    assert store.names() == ["ada"]
    with pytest.raises(UnknownVoice):
        store.path("eve")
    store.add(card("eve"), TENSORS)
    assert store.names() == ["ada", "eve"]
    assert not (store.folder / ".part-x").exists()


def test_a_broken_card_breaks_no_list(store):
    store.add(card(), TENSORS)
    store.add(card("eve"), TENSORS)
    (store.folder / "eve.json").write_bytes(b"{")
    assert [each.name for each in store.cards()] == ["ada"]
    with pytest.raises(WeightsCorrupt):
        store.card("eve")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="voices_dir"):
        VoiceStore(tmp_path / "voices").add(card(), TENSORS)


def test_a_file_in_the_place_of_the_folder(tmp_path):
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


def test_of_processes_that_want_one_name_one_gets_it(store):
    here = [str(Path(__file__).parent), *sys.path]
    several = [
        Child([sys.executable, "-c", ONE_OF_MANY, str(store.folder), str(seed), *here], stdout=subprocess.PIPE)
        for seed in range(3)
    ]
    got = [int(each.communicate(timeout=60)[0]) for each in several]
    assert sum(got) == 12
    assert store.names() == sorted(f"v{number}" for number in range(12))
    assert [sum(each.seed == seed for each in store.cards()) for seed in range(3)] == got


@pytest.mark.parametrize("said", [None, "", "   ", "\n"])
def test_without_a_statement_there_is_no_consent(said):
    with pytest.raises(MissingOption, match="consent"):
        validated_consent(said, "tester")


@pytest.mark.parametrize(
    "said", ["yes", "I agree", "ok " * 20, "this is a voice of somebody that I know well", "x" * 5_000]
)
def test_a_statement_says_who_agrees_to_what(said):
    with pytest.raises(OptionError, match="consent"):
        validated_consent(said, "tester")


def test_a_statement_is_kept_word_for_word():
    found = validated_consent(f"  {EXAMPLE}\n", "key-1", 12.9)
    assert found == Consent(EXAMPLE, "key-1", 12)
