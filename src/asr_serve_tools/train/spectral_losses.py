"""Losses between generated and recorded speech: spectral distances and discriminators.

Source  multi-resolution STFT loss: Yamamoto et al. 2020 (arXiv:1910.11480); energy distance between spectra:
        Gritsenko et al. 2020 (arXiv:2008.01160); discriminators of spectra: UnivNet (arXiv:2106.07889), of complex
        ones: Encodec (arXiv:2210.13438); least squares and feature matching: HiFi-GAN (arXiv:2010.05646).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.audio.features.slaney_mel import SlaneyMel

WINDOWS = (256, 512, 1_024, 2_048)
"""Window lengths in samples, with a hop of a quarter."""
FLOOR = 1e-6
"""Added to squared magnitudes: about the noise floor of 16 bits."""


def magnitudes(pcm: Tensor, window: int) -> Tensor:
    """Spectral magnitudes: (n, samples) -> (n, frames, bins)."""
    hann = torch.hann_window(window, device=pcm.device)
    spectrum = torch.view_as_real(torch.fft.rfft(pcm.unfold(1, window, window // 4) * hann))
    return (spectrum.square().sum(-1) + FLOOR).sqrt()


class SpectralDistance(nn.Module):
    """Distance of `generated_pcm` (n, samples) from the target `wanted`: {"stft": spectral convergence
    and the mean difference of logarithms, mean over WINDOWS; "mel": mean difference of log-mel}.

    With `again`, the same generated with other noise: the energy distance, which is the sum of both distances from
    the target, less the distance between the two. It is least for noise that is random, not for its smooth mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mel = SlaneyMel()

    def forward(self, generated_pcm: Tensor, wanted: Tensor, again: Tensor | None = None) -> dict[str, Tensor]:
        both = [generated_pcm] if again is None else [generated_pcm, again]
        parts = []
        for window in WINDOWS:
            target = magnitudes(wanted, window)
            size, log = target.flatten(1).norm(dim=1).clamp(min=1e-3), target.log()
            generated = [(found, found.log()) for found in (magnitudes(pcm, window) for pcm in both)]
            gaps = [_gap(found, target, size) + (log_found - log).abs().mean() for found, log_found in generated]
            if again is not None:
                (one, log_one), (other, log_other) = generated
                gaps.append(-_gap(one, other, size) - (log_one - log_other).abs().mean())
            parts.append(torch.stack(gaps).sum())
        target, mels = self.mel.within(wanted), [self.mel.within(pcm) for pcm in both]
        gaps = [(mel - target).abs().mean() for mel in mels]
        if again is not None:
            gaps.append(-(mels[0] - mels[1]).abs().mean())
        return {"stft": torch.stack(parts).mean(), "mel": torch.stack(gaps).sum()}


def _gap(a: Tensor, b: Tensor, size: Tensor) -> Tensor:
    """Mean norm of the difference, relative to `size` (n,)."""
    return (((a - b).square().flatten(1).sum(1) + 1e-8).sqrt() / size).mean()


class Discriminator(nn.Module):
    """Discriminator of complex spectra at one resolution: (n, samples) -> the output of each layer, the score last."""

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("hann", torch.hann_window(window), persistent=False)
        self.hann: Tensor
        norm = nn.utils.parametrizations.weight_norm
        wide = 2 * channels
        self.layers = nn.ModuleList(
            [
                norm(nn.Conv2d(2, channels, (3, 9), (1, 3), (1, 4))),
                norm(nn.Conv2d(channels, channels, (3, 9), (1, 2), (1, 4))),
                norm(nn.Conv2d(channels, wide, (3, 9), (1, 2), (1, 4))),
                norm(nn.Conv2d(wide, wide, (3, 3), 1, 1)),
                norm(nn.Conv2d(wide, 1, (3, 3), 1, 1)),
            ]
        )

    def forward(self, pcm: Tensor) -> list[Tensor]:
        spectrum = torch.view_as_real(torch.fft.rfft(pcm.unfold(1, self.window, self.window // 4) * self.hann))
        # Compress magnitudes to their cube root, so that soft bins count about as much as in hearing.
        compression = (spectrum.square().sum(-1, keepdim=True) + FLOOR).pow(-1 / 3)
        x = (spectrum * compression).permute(0, 3, 1, 2)
        outputs = []
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x), 0.1)
            outputs.append(x)
        return [*outputs, self.layers[-1](x)]


class Discriminators(nn.Module):
    """Discriminators of several resolutions."""

    def __init__(self, channels: int = 16, windows: Sequence[int] = (512, 1_024, 2_048)) -> None:
        super().__init__()
        self.each = nn.ModuleList(Discriminator(window, channels) for window in windows)

    def discriminator_loss(self, generated_pcm: Tensor, wanted: Tensor) -> Tensor:
        """Least-squares loss of the discriminators: score 1 for the target `wanted`, 0 for `generated_pcm`."""
        losses = []
        for critic in self.each:
            real, generated = critic(torch.cat([wanted, generated_pcm]))[-1].float().chunk(2)
            losses.append((real - 1).square().mean() + generated.square().mean())
        return torch.stack(losses).mean()

    def generator_loss(self, generated_pcm: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Losses of the vocoder: {"critic": least squares of the scores from 1; "layers": feature matching, the
        mean difference of the discriminators' layers}."""
        scores, gaps = [], []
        for critic in self.each:
            with torch.no_grad():
                real = critic(wanted)
            generated = critic(generated_pcm)
            scores.append((generated[-1].float() - 1).square().mean())
            for a, b in zip(generated[:-1], real[:-1], strict=True):
                gaps.append((a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-4))
        return {"critic": torch.stack(scores).mean(), "layers": torch.stack(gaps).mean()}
