"""What tells the files of a voice model from those of another: all that it reads, however deep."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from asr_serve.engine.tts.builder import VoiceCheckpoint
from asr_serve.errors import OptionError, UnknownModel, WeightsCorrupt
from asr_serve.models.registry import tts_card, vocoder_card

NAMES = ("model.onnx", "onnx/model.onnx", "voices/a.bin")


@pytest.fixture
def checkpoint(tmp_path: Path) -> VoiceCheckpoint:
    for name in (*NAMES, "beside.txt", "deep/er/nothing.bin"):
        path = tmp_path / "voice" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "vocoder").mkdir()
    (tmp_path / "vocoder" / "model.safetensors").write_text("vocoder")
    card = msgspec.structs.replace(tts_card("kokoro"), files=("onnx/model.onnx", "voices/*.bin"))
    vocoder = vocoder_card("source-filter-22k")
    return VoiceCheckpoint(card, tmp_path / "voice", vocoder, tmp_path / "vocoder")


@pytest.mark.parametrize("name", [*(f"voice/{name}" for name in NAMES), "vocoder/model.safetensors"])
def test_every_file_that_is_read_counts(checkpoint: VoiceCheckpoint, name: str) -> None:
    before = checkpoint.fingerprint()
    assert checkpoint.fingerprint() == before
    path = checkpoint.folder.parent / name
    path.write_text("other")
    assert checkpoint.fingerprint() != before
    path.write_text(name.partition("/")[2] if name.startswith("voice") else "vocoder")
    assert checkpoint.fingerprint() == before
    path.rename(path.with_name("elsewhere"))
    assert checkpoint.fingerprint() != before


def test_what_no_card_names_does_not(checkpoint: VoiceCheckpoint) -> None:
    before = checkpoint.fingerprint()
    (checkpoint.folder / "deep" / "er" / "nothing.bin").write_text("other")
    assert checkpoint.fingerprint() == before


def test_a_vocoder_may_be_a_checkpoints_folder(tmp_path: Path) -> None:
    ours = tts_card("fastpitch-en")
    shipped = VoiceCheckpoint.find(ours, None, None)
    assert shipped.vocoder_folder is not None
    mine = tmp_path / "mine"
    shutil.copytree(shipped.vocoder_folder, mine)
    found = VoiceCheckpoint.find(ours, None, str(mine))
    assert (found.vocoder, found.vocoder_folder) == (shipped.vocoder, mine)
    (mine / "config.json").write_text('{"model_type": "vocos"}')
    with pytest.raises(OptionError, match="source_filter"):
        VoiceCheckpoint.find(ours, None, str(mine))
    (mine / "config.json").write_text("[]")
    with pytest.raises(WeightsCorrupt, match="holds a JSON list"):
        VoiceCheckpoint.find(ours, None, str(mine))
    with pytest.raises(UnknownModel):
        VoiceCheckpoint.find(ours, None, str(tmp_path))
