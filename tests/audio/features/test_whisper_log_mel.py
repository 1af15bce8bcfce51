"""Log-mel frames against transformers' own, on real speech."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asr_serve.audio.features.whisper_log_mel import LogMel, PackedLogMel, mel_filters
from asr_serve.audio.reader import read_audio


@pytest.fixture(scope="module", params=["beckett.wav", "two_cities.wav"])
def speech(request: pytest.FixtureRequest, packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / request.param)


def theirs(mels: int, seconds: int, pcm: np.ndarray) -> np.ndarray:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    return extractor(pcm, sampling_rate=16_000, return_tensors="np").input_features


def padded(pcm: np.ndarray, seconds: int) -> torch.Tensor:
    cut = pcm[: 16_000 * seconds]
    return torch.from_numpy(np.pad(cut, (0, 16_000 * seconds - len(cut))))


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [8, 30])
def test_equals_transformers(speech: np.ndarray, mels: int, seconds: int) -> None:
    ours = LogMel(mels)(padded(speech, seconds)[None])
    assert ours.shape == (1, mels, 100 * seconds)
    np.testing.assert_allclose(ours.numpy(), theirs(mels, seconds, speech), atol=1e-4, rtol=0)


def test_a_row_does_not_change_its_neighbours(speech: np.ndarray, rng: np.random.Generator) -> None:
    features = LogMel()
    loud = torch.from_numpy(rng.standard_normal(16_000 * 8).astype(np.float32))
    quiet = padded(speech, 8) * 1e-3
    together = features(torch.stack([quiet, loud, torch.zeros_like(loud)]))
    for row, pcm in zip(together, (quiet, loud, torch.zeros_like(loud)), strict=True):
        torch.testing.assert_close(row, features(pcm[None])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("samples", [201, 16_000, 16_100, 16_159, 16_160])
def test_a_frame_for_every_whole_hop(samples: int) -> None:
    assert LogMel()(torch.zeros(2, samples)).shape == (2, 80, samples // 160)


def test_silence_is_the_floor_everywhere() -> None:
    frames = LogMel()(torch.zeros(1, 16_000))
    assert torch.equal(frames, torch.full_like(frames, -1.5))


@pytest.mark.parametrize("mels", [80, 128])
def test_filters_are_triangles_of_area_one(mels: int) -> None:
    filters = mel_filters(mels)
    assert filters.shape == (mels, 201)
    assert (filters >= 0).all()
    wide = filters[-20:]  # where a bin is narrow beside a triangle
    torch.testing.assert_close(wide.sum(1) * 40, torch.ones(20, dtype=torch.float64), atol=0.02, rtol=0)


# --- clips end to end -------------------------------------------------------------------------------------


LENGTHS = (1, 50, 201, 8_000, 79_900, 80_000, 127_780, 127_999, 128_000)
"""In samples, of a window of 8 s: the last ones reach the frames that see its end."""


@pytest.mark.parametrize("mels", [80, 128])
def test_packed_clips_equal_transformers(speech: np.ndarray, mels: int) -> None:
    features = PackedLogMel(mels, 800, torch.device("cpu"))
    clips = [speech[-n:] for n in LENGTHS] + [np.zeros(16_000, np.float32)]
    together = features([torch.from_numpy(clip) for clip in clips], [800] * len(clips)).split(800)
    for clip, ours in zip(clips, together, strict=True):
        np.testing.assert_allclose(ours.T.numpy(), theirs(mels, 8, clip)[0], atol=1e-4, rtol=0)


def test_fewer_frames_of_the_same_window(speech: np.ndarray) -> None:
    features = PackedLogMel(80, 800, torch.device("cpu"))
    clips = [torch.from_numpy(speech[:n]) for n in (4_000, 31_999, 128_000)]
    whole = features(clips, [800] * 3).split(800)
    frames = [30, 777, 800]
    for count, ours, all_of_it in zip(frames, features(clips, frames).split(frames), whole, strict=True):
        torch.testing.assert_close(ours, all_of_it[:count], atol=1e-6, rtol=0)


@pytest.mark.parametrize("fft_samples", [400, 512])
def test_filters_stand_where_they_should(fft_samples: int) -> None:
    """The triangles' tops rise from bin to bin, whatever the bins."""
    filters = mel_filters(80, fft_samples)
    assert filters.shape == (80, fft_samples // 2 + 1)
    tops_hz = filters[40:].argmax(1) * 16_000 / fft_samples
    others_hz = mel_filters(80, 1_024)[40:].argmax(1) * 16_000 / 1_024
    assert ((tops_hz - others_hz).abs() <= 16_000 / fft_samples).all()
