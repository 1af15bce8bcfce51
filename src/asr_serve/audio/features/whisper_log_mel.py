"""Whisper's log-mel spectrogram, 100 frames a second."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve import units

WINDOW_SAMPLES = 400
HOP_SAMPLES = 160
MIRRORED_SAMPLES = WINDOW_SAMPLES // 2
"""Samples of the clip's mirror image in the first frame, which is centred on the first sample."""
BLOCK_FRAMES = 256
FLOOR = 1e-10
"""Least power before the logarithm."""
DECADES = 8.0
"""Dynamic range below a row's maximum, in decades of power: 80 dB."""


class LogMel(nn.Module):
    """Log-mel frames of whole clips.

    In      pcm (rows, samples) in -1..1, 16 kHz, of the module's dtype, at least 201 samples; a row is mirrored at
            both ends, so pad it as the model needs before
    Out     (rows, mels, samples // 160), base-10 logarithm of power, about -1..1; clamped to 80 dB below the
            maximum of its row
    Source  Radford et al. 2022 (arXiv:2212.04356); tests/audio/features/test_whisper_log_mel.py
            compares with transformers' WhisperFeatureExtractor
    """

    def __init__(self, mels: int = 80, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("hann", torch.hann_window(WINDOW_SAMPLES, dtype=dtype), persistent=False)
        self.register_buffer("filters", mel_filters(mels).to(dtype), persistent=False)
        self.hann: Tensor
        self.filters: Tensor

    def forward(self, pcm: Tensor) -> Tensor:
        spectrum = torch.stft(pcm, WINDOW_SAMPLES, HOP_SAMPLES, window=self.hann, return_complex=True)
        # The last frame is centred on the end; the paper's features have none there.
        power = torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
        log = (self.filters @ power).clamp_(min=FLOOR).log10_()
        loudest = log.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log, loudest - DECADES) + 4.0) / 4.0


class PackedLogMel:
    """The same frames for clips of any lengths, each as if padded with silence to one window.

    In      batch: clips (samples,) float32 in -1..1, 16 kHz, none longer than the window
            frames: number of frames of each, window_frames at most
    Out     (sum of frames, mels) float32, concatenated; only frames that overlap their clip are computed
    """

    def __init__(self, mels: int, window_frames: int, device: torch.device) -> None:
        self.window_samples = window_frames * HOP_SAMPLES
        self.hann = torch.hann_window(WINDOW_SAMPLES, device=device)
        self.filters = mel_filters(mels).float().T.contiguous().to(device)

    def __call__(self, batch: Sequence[Tensor], frames: Sequence[int]) -> Tensor:
        device = self.hann.device
        computed = [
            min(count, (len(pcm) + MIRRORED_SAMPLES - 1) // HOP_SAMPLES + 1)
            for pcm, count in zip(batch, frames, strict=True)
        ]
        mels = torch.empty(sum(frames), self.filters.shape[1], device=device)
        first = 0
        for pcm, count, live in zip(batch, frames, computed, strict=True):
            rows = mels[first : first + count]
            log = rows[:live]
            loudest = self._log_power(self._mirrored(pcm.to(device), live).unfold(0, WINDOW_SAMPLES, HOP_SAMPLES), log)
            torch.maximum(log, loudest - DECADES, out=log)
            rows[live:] = (loudest - DECADES).clamp(min=math.log10(FLOOR))
            rows.add_(4.0).div_(4.0)
            first += count
        return mels

    def _log_power(self, windows: Tensor, out: Tensor) -> Tensor:
        """Write the log-mel power of windows to `out`, in blocks that fit the processor's cache; return the maximum."""
        loudest = torch.full((), math.log10(FLOOR), device=out.device)
        for first in range(0, len(windows), BLOCK_FRAMES):
            block = slice(first, first + BLOCK_FRAMES)
            spectrum = torch.view_as_real(torch.fft.rfft(windows[block] * self.hann))
            log = torch.mm(spectrum.square_().sum(-1), self.filters, out=out[block]).clamp_(min=FLOOR).log10_()
            loudest = torch.maximum(loudest, log.amax())
        return loudest

    def _mirrored(self, pcm: Tensor, frames: int) -> Tensor:
        """Samples from 200 before the start to the end of the last of `frames`. Before the start the clip is mirrored;
        after it comes silence, and past the window's end the mirror image of the window."""
        needed = (frames - 1) * HOP_SAMPLES + WINDOW_SAMPLES - MIRRORED_SAMPLES
        filled = F.pad(pcm, (0, max(needed, WINDOW_SAMPLES) - len(pcm)))[: self.window_samples]
        past = max(0, needed - self.window_samples)
        return torch.cat([filled[1 : MIRRORED_SAMPLES + 1].flip(0), filled[:needed], filled[-past - 1 : -1].flip(0)])


def mel_filters(
    mels: int, fft_samples: int = WINDOW_SAMPLES, rate_hz: int = units.RATE_HZ, high_hz: float = 0.0
) -> Tensor:
    """Triangles on the mel scale from 0 Hz to `high_hz` (0: half the rate), each of area 1 Hz, over the
    fft_samples // 2 + 1 bins of a spectrum: (mels, bins) float64.

    Source: Slaney, Auditory Toolbox, 1998.
    """
    bins_hz = torch.linspace(0, rate_hz / 2, fft_samples // 2 + 1, dtype=torch.float64)
    top_mel = _mel(high_hz or rate_hz / 2)
    corners_hz = torch.tensor([_hz(top_mel * i / (mels + 1)) for i in range(mels + 2)], dtype=torch.float64)
    low, middle, high = corners_hz[:-2, None], corners_hz[1:-1, None], corners_hz[2:, None]
    triangles = torch.minimum((bins_hz - low) / (middle - low), (high - bins_hz) / (high - middle)).clamp(min=0)
    return triangles * 2 / (high - low)


LINEAR_HZ, LINEAR_MEL = 1_000.0, 15.0
"""Limit of the linear part of the scale, 66.7 Hz a mel; above it mels are equal ratios, 27 to a ratio of 6.4."""
RATIO = math.log(6.4) / 27


def _mel(hz: float) -> float:
    if hz <= LINEAR_HZ:
        return hz * LINEAR_MEL / LINEAR_HZ
    return LINEAR_MEL + math.log(hz / LINEAR_HZ) / RATIO


def _hz(mel: float) -> float:
    if mel <= LINEAR_MEL:
        return mel * LINEAR_HZ / LINEAR_MEL
    return LINEAR_HZ * math.exp((mel - LINEAR_MEL) * RATIO)
