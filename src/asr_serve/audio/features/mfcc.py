"""Mel-frequency cepstral coefficients as TensorFlow computes them, the input of DeepSpeech."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr_serve import units

FLOOR = 1e-12
"""Least mel magnitude before the logarithm."""


class MfccShape(NamedTuple):
    """Shape of windows, filters and coefficients."""

    window_samples: int = 512
    hop_samples: int = 320
    mels: int = 40
    coefficients: int = 26
    low_hz: float = 20.0
    high_hz: float = 8_000.0


class Mfcc(nn.Module):
    """MFCC frames, each from its own window of samples alone: nothing is padded, nothing normalised.

    In      pcm (rows, samples) float32 in -1..1, 16 kHz, one window at least
    Out     (rows, (samples - window_samples) // hop_samples + 1, coefficients) float32: the first of the
            orthonormal DCT-II of natural-log mel magnitudes (not powers), except that coefficient 0 is sqrt(2)
            times the orthonormal one
    Source  TensorFlow's ops AudioSpectrogram (squared magnitudes) and Mfcc;
            tests/audio/features/test_mfcc.py holds numbers that LiteRT computed with them
    """

    def __init__(self, shape: MfccShape) -> None:
        super().__init__()
        self.shape = shape
        self.fft_samples = 1 << (shape.window_samples - 1).bit_length()
        # A periodic window, whose end is the beginning of the next period.
        self.register_buffer("hann", torch.hann_window(shape.window_samples, dtype=torch.float32), persistent=False)
        filters = mel_filters(shape, self.fft_samples // 2 + 1)
        self.register_buffer("filters", filters.t().float().contiguous(), persistent=False)
        self.register_buffer("cosines", cosines(shape).t().float().contiguous(), persistent=False)
        self.hann: Tensor
        self.filters: Tensor
        self.cosines: Tensor

    def forward(self, pcm: Tensor) -> Tensor:
        windows = pcm.unfold(-1, self.shape.window_samples, self.shape.hop_samples) * self.hann
        magnitudes = torch.fft.rfft(windows, self.fft_samples).abs()
        mels: Tensor = magnitudes @ self.filters
        return mels.clamp_(min=FLOOR).log_() @ self.cosines


def mel_filters(shape: MfccShape, bins: int) -> Tensor:
    """Weights of a spectrum's bins, (mels, bins) float64: triangles on the mel scale, which begin and end at the
    peaks of their neighbours. Bins beyond the limits have weight 0.

    Source  HTK's mel scale; rounding of limits between two bins as in TensorFlow's op Mfcc.
    """
    bin_hz = units.RATE_HZ / 2 / (bins - 1)
    bins_mel = _mel(torch.arange(bins, dtype=torch.float64) * bin_hz)
    low_mel, high_mel = (float(_mel(torch.tensor(hz, dtype=torch.float64))) for hz in (shape.low_hz, shape.high_hz))
    step_mel = (high_mel - low_mel) / (shape.mels + 1)
    middles_mel = low_mel + step_mel * torch.arange(1, shape.mels + 1, dtype=torch.float64)
    filters = (1 - (bins_mel - middles_mel[:, None]).abs() / step_mel).clamp_(min=0)
    # Keep the bin after the one nearest to the lower limit, up to the last that is not above the upper limit.
    filters[:, : int(1.5 + shape.low_hz / bin_hz)] = 0
    filters[:, int(shape.high_hz / bin_hz) + 1 :] = 0
    return filters


def cosines(shape: MfccShape) -> Tensor:
    """DCT-II, (coefficients, mels) float64, all rows scaled alike."""
    angles = torch.arange(shape.mels, dtype=torch.float64) + 0.5
    order = torch.arange(shape.coefficients, dtype=torch.float64)[:, None]
    return math.sqrt(2 / shape.mels) * (order * angles * (math.pi / shape.mels)).cos()


def _mel(hz: Tensor) -> Tensor:
    return 1_127 * torch.log1p(hz / 700)
