"""A vocoder is taught: the losses fall, a run goes on where it stopped, and what it ends in is a vocoder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asr_serve.audio.features.slaney_mel import AROUND_SAMPLES, SlaneyMel
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ, CorpusUtterance, VoiceCorpus
from asr_serve.devices.cpu import CpuDevice
from asr_serve.errors import OptionError
from asr_serve.models.registry import vocoder_card
from asr_serve.models.tts.fastpitch_network import FastPitchSizes
from asr_serve.models.tts.vocoders import source_filter
from asr_serve_tools.train import vocoder
from asr_serve_tools.train.predicted_mels import MelPredictor
from asr_serve_tools.train.spectral_losses import Discriminators, SpectralDistance
from asr_serve_tools.train.vocoder_data import VocoderCorpus
from asr_serve_tools.train.voice.acoustic_model import AcousticTrainingOptions, train_acoustic_model
from asr_serve_tools.train.voice.sentences import held_out

FRAMES = 40
SIZES = {"width": 16, "inner": 24, "blocks": 2, "channels": 2, "crop_frames": 24, "judged_frames": 16, "batch": 4}


def hummed(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples and F0: a buzz of a changing pitch, hissing now and then."""
    rng = np.random.default_rng(seed)
    count = FRAMES * HOP
    at = np.arange(count) / count
    f0 = 150 + 60 * np.sin(2 * np.pi * (at + rng.random()))
    phase = 2 * np.pi * np.cumsum(f0) / RATE_HZ
    buzz = sum(np.cos(h * phase) / h for h in range(1, 30))
    hiss = rng.standard_normal(count) * (np.sin(12 * np.pi * at) > 0.7)
    middles = (np.arange(FRAMES) * HOP + HOP // 2).astype(int)
    return (0.05 * buzz + 0.03 * hiss).astype(np.float32), f0[middles].astype(np.float32)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two voices, a sentence in twenty held out."""
    folder = tmp_path_factory.mktemp("speech")
    texts = [f"Sentence {i}." for i in range(60)]
    assert any(map(held_out, texts))
    for name in ("one", "two"):
        voice = VoiceCorpus(folder, name, write=True)
        for i, text in enumerate(texts):
            pcm, f0 = hummed(i + len(name) * 100)
            voice.append(CorpusUtterance(text, "a", len(pcm), [FRAMES]), pcm, f0)
    return folder


def asked(speech: Path, run: Path, steps: int, **more: Any) -> vocoder.VocoderTrainingOptions:
    rest = {"judged_from": 30, "log_every": 10, "save_every": 20, "tests": 2, "lr": 3e-3, **SIZES, **more}
    return vocoder.VocoderTrainingOptions(speech=speech, run=run, steps=steps, device="cpu", dtype="fp32", **rest)


def learn(speech: Path, run: Path, steps: int, **more: Any) -> list[dict]:
    """Returns the log."""
    vocoder.train_vocoder(asked(speech, run, steps, **more))
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def taught(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    run = tmp_path_factory.mktemp("whole")
    return run, learn(speech, run, 40)


@pytest.mark.slow
def test_the_distances_fall(taught: tuple[Path, list[dict]]) -> None:
    log = taught[1]
    alone = [line for line in log if "critic" not in line]
    assert alone[-1]["stft"] < 0.9 * alone[0]["stft"]
    assert alone[-1]["mel"] < 0.9 * alone[0]["mel"]
    judged = [line for line in log if "critic" in line]
    assert judged
    assert all(line["step"] > 30 for line in judged)
    held = [line["held_out"] for line in log if "held_out" in line]
    assert held[-1]["mel"] < held[0]["mel"]


@pytest.mark.slow
def test_a_stopped_run_continues(taught: tuple[Path, list[dict]], speech: Path, tmp_path: Path) -> None:
    learn(speech, tmp_path, 20)
    log = learn(speech, tmp_path, 40)
    assert [line["step"] for line in log] == [10, 20, 30, 40]
    # 20 steps were to be all: they went down further than the first half of 30, and no two runs are then the same.
    assert log[-1]["held_out"]["mel"] == pytest.approx(taught[1][-1]["held_out"]["mel"], rel=0.2)
    with pytest.raises(OptionError, match="another run folder"):
        learn(speech, tmp_path, 40, width=32)


@pytest.mark.slow
def test_an_interrupted_run_equals_an_uninterrupted_one(speech: Path, tmp_path: Path) -> None:
    def run(folder: Path) -> vocoder.VocoderTraining:
        folder.mkdir(exist_ok=True)
        options = vocoder.VocoderTrainingOptions(speech=speech, run=folder, steps=8, judged_from=3, tests=1, **SIZES)
        return vocoder.VocoderTraining(
            options, VocoderCorpus(speech, SIZES["crop_frames"]), torch.device("cpu"), bf16=False
        )

    whole = run(tmp_path / "whole")
    for _ in range(6):
        last = whole.train_step()
    stopped = run(tmp_path / "stopped")
    for _ in range(4):
        stopped.train_step()
    stopped.save()
    again = run(tmp_path / "stopped")
    assert again.step == 4
    again.train_step()
    assert again.train_step() == pytest.approx(last, rel=1e-4)
    for name, tensor in whole.averaged_tensors.items():
        torch.testing.assert_close(again.averaged_tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_result_is_a_vocoder(taught: tuple[Path, list[dict]], speech: Path) -> None:
    folder = taught[0] / "checkpoint"
    loaded = source_filter.load(folder, vocoder_card("source-filter-22k"), CpuDevice(torch.float32))
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    found = vocoder.mean_distances(
        VocoderCorpus(speech, 24), 2, lambda frames, seed: loaded.vocode(frames, torch.tensor([seed]))
    )
    logged = taught[1][-1]["held_out"]
    assert found == pytest.approx(logged, abs=0.02)


def test_folders_without_training_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        VocoderCorpus(tmp_path, 24)
    voice = VoiceCorpus(tmp_path, "short", write=True)
    pcm, f0 = hummed(1)
    voice.append(CorpusUtterance("Sentence 1.", "a", len(pcm), [FRAMES]), pcm, f0)
    with pytest.raises(OptionError, match="0 to test with"):
        VocoderCorpus(tmp_path, 24)


def test_a_crop_is_a_part_of_the_whole(speech: Path) -> None:
    found = VocoderCorpus(speech, 24)
    recording = found.test_recordings(1)[0]
    whole = torch.from_numpy(recording.pcm.astype(np.float32))[None] / 32_767
    frames, pcm = found.crop(recording, 10, 24, 0.5)
    torch.testing.assert_close(pcm, 0.5 * whole[:, 10 * HOP : 34 * HOP])
    torch.testing.assert_close(frames[..., :80], SlaneyMel()(0.5 * whole)[:, 10:34], rtol=0, atol=1e-3)
    assert frames[0, :, 80].tolist() == recording.f0[10:34].tolist()
    edge, _ = found.crop(recording, FRAMES - 3, 3)
    torch.testing.assert_close(edge[..., :80], SlaneyMel()(whole)[:, -3:], rtol=0, atol=1e-3)
    assert len(found.crop(recording, 0, FRAMES)[1][0]) == FRAMES * HOP
    assert AROUND_SAMPLES == 384


def test_half_of_the_spectra_may_be_an_acoustic_models(speech: Path, tmp_path: Path) -> None:
    sizes = FastPitchSizes(phonemes=2, speakers=2, width=16, inner=24, encoder_layers=1, decoder_layers=1)
    options = AcousticTrainingOptions(
        speech=speech, out=tmp_path, steps=3, speakers=("one", "two"), phonemes={"a": 1}, sizes=sizes
    )
    train_acoustic_model(options, lambda _: None)
    acoustic = MelPredictor(tmp_path)
    found = VocoderCorpus(speech, 24, acoustic)
    recording = found.learning[1][3]
    (alone,) = acoustic.frames([recording])
    assert alone.shape == (FRAMES, 80)
    together = acoustic.frames(found.learning[1][:5])[3]
    np.testing.assert_allclose(alone.astype(np.float32), together.astype(np.float32), atol=0.06)  # bf16
    recorded, mixed = VocoderCorpus(speech, 24).batch(64, random.Random(0)), found.batch(64, random.Random(0))
    own = SlaneyMel()(mixed.pcm)  # but for the ends, which do not know what came before
    off = (mixed.frames[:, 3:-3, :80] - own[:, 3:-3]).abs().mean((1, 2))
    assert recorded.frames.shape == mixed.frames.shape
    assert 10 < int((off > 0.5).sum()) < 54, "some are predicted, some recorded"
    with pytest.raises(OptionError, match="speakers: one, two"):
        acoustic.frames([recording._replace(voice="three")])
    with pytest.raises(OptionError, match="a checkpoint"):
        MelPredictor(tmp_path / "nowhere")


def test_the_distance_of_audio_to_itself_is_zero() -> None:
    pcm = torch.from_numpy(hummed(3)[0])[None]
    distance = SpectralDistance()
    assert all(value.item() < 1e-3 for value in distance(pcm, pcm).values())
    soft, softer = distance(0.9 * pcm, pcm), distance(0.5 * pcm, pcm)
    assert all(0 < soft[name] < softer[name] for name in soft)


def test_noise_is_nearest_to_noise() -> None:
    """By the energy distance; by that of one saying, what has the mean loudness of noise would be nearer."""
    chance = torch.Generator().manual_seed(1)
    wanted, said, again = (0.05 * torch.randn(4, 16_000, generator=chance) for _ in range(3))
    # As loud in every bin of every frame, whatever window: pulses so close that each has a few.
    smooth = torch.zeros(4, 16_000)
    smooth[:, ::64] = 0.05 * 64**0.5
    distance = SpectralDistance()
    noise, pulses = distance(said, wanted, again)["stft"], distance(smooth, wanted, smooth)["stft"]
    assert noise < 0.8 * pulses
    softer = distance(0.7 * said, wanted, 0.7 * again)
    assert all(softer[name] > value for name, value in distance(said, wanted, again).items())


@pytest.mark.slow
def test_a_run_may_begin_with_a_checkpoint(taught: tuple[Path, list[dict]], speech: Path, tmp_path: Path) -> None:
    learn(speech, tmp_path, 20, start=taught[0] / "checkpoint")
    # And goes on, with or without.
    log = learn(speech, tmp_path, 40)
    assert log[0]["mel"] < taught[1][0]["mel"]
    assert log[-1]["held_out"]["mel"] < taught[1][-1]["held_out"]["mel"] * 1.1
    wrong = vocoder.VocoderTrainingOptions(speech=speech, run=tmp_path / "other", start=taught[0] / "checkpoint")
    with pytest.raises(OptionError, match="other sizes"):
        vocoder.load_start_tensors(wrong)


@pytest.mark.slow
def test_discriminators_learn_to_separate_two_signals() -> None:
    torch.manual_seed(0)
    critics = Discriminators(channels=2)
    wanted = torch.stack([torch.from_numpy(hummed(i)[0]) for i in range(4)])
    said = 0.1 * torch.randn(wanted.shape)
    optimizer = torch.optim.Adam(critics.parameters(), 1e-2)
    first = critics.discriminator_loss(said, wanted).item()
    for _ in range(30):
        loss = critics.discriminator_loss(said, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first
    blamed, fine = critics.generator_loss(said, wanted), critics.generator_loss(wanted, wanted)
    assert blamed["critic"] > fine["critic"]
    assert fine["layers"] == 0 < blamed["layers"]
