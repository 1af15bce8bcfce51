"""HiFi-GAN's mel spectrogram, by the definition, and of a stretch as of the whole."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr_serve.audio.features.slaney_mel import AROUND_SAMPLES, HOP_SAMPLES, MELS, RATE_HZ, SlaneyMel


def clip(samples: int) -> Tensor:
    chance = torch.Generator().manual_seed(1)
    tone = (2 * math.pi * 1_000 * torch.arange(samples) / RATE_HZ).sin()
    return (0.3 * tone + 0.05 * torch.randn(samples, generator=chance))[None]


def corners_hz() -> np.ndarray:
    """Slaney's scale in steps of a third of a mel below 1 kHz, found by walking it."""
    top = 15 + math.log(8) / (math.log(6.4) / 27)
    mels = np.linspace(0, top, MELS + 2)
    return np.where(mels < 15, mels * 200 / 3, 1_000 * np.exp((mels - 15) * math.log(6.4) / 27))


def test_frames_are_those_of_the_definition() -> None:
    pcm = clip(4_000)
    found = SlaneyMel()(pcm)
    assert found.shape == (1, 4_000 // HOP_SAMPLES, MELS)
    mirrored = np.pad(pcm[0].double().numpy(), 384, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1_024) / 1_024)
    bins, corners = np.arange(513) * RATE_HZ / 1_024, corners_hz()
    for t in (0, 7, 14):
        spectrum = np.fft.rfft(mirrored[t * 256 : t * 256 + 1_024] * window)
        magnitude = np.sqrt(np.abs(spectrum) ** 2 + 1e-9)
        for band in range(MELS):
            low, middle, high = corners[band : band + 3]
            weight = np.clip(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0, None)
            expected = math.log(max(1e-5, float(weight @ magnitude) * 2 / (high - low)))
            assert abs(found[0, t, band].item() - expected) < 2e-4


def test_a_stretch_has_the_frames_of_the_whole() -> None:
    pcm, mel = clip(9_000), SlaneyMel()
    whole = mel(pcm)
    part = mel.within(pcm[:, 10 * HOP_SAMPLES - AROUND_SAMPLES : 20 * HOP_SAMPLES + AROUND_SAMPLES])
    torch.testing.assert_close(part, whole[:, 10:20])


def test_silence_is_the_floor() -> None:
    found = SlaneyMel()(torch.zeros(2, 1_000))
    # What is added to a bin's square is more than the floor where a triangle is wide.
    assert found.min() >= math.log(1e-5) - 1e-6
    assert found.max() < -9
