"""What tells the files of a voice model from those of another: all that it reads, however deep."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asr_serve.engine.speaking.parts import VoiceCheckpoint
from asr_serve.models.card import codec_card, voice_card

NAMES = ("model.onnx", "onnx/model.onnx", "voices/a.bin")


@pytest.fixture
def checkpoint(tmp_path: Path) -> VoiceCheckpoint:
    for name in (*NAMES, "beside.txt", "deep/er/nothing.bin"):
        path = tmp_path / "voice" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "model.safetensors").write_text("codec")
    card = msgspec.structs.replace(voice_card("kokoro"), files=("onnx/model.onnx", "voices/*.bin"))
    codec = codec_card("source-filter-22k")
    return VoiceCheckpoint(card, tmp_path / "voice", codec, tmp_path / "codec")


@pytest.mark.parametrize("name", [*(f"voice/{name}" for name in NAMES), "codec/model.safetensors"])
def test_every_file_that_is_read_counts(checkpoint: VoiceCheckpoint, name: str) -> None:
    before = checkpoint.fingerprint()
    assert checkpoint.fingerprint() == before
    path = checkpoint.folder.parent / name
    path.write_text("other")
    assert checkpoint.fingerprint() != before
    path.write_text(name.partition("/")[2] if name.startswith("voice") else "codec")
    assert checkpoint.fingerprint() == before
    path.rename(path.with_name("elsewhere"))
    assert checkpoint.fingerprint() != before


def test_what_no_card_names_does_not(checkpoint: VoiceCheckpoint) -> None:
    before = checkpoint.fingerprint()
    (checkpoint.folder / "deep" / "er" / "nothing.bin").write_text("other")
    assert checkpoint.fingerprint() == before
