"""Kaldi's log-mel filter bank, 100 frames a second."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import units

WindowKind = Literal["povey", "hamming", "hanning", "rectangular"]
FLOOR = torch.finfo(torch.float32).eps
"""Least power before the logarithm: Kaldi's, whatever the scale."""
POVEY_POWER = 0.85
LONGEST_SAMPLES = 1 << 60
"""Bound on the length of a stream, for sessions without a known end; twice this still fits an int64."""


class FbankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Kaldi's options, without random numbers, so that recognition is deterministic."""

    mels: int = 80
    low_hz: float = 20.0
    high_hz: float = 0.0
    """Upper limit: above 0, in Hz; else relative to half the rate, as in Kaldi."""
    window: WindowKind = "povey"
    preemphasis: float = 0.97
    remove_dc: bool = True
    snip_edges: bool = True
    """Whether only frames inside the audio are computed; else one for each hop, with the audio mirrored at its ends."""
    scale: float = 1.0
    """Factor on the samples: 32768 where a model was trained on 16-bit numbers."""
    energy: bool = False
    """Whether a column before the mels holds the natural log of the frame's energy, before pre-emphasis and window."""
    energy_floor: float = 0.0
    """Least energy in that column; 0: FLOOR alone."""
    dither: float = 0.0
    """Standard deviation, in scaled samples, of Kaldi's noise: its expected power is added to that of the signal."""
    window_samples: int = 400
    hop_samples: int = 160


class Fbank:
    """Log-mel frames of whole clips, or of windows cut out of a stream.

    In      pcm (rows, samples) float32, 16 kHz
    Out     (rows, frames, mels) float32, natural log of power; a frame depends on its own samples alone
    Source  Kaldi's compute-fbank-feats; tests/audio/features/test_kaldi_fbank.py: kaldi-native-fbank's numbers
    """

    def __init__(self, options: FbankOptions | None = None, device: torch.device | None = None) -> None:
        self.options = options or FbankOptions()
        self.hop_samples, self.window_samples = self.options.hop_samples, self.options.window_samples
        self.width = self.options.mels + self.options.energy
        self.before_samples = 0 if self.options.snip_edges else (self.window_samples - self.hop_samples) // 2
        """Samples by which a frame begins before frame * hop_samples."""
        self.fft_samples = 1 << (self.window_samples - 1).bit_length()
        self.shape = _window(self.options).to(device, torch.float32)
        # Real and imaginary parts, one after the other, have a row each.
        filters = mel_filters(self.options, self.fft_samples).repeat_interleave(2, dim=0)
        self.filters = filters.to(device, torch.float32)
        self.noise: Tensor | None = None
        if self.options.dither:
            # The power of noise is the sum of what its samples have alone.
            impulses = torch.eye(self.window_samples, device=device)
            self.noise = self._mels(impulses).sum(0) * self.options.dither**2

    def count_frames(self, samples: int) -> int:
        """Number of frames of a whole clip of this many samples."""
        if self.options.snip_edges:
            return max(0, (samples - self.window_samples) // self.hop_samples + 1)
        return (samples + self.hop_samples // 2) // self.hop_samples

    def __call__(self, pcm: Tensor) -> Tensor:
        """Frames of whole clips, count_frames(samples) of them."""
        rows, samples = pcm.shape
        frames = self.count_frames(samples)
        if not self.options.snip_edges and frames:
            reach = (frames - 1) * self.hop_samples + self.window_samples
            padded = F.pad(pcm, (self.before_samples, max(0, reach - self.before_samples - samples)))
            starts = torch.full((rows,), -self.before_samples, device=pcm.device)
            pcm = self.mirrored(padded, starts, torch.full_like(starts, samples))[:, :reach]
        return self.frames_inside(pcm)

    def frames_inside(self, pcm: Tensor) -> Tensor:
        """Every frame that lies wholly inside a window. A window that begins at sample k * hop_samples -
        before_samples of a stream yields the stream's frames from k on."""
        if pcm.shape[1] < self.window_samples:
            return pcm.new_empty(pcm.shape[0], 0, self.width)
        framed = pcm.unfold(1, self.window_samples, self.hop_samples) * self.options.scale
        energy = None
        if self.options.energy:
            centred = framed - framed.mean(-1, keepdim=True) if self.options.remove_dc else framed
            energy = centred.square().sum(-1, keepdim=True)
        mels = self._mels(framed)
        if self.noise is not None:
            mels += self.noise
        mels = mels.clamp_(min=FLOOR).log_()
        if energy is None:
            return mels
        return torch.cat([energy.clamp_(min=max(FLOOR, self.options.energy_floor)).log_(), mels], dim=-1)

    def _mels(self, framed: Tensor) -> Tensor:
        """Mel power of frames (..., window_samples) of scaled samples, which it overwrites."""
        if self.options.remove_dc:
            framed -= framed.mean(-1, keepdim=True)
        if self.options.preemphasis:
            # The first sample of a frame is its own predecessor, as in Kaldi.
            previous = torch.cat([framed[..., :1], framed[..., :-1]], dim=-1)
            framed.sub_(previous, alpha=self.options.preemphasis)
        spectrum = torch.fft.rfft(framed.mul_(self.shape), n=self.fft_samples)
        return torch.view_as_real(spectrum).flatten(-2).square_() @ self.filters

    def mirrored(self, pcm: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Fill the parts of windows that lie outside their streams with the mirror image of the stream, as frames
        at its ends need without snip_edges.

        In      pcm (rows, samples); starts (rows,) int64, position of the window's first sample in the stream,
                below 0 before its start; ends (rows,) int64, the stream's length in samples
        """
        at = starts[:, None] + torch.arange(pcm.shape[1], device=pcm.device)
        period = 2 * ends.clamp(1, LONGEST_SAMPLES)[:, None]
        bounced = at.remainder(period)
        bounced = torch.minimum(bounced, period - 1 - bounced)
        # Far outside the stream the image may lie outside the window too. No frame of the stream reaches there.
        return pcm.gather(1, (bounced - starts[:, None]).clamp_(0, pcm.shape[1] - 1))


def mel_filters(options: FbankOptions, fft_samples: int) -> Tensor:
    """Triangles on the mel scale, (bins, mels) float64, 1 at the middle of each; the last bin is in none.

    Source: HTK's mel scale, as in Kaldi.
    """
    top_hz = options.high_hz if options.high_hz > 0 else units.RATE_HZ / 2 + options.high_hz
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (options.low_hz, top_hz))
    step = (high - low) / (options.mels + 1)
    bins_hz = torch.arange(fft_samples // 2 + 1, dtype=torch.float64) * (units.RATE_HZ / fft_samples)
    bins = 1127.0 * torch.log1p(bins_hz / 700.0)[:, None]
    left = low + step * torch.arange(options.mels, dtype=torch.float64)
    triangles = torch.minimum((bins - left) / step, (left + 2 * step - bins) / step).clamp(min=0)
    triangles[-1] = 0
    return triangles


def _window(options: FbankOptions) -> Tensor:
    samples = options.window_samples
    if options.window == "rectangular":
        return torch.ones(samples, dtype=torch.float64)
    cosine = torch.cos(torch.arange(samples, dtype=torch.float64) * (2 * math.pi / (samples - 1)))
    if options.window == "hamming":
        return 0.54 - 0.46 * cosine
    hanning = 0.5 - 0.5 * cosine
    return hanning if options.window == "hanning" else hanning.pow(POVEY_POWER)
