"""Cepstra against TensorFlow's ops, as LiteRT computed them in a DeepSpeech graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from asr_serve.audio.features.mfcc import Mfcc, MfccShape, cosines, mel_filters

FIXTURE = Path(__file__).parents[2] / "models" / "fixtures" / "deepspeech.safetensors"
HOP, WINDOW = MfccShape().hop_samples, MfccShape().window_samples


@pytest.fixture(scope="module")
def numbers() -> dict[str, torch.Tensor]:
    """Made by tests/models/generate_deepspeech.py."""
    return load_file(FIXTURE)


@pytest.mark.parametrize("clip", ["armenian", "noise"])
def test_equals_tensorflows_ops(numbers: dict[str, torch.Tensor], clip: str) -> None:
    theirs = numbers[f"{clip}.cepstra"]
    assert theirs.std(0).min() > 0.05, "the clip says nothing: this would prove nothing"
    pcm = numbers[f"{clip}.pcm"].float() / 32_768
    # Their last frame is of what is left after the last whole window, filled up with zeros.
    ours = Mfcc(MfccShape())(F.pad(pcm, (0, len(theirs) * HOP + WINDOW - HOP - len(pcm)))[None])[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("samples", "frames"), [(512, 1), (831, 1), (832, 2), (16_000, 49)])
def test_a_frame_for_every_whole_window(samples: int, frames: int) -> None:
    assert Mfcc(MfccShape())(torch.zeros(2, samples)).shape == (2, frames, 26)


def test_a_frame_depends_on_its_own_window_only(rng: np.random.Generator) -> None:
    pcm = torch.from_numpy(rng.standard_normal((3, 4_000)).astype(np.float32))
    mfcc = Mfcc(MfccShape())
    whole = mfcc(pcm)
    for frame in (0, 4, whole.shape[1] - 1):
        alone = mfcc(pcm[1:2, frame * HOP : frame * HOP + WINDOW])
        torch.testing.assert_close(alone[0, 0], whole[1, frame], atol=1e-4, rtol=1e-5)


def test_silence_is_the_floor() -> None:
    frames = Mfcc(MfccShape())(torch.zeros(1, 2_000))
    expected = torch.zeros(26)
    expected[0] = (2 / 40) ** 0.5 * 40 * np.log(1e-12)
    torch.testing.assert_close(frames[0, 0], expected, atol=1e-3, rtol=1e-5)


def test_a_tone_is_loudest_in_its_band() -> None:
    filters = mel_filters(MfccShape(), 257)
    assert filters.shape == (40, 257)
    assert (filters >= 0).all()
    loudest = filters.argmax(1) * 31.25
    assert (loudest.diff() >= 0).all()
    # Between the middles of two neighbours their weights add up to one.
    between = slice(int(loudest[0] / 31.25) + 1, int(loudest[-1] / 31.25))
    torch.testing.assert_close(filters.sum(0)[between], torch.ones(257, dtype=torch.float64)[between])


def test_bins_outside_the_limits_count_for_nothing() -> None:
    filters = mel_filters(MfccShape(low_hz=300.0, high_hz=4_000.0), 257)
    heard = filters.sum(0).nonzero()[:, 0] * 31.25
    assert heard.min() >= 300
    assert heard.max() <= 4_000


def test_coefficients_do_not_overlap() -> None:
    rows = cosines(MfccShape(coefficients=40))
    expected = torch.eye(40, dtype=torch.float64)
    expected[0, 0] = 2
    torch.testing.assert_close(rows @ rows.t(), expected)
