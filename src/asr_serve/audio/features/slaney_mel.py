"""The mel spectrogram for vocoders of 22.05 kHz speech, 86 frames a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.audio.features.whisper_log_mel import mel_filters

RATE_HZ = 22_050
WINDOW_SAMPLES, HOP_SAMPLES = 1_024, 256
MELS, HIGH_HZ = 80, 8_000.0
AROUND_SAMPLES = (WINDOW_SAMPLES - HOP_SAMPLES) // 2
"""Samples of a frame's window before its own hop, and after it."""
SQUARE_FLOOR, FLOOR = 1e-9, 1e-5
"""Added to a bin's squared magnitude; least mel magnitude before the logarithm."""


class SlaneyMel(nn.Module):
    """Log-mel frames of whole clips.

    In      pcm (rows, samples) in -1..1, 22.05 kHz, more than 384 samples; mirrored at both ends
    Out     (rows, samples // 256, 80) natural logarithm of magnitude, -11.5 at least. Frame t covers the 1,024
            samples around those from 256 t to 256 t + 255
    Source  the mel of HiFi-GAN V1 (Kong et al. 2020, arXiv:2010.05646): Slaney's triangles, 0 to 8 kHz
    """

    def __init__(self) -> None:
        super().__init__()
        filters = mel_filters(MELS, WINDOW_SAMPLES, RATE_HZ, HIGH_HZ)
        self.register_buffer("hann", torch.hann_window(WINDOW_SAMPLES), persistent=False)
        self.register_buffer("filters", filters.T.float().contiguous(), persistent=False)
        self.hann: Tensor
        self.filters: Tensor

    def forward(self, pcm: Tensor) -> Tensor:
        mirrored = F.pad(pcm[:, None], (AROUND_SAMPLES, AROUND_SAMPLES), mode="reflect")[:, 0]
        return self.within(mirrored)

    def within(self, pcm: Tensor) -> Tensor:
        """Frames of a part of a clip, given with the 384 samples before and after it."""
        spectrum = torch.view_as_real(torch.fft.rfft(pcm.unfold(1, WINDOW_SAMPLES, HOP_SAMPLES) * self.hann))
        magnitude = (spectrum.square().sum(-1) + SQUARE_FLOOR).sqrt()
        return (magnitude @ self.filters).clamp(min=FLOOR).log()
