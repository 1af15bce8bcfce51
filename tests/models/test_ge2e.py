"""GE2E against resemblyzer's own code, and what it is for: telling voices apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from asr_serve.audio.reader import read_audio
from asr_serve.errors import AsrServeError, EmptyAudio, WeightsCorrupt
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store

FIXTURE = Path(__file__).parent / "fixtures" / "ge2e.safetensors"


@pytest.fixture(scope="module")
def model() -> ge2e.Ge2eEncoder:
    if store.published_folder(ge2e.CARDS[0]) is None:
        pytest.skip("resemblyzer is not installed: pip install --no-deps resemblyzer==0.1.4")
    return ge2e.load()


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    return load_file(FIXTURE)


def pcm(kept: dict[str, np.ndarray], name: str) -> np.ndarray:
    return kept[f"{name}.pcm"].astype(np.float32) / 32_768


@pytest.mark.parametrize("name", ["blip", "short", "one", "odd", "edge", "long"])
def test_the_voice_is_the_packages(model, kept, name):
    assert np.abs(model.embed(pcm(kept, name)) - kept[f"{name}.voice"]).max() < 1e-4


def test_the_spectrogram_is_the_packages(model, kept):
    ours = model.mel(torch.from_numpy(pcm(kept, "short"))).numpy()
    assert ours.shape == kept["short.mel"].shape
    np.testing.assert_allclose(ours, kept["short.mel"], rtol=1e-3, atol=1e-6)


def test_batches_change_nothing(model, kept, monkeypatch):
    whole = model.embed(pcm(kept, "long"))
    monkeypatch.setattr(ge2e, "BATCH", 2)
    np.testing.assert_allclose(model.embed(pcm(kept, "long")), whole, atol=1e-6)


def test_one_speaker_is_nearer_to_himself_than_to_another(model, packaged_speech):
    cities, beckett = (read_audio(packaged_speech / name) for name in ("two_cities.wav", "beckett.wav"))
    one, two = (model.embed_speaker([cities[at : at + 160_000]]) for at in (0, 200_000))
    other = model.embed_speaker([beckett])
    assert ge2e.similarity(one, two) > 0.75
    assert ge2e.similarity(one, two) > ge2e.similarity(one, other) + 0.1


def test_loudness_and_pauses_do_not_count(model, packaged_speech):
    clip = read_audio(packaged_speech / "beckett.wav")[:80_000]
    quiet = np.concatenate([np.zeros(32_000, np.float32), clip * 0.05, np.zeros(48_000, np.float32)])
    assert ge2e.similarity(model.embed_speaker([clip]), model.embed_speaker([quiet])) > 0.99


def test_silence_and_nothing_are_refused(model):
    with pytest.raises(EmptyAudio, match="silence"):
        ge2e.normalize_clip(np.zeros(16_000, np.float32))
    with pytest.raises(EmptyAudio):
        model.embed(np.zeros(0, np.float32))


def test_missing_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "package_folder", lambda card: None)
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    with pytest.raises(AsrServeError, match=r"pip install --no-deps resemblyzer==0\.1\.4"):
        store.verified_published_folder(ge2e.CARDS[0])


def test_changed_weights_are_not_read(monkeypatch, tmp_path):
    (tmp_path / ge2e.WEIGHTS).write_bytes(b"other")
    monkeypatch.setattr(store, "package_folder", lambda card: tmp_path)
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    came = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(WeightsCorrupt, match=came):
        store.verified_published_folder(ge2e.CARDS[0])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_an_unreadable_checkpoint_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ge2e.WEIGHTS).write_bytes(content)
    with pytest.raises(WeightsCorrupt, match="install the package again"):
        ge2e.read(tmp_path)


def test_a_checkpoint_of_something_else_is_corrupt(tmp_path: Path) -> None:
    torch.save({"state": {}}, tmp_path / ge2e.WEIGHTS)
    with pytest.raises(WeightsCorrupt, match="model_state"):
        ge2e.read(tmp_path)
