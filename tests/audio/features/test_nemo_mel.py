"""NeMo's spectrogram: its numbers, and the same ones whatever window they are seen through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.audio.features.nemo_mel import BEFORE_SAMPLES, NemoMel, check
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES

HELD = load_file(Path(__file__).parents[2] / "models" / "fixtures" / "fastconformer.safetensors")
CLIPS = [HELD["pcm.1"][:5_000].float() / 32_768, HELD["pcm.2"].float() / 32_768]
CPU = torch.device("cpu")
CLOSE = {"atol": 1e-4, "rtol": 1e-5}
"""To NeMo. Both reckon in float32, whose rounding shows where a band is all but silent: at -14, near the guard."""


def window(pcm: Tensor, first: int, frames: int) -> Tensor:
    """What `frames` frames from `first` on need, with zeros where there is no audio."""
    begin, samples = 160 * first - BEFORE_SAMPLES, 160 * (frames - 1) + 401
    found = torch.zeros(samples)
    part = pcm[max(0, begin) : max(0, begin + samples)]
    found[max(0, -begin) :][: len(part)] = part
    return found


def mel(features: NemoMel, asked: list[tuple[Tensor, int, int]], frames: int) -> Tensor:
    """Of rows (pcm, first frame, end)."""
    pcm = torch.stack([window(pcm, first, frames) for pcm, first, _ in asked])
    return features(pcm, torch.tensor([row[1] for row in asked]), torch.tensor([row[2] for row in asked]))


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("clip", [0, 1])
def test_features_equal_nemo(mels: int, clip: int) -> None:
    theirs, pcm = HELD[f"mel.{mels}.{clip}"], CLIPS[clip]
    ours = mel(NemoMel(mels, CPU), [(pcm, 0, len(pcm))], len(theirs))
    torch.testing.assert_close(ours[0], theirs, **CLOSE)


def test_a_window_anywhere_has_the_same_frames() -> None:
    features, theirs, pcm = NemoMel(80, CPU), HELD["mel.80.0"], CLIPS[0]
    rows = [(pcm, first, len(pcm)) for first in (0, 1, 7, 20)]
    for (_, first, _), ours in zip(rows, mel(features, rows, 9), strict=True):
        torch.testing.assert_close(ours, theirs[first : first + 9], **CLOSE)


def test_frames_outside_the_session_are_empty() -> None:
    features, theirs, pcm = NemoMel(80, CPU), HELD["mel.80.0"], CLIPS[0]
    before, after = mel(features, [(pcm, -3, len(pcm)), (pcm, 25, len(pcm))], 9)
    assert not before[:3].any()
    torch.testing.assert_close(before[3:], theirs[:6], **CLOSE)
    torch.testing.assert_close(after[:6], theirs[25:], **CLOSE)
    assert not after[6:].any()


def test_frames_are_the_same_before_the_end_is_known() -> None:
    features, pcm = NemoMel(80, CPU), CLIPS[0]
    goes_on, over = mel(features, [(pcm, 5, UNBOUNDED_SAMPLES), (pcm, 5, len(pcm))], 20)
    assert torch.equal(goes_on, over)


def test_settings_are_those_of_streaming_checkpoints() -> None:
    check({"normalize": "NA", "window_size": 0.025, "n_fft": 512, "dither": 1e-5, "pad_to": 0})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window_size": 0.025, "normalize": "per_feature"},
        {"window_size": 0.025},
        {"normalize": "NA"},
        {"normalize": "NA", "window_size": 0.025, "preemph": 0.9},
        {"normalize": "NA", "window_size": 0.025, "n_fft": 1_024},
        {"normalize": "NA", "window_size": 0.025, "sample_rate": 8_000},
        {"normalize": {"fixed_mean": [0.0]}, "window_size": 0.025},
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(WeightsCorrupt):
        check(settings)
