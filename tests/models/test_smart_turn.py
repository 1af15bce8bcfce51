"""Smart Turn against the package that publishes it, and on real speech."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import msgspec
import numpy as np
import onnxruntime
import pytest

from asr_serve import units
from asr_serve.audio.reader import read_audio
from asr_serve.errors import UnknownModel, WeightsCorrupt, WeightsMissing
from asr_serve.models.auxiliary import smart_turn
from asr_serve.models.auxiliary.smart_turn import CONTEXT_SAMPLES, GRAPH, Model
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_cards, model_modules, turn_card, turn_cards

CARD = turn_card("smart-turn")


@pytest.fixture(scope="module")
def package() -> Path:
    """Its folder of turn models."""
    spec = importlib.util.find_spec("pipecat")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the turn model is not installed: pip install {CARD.package}")
    return Path(spec.submodule_search_locations[0]) / "audio" / "turn" / "smart_turn"


@pytest.fixture(scope="module")
def model(package: Path) -> Model:
    return Model(store.verified_published_folder(CARD))


@pytest.fixture(scope="module")
def reference(package: Path) -> Callable[[np.ndarray], float]:
    """The package's preparation of the audio, loaded by path: importing the package wants all of its own."""
    spec = importlib.util.spec_from_file_location("pipecat_features", package / "_whisper_features.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    graph = onnxruntime.InferenceSession(str(package / "data" / GRAPH), providers=["CPUExecutionProvider"])

    def finished(pcm: np.ndarray) -> float:
        end = pcm[-CONTEXT_SAMPLES:]
        whole = np.pad(end, (CONTEXT_SAMPLES - len(end), 0))
        features = theirs.compute_whisper_log_mel_features(whole, do_normalize=True)
        return float(graph.run(None, {"input_features": features[None]})[0][0, 0])

    return finished


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    """The best of times, the worst of times: a long sentence of short clauses."""
    return read_audio(packaged_speech / "two_cities.wav")


def until(pcm: np.ndarray, end_s: float) -> np.ndarray:
    return pcm[: units.s_to_samples(end_s)]


@pytest.mark.slow
def test_equals_the_package(model: Model, reference: Callable[[np.ndarray], float], speech: np.ndarray) -> None:
    ends_s = (0.3, 2.5, 4.7, 7.9, 8.0, 8.1, 12.9, 20.0, 24.2, 28.5, 36.6, 41.8)
    ours = [model.finished(until(speech, end_s)) for end_s in ends_s]
    theirs = [reference(until(speech, end_s)) for end_s in ends_s]
    # A feature that another machine rounds the other way moves the answers that are not sure.
    np.testing.assert_allclose(ours, theirs, atol=0.25)
    assert np.mean(np.abs(np.subtract(ours, theirs)) < 1e-3) > 0.5
    assert max(ours) > 0.9
    assert min(ours) < 0.1


def test_a_pause_within_a_sentence_is_not_its_end(model: Model, speech: np.ndarray) -> None:
    """200 ms into each pause: after a clause, after the last word of a sentence."""
    within = [model.finished(until(speech, pause_s + 0.2)) for pause_s in (6.16, 8.18, 10.28, 14.74, 18.72, 25.96)]
    ends = [model.finished(until(speech, pause_s + 0.2)) for pause_s in (28.26, 41.62)]
    assert max(within) < 0.5 < min(ends), (within, ends)


def test_the_middle_of_a_word_is_no_end(model: Model, packaged_speech: Path) -> None:
    pcm = read_audio(packaged_speech / "beckett.wav")
    assert model.finished(until(pcm, 7.3)) < 0.5 < model.finished(pcm)


def test_only_the_end_is_heard(model: Model, speech: np.ndarray, rng: np.random.Generator) -> None:
    end = until(speech, 8.0)
    before = rng.standard_normal(50_000).astype(np.float32)
    assert model.finished(np.concatenate([before, end])) == model.finished(end)


@pytest.mark.parametrize(
    "pcm",
    [
        np.zeros(1, np.float32),
        np.zeros(CONTEXT_SAMPLES, np.float32),
        np.ones(20, np.float32),
        np.full(300_000, 1e-30, np.float32),
        np.full(300_000, 1e30, np.float32),
        np.tile(np.array([1e30, -1e30], np.float32), 4_000),
    ],
    ids=["a sample", "silence", "a step", "next to nothing", "a huge offset", "a huge noise"],
)
def test_whatever_is_heard_the_answer_is_a_probability(model: Model, pcm: np.ndarray) -> None:
    assert 0 <= model.finished(pcm) <= 1


def test_the_folder_is_the_list() -> None:
    assert model_modules("turn") == {"smart_turn": smart_turn}
    assert set(turn_cards()) == {"smart-turn"}
    assert "smart-turn" not in asr_cards()
    assert len(set(CARD.languages)) == 23
    with pytest.raises(UnknownModel, match=r"'smart-turm'.*auto, none, smart-turn"):
        turn_card("smart-turm")


def test_missing_weights_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "package_folder", lambda _: None)
    with pytest.raises(WeightsMissing, match=r"pip install --no-deps pipecat-ai==1\.14\.0") as missing:
        store.verified_published_folder(CARD)
    assert "asr-serve models fetch smart-turn" in str(missing.value)
    assert f"put {GRAPH} of pipecat-ai/smart-turn-v3 into {tmp_path / 'smart-turn'}" in str(missing.value)


def test_it_is_fetched_and_its_sums_are_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "package_folder", lambda _: None)
    sums = hashlib.sha256(b"a graph").hexdigest()
    card = msgspec.structs.replace(CARD, packaged=msgspec.structs.replace(CARD.packaged, sha256={GRAPH: sums}))
    there = b"another graph"

    def download(repo: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert (repo, revision, allow_patterns) == (CARD.hub, CARD.revision, [GRAPH])
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / GRAPH).write_bytes(there)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    with pytest.raises(WeightsCorrupt, match=f"not what was published: .* has sha256 .* expected {sums}"):
        store.fetch(card)
    assert store.locate(card) is None
    assert list(tmp_path.iterdir()) == []
    there = b"a graph"
    folder = store.fetch(card)
    assert folder == store.locate(card) == store.verified_published_folder(card)
    assert [path.name for path in folder.iterdir()] == [GRAPH]


def test_the_cache_comes_before_the_package_and_is_checked(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    folder = tmp_path / "smart-turn"
    folder.mkdir()
    (folder / GRAPH).write_bytes((package / "data" / GRAPH).read_bytes())
    assert store.verified_published_folder(CARD) == folder
    (folder / GRAPH).write_bytes(b"no graph")
    with pytest.raises(WeightsCorrupt, match="sha256"):
        store.verified_published_folder(CARD)
    with pytest.raises(WeightsCorrupt, match="cannot be read as a graph"):
        Model(folder)
