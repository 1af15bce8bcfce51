"""Kaldi's cepstra: kaldi-native-fbank's numbers, and the expected power of the noise that Kaldi adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from asr_serve.audio.features.kaldi_fbank import Fbank, FbankOptions
from asr_serve.audio.features.kaldi_mfcc import KaldiMfcc, KaldiMfccOptions

FIXTURE = Path(__file__).parent / "fixtures" / "kaldi_mfcc.safetensors"
with safe_open(FIXTURE, "pt") as file:
    CASES = {name: KaldiMfccOptions(**asked) for name, asked in json.loads(file.metadata()["cases"]).items()}
    REFERENCE: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
PCM = REFERENCE["pcm"].float()[None] / 32_768


@pytest.mark.parametrize("name", CASES)
def test_equals_kaldi(name: str) -> None:
    mfcc = KaldiMfcc(CASES[name])
    ours = mfcc(PCM)
    assert ours.shape == (1, *REFERENCE[name].shape)
    assert ours.shape[1] == mfcc.count_frames(PCM.shape[1])
    # Float32's rounding is multiplied by the lifter too.
    order = torch.arange(ours.shape[2])
    lifter = CASES[name].lifter
    factors = 1 + 0.5 * lifter * torch.sin(torch.pi * order / lifter) if lifter else torch.ones(len(order))
    errors = (ours[0] - REFERENCE[name]).abs() / factors.abs().clamp(min=1)
    assert float(errors.max()) < 1e-4


def test_dither_adds_the_power_that_random_noise_has() -> None:
    torch.manual_seed(5)
    samples = 400 + 160 * 3_999
    tone = 2e-4 * torch.sin(torch.arange(samples) * 0.3)[None]
    noisy = Fbank(FbankOptions(scale=32_768.0, mels=40))(tone + torch.randn(1, samples) * 2 / 32_768)
    ours = Fbank(FbankOptions(scale=32_768.0, mels=40, dither=2.0))(tone)
    power = noisy.exp().mean(1)
    torch.testing.assert_close(ours.exp().mean(1), power, atol=0, rtol=0.1)


def test_dither_changes_silence_and_not_speech() -> None:
    plain, dithered = (KaldiMfcc(KaldiMfccOptions(coefficients=40, mels=40, dither=dither)) for dither in (0.0, 1.0))
    silence = torch.zeros(1, 400)
    assert float(plain(silence)[0, 0, 0]) < -80.0
    assert float(dithered(silence)[0, 0, 0]) > 0.0
    loud = PCM[:, 1_600:2_400] * 4
    torch.testing.assert_close(plain(loud), dithered(loud), atol=0.1, rtol=0)
