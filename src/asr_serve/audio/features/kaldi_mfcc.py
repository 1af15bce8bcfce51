"""Kaldi's mel-frequency cepstral coefficients, 100 frames a second."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from asr_serve.audio.features.kaldi_fbank import Fbank, FbankOptions


class KaldiMfccOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Kaldi's options, without energy."""

    coefficients: int = 13
    mels: int = 23
    low_hz: float = 20.0
    high_hz: float = 0.0
    """Upper limit: above 0, in Hz; else relative to half the rate."""
    lifter: float = 22.0
    """Kaldi's cepstral-lifter: 0 for none."""
    dither: float = 0.0
    """See FbankOptions. Models are trained with Kaldi's 1.0: without it, digital silence is a sound that they never
    met."""


class KaldiMfcc:
    """Cepstra of windows cut out of a stream, of samples in -1..1; a frame depends on its own samples alone.

    In      pcm (rows, samples) float32, 16 kHz
    Out     (rows, frames, coefficients) float32: every frame that lies wholly inside (snip_edges)
    Source  Kaldi's compute-mfcc-feats --use-energy=false on 16-bit samples;
            tests/audio/features/test_kaldi_mfcc.py: kaldi-native-fbank's numbers
    """

    def __init__(self, options: KaldiMfccOptions, device: torch.device | None = None) -> None:
        self.options = options
        self.fbank = Fbank(
            FbankOptions(
                mels=options.mels, low_hz=options.low_hz, high_hz=options.high_hz, scale=32_768.0, dither=options.dither
            ),
            device,
        )
        self.hop_samples, self.window_samples = self.fbank.hop_samples, self.fbank.window_samples
        self.cosines = _liftered_cosines(options).to(device, torch.float32)

    def count_frames(self, samples: int) -> int:
        """Number of frames of a whole clip of this many samples."""
        return self.fbank.count_frames(samples)

    def __call__(self, pcm: Tensor) -> Tensor:
        return self.fbank.frames_inside(pcm) @ self.cosines


def _liftered_cosines(options: KaldiMfccOptions) -> Tensor:
    """Orthonormal DCT-II with its rows scaled by the lifter, (mels, coefficients) float64."""
    order = torch.arange(options.coefficients, dtype=torch.float64)
    angles = (torch.arange(options.mels, dtype=torch.float64)[:, None] + 0.5) * (math.pi / options.mels)
    cosines = math.sqrt(2 / options.mels) * torch.cos(angles * order)
    cosines[:, 0] = math.sqrt(1 / options.mels)
    if options.lifter:
        cosines *= 1 + 0.5 * options.lifter * torch.sin(math.pi * order / options.lifter)
    return cosines
