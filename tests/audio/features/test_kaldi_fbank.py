"""Filter-bank frames: kaldi-native-fbank's numbers, and the same ones however a stream is cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from asr_serve.audio.features.kaldi_fbank import Fbank, FbankOptions

FIXTURE = Path(__file__).parent / "fixtures" / "fbank.safetensors"
with safe_open(FIXTURE, "pt") as file:
    CASES = {name: FbankOptions(**asked) for name, asked in json.loads(file.metadata()["cases"]).items()}
    REFERENCE: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
PCM = REFERENCE["pcm"].float()[None] / 32_768
NEAR = {"atol": 3e-4, "rtol": 1e-5}
"""Of logarithms: where a loud constant is kept, what float32's FFT leaves of it depends on the CPU."""


@pytest.fixture
def noise(rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal((3, 9_000)).astype(np.float32)) * 0.1


@pytest.mark.parametrize("name", CASES)
def test_equals_kaldi(name: str) -> None:
    ours = Fbank(CASES[name])(PCM)
    assert ours.shape == (1, *REFERENCE[name].shape)
    torch.testing.assert_close(ours[0], REFERENCE[name], **NEAR)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ["wenet", "edges"])
def test_equals_kaldi_on_cuda(name: str) -> None:
    device = torch.device("cuda")
    ours = Fbank(CASES[name], device)(PCM.to(device))
    torch.testing.assert_close(ours[0].cpu(), REFERENCE[name], **NEAR)


@pytest.mark.parametrize("name", ["wenet", "energy", "short windows", "hamming, band"])
@pytest.mark.parametrize("hops", [1, 3, 16])
def test_windows_of_a_stream_have_its_frames(name: str, hops: int, noise: Tensor) -> None:
    fbank = Fbank(CASES[name])
    whole = fbank(noise)
    assert whole.shape[1] == fbank.count_frames(noise.shape[1])
    reach = (hops - 1) * fbank.hop_samples + fbank.window_samples
    starts = range(0, noise.shape[1] - reach + 1, hops * fbank.hop_samples)
    cut = torch.cat([fbank.frames_inside(noise[:, at : at + reach]) for at in starts], dim=1)
    torch.testing.assert_close(cut, whole[:, : cut.shape[1]], atol=1e-5, rtol=1e-6)
    assert whole.shape[1] - cut.shape[1] < hops


@pytest.mark.parametrize("hops", [1, 4, 13])
@pytest.mark.parametrize("samples", [9_000, 8_960, 8_881, 500, 100, 80])
def test_windows_see_the_mirrored_ends_of_a_stream(hops: int, samples: int, noise: Tensor) -> None:
    fbank = Fbank(CASES["edges"])
    stream = noise[:, :samples]
    whole = fbank(stream)
    reach = (hops - 1) * fbank.hop_samples + fbank.window_samples
    zeros = torch.zeros(len(stream), reach)
    padded = torch.cat([zeros, stream, zeros], dim=1)
    found = []
    for first in range(0, whole.shape[1], hops):
        start = first * fbank.hop_samples - fbank.before_samples
        window = padded[:, start + reach : start + 2 * reach]
        starts, ends = torch.full((len(stream),), start), torch.full((len(stream),), samples)
        found.append(fbank.frames_inside(fbank.mirrored(window, starts, ends)))
    cut = torch.cat(found, dim=1)[:, : whole.shape[1]]
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-6)


def test_rows_may_begin_and_end_anywhere(noise: Tensor) -> None:
    fbank = Fbank(CASES["edges"])
    ends = torch.tensor([1_000, 1 << 62, 2_000])
    starts = torch.tensor([-fbank.before_samples, 1_600 - fbank.before_samples, 640 - fbank.before_samples])
    window = noise[:, :2_000]
    together = fbank.frames_inside(fbank.mirrored(window, starts, ends))
    for row in range(3):
        alone = fbank.frames_inside(fbank.mirrored(window[row : row + 1], starts[row : row + 1], ends[row : row + 1]))
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(together[1], fbank.frames_inside(window)[1], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("samples", "snipped", "mirrored"), [(0, 0, 0), (79, 0, 0), (80, 0, 1), (399, 0, 2),
                                                             (400, 1, 3), (559, 1, 3), (560, 2, 4)])  # fmt: skip
def test_number_of_frames(samples: int, snipped: int, mirrored: int) -> None:
    for options, expected in ((FbankOptions(), snipped), (FbankOptions(snip_edges=False), mirrored)):
        fbank = Fbank(options)
        assert fbank.count_frames(samples) == expected
        assert fbank(torch.zeros(2, samples)).shape == (2, expected, 80)


def test_silence_is_the_floor_everywhere() -> None:
    frames = Fbank()(torch.zeros(1, 1_600))
    torch.testing.assert_close(frames, torch.full_like(frames, float(np.log(np.finfo(np.float32).eps))))


def test_the_input_is_unchanged(noise: Tensor) -> None:
    before = noise.clone()
    for name in ("wenet", "unscaled", "edges", "rectangular, no preemphasis"):
        Fbank(CASES[name])(noise)
        assert torch.equal(noise, before)
