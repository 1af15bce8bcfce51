"""How unlike two sounds are: distances between spectra, and networks that learn to tell them apart.

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
"""Samples, each a quarter after the last."""
FLOOR = 1e-6
"""Added to squared magnitudes: about what 16 bits leave of silence."""


def magnitudes(pcm: Tensor, window: int) -> Tensor:
    """(n, samples) -> (n, frames, bins)."""
    hann = torch.hann_window(window, device=pcm.device)
    spectrum = torch.view_as_real(torch.fft.rfft(pcm.unfold(1, window, window // 4) * hann))
    return (spectrum.square().sum(-1) + FLOOR).sqrt()


class SpectralDistance(nn.Module):
    """Of what was said (n, samples) from what should have been: {"stft": spectral convergence and the mean
    difference of logarithms, mean over WINDOWS; "mel": mean difference of log-mel}.

    With `again`, the same said with other noise: the energy distance. A sum of both distances from what should
    have been, less the one between the two: it is least where noise is noise, and not the smooth mean of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mel = SlaneyMel()

    def forward(self, said: Tensor, wanted: Tensor, again: Tensor | None = None) -> dict[str, Tensor]:
        both = [said] if again is None else [said, again]
        parts = []
        for window in WINDOWS:
            aim = magnitudes(wanted, window)
            size, log = aim.flatten(1).norm(dim=1).clamp(min=1e-3), aim.log()
            heard = [(found, found.log()) for found in (magnitudes(each, window) for each in both)]
            gaps = [_gap(found, aim, size) + (log_found - log).abs().mean() for found, log_found in heard]
            if again is not None:
                (one, log_one), (other, log_other) = heard
                gaps.append(-_gap(one, other, size) - (log_one - log_other).abs().mean())
            parts.append(torch.stack(gaps).sum())
        aim, mels = self.mel.within(wanted), [self.mel.within(each) for each in both]
        gaps = [(mel - aim).abs().mean() for mel in mels]
        if again is not None:
            gaps.append(-(mels[0] - mels[1]).abs().mean())
        return {"stft": torch.stack(parts).mean(), "mel": torch.stack(gaps).sum()}


def _gap(a: Tensor, b: Tensor, size: Tensor) -> Tensor:
    """Norm of the difference, as a share of `size` (n,)."""
    return (((a - b).square().flatten(1).sum(1) + 1e-8).sqrt() / size).mean()


class Discriminator(nn.Module):
    """Looks at complex spectra of one resolution: (n, samples) -> what each layer found, the verdict last."""

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
        # Their cube root's size, so that soft bins count as they do to the ear.
        loud = (spectrum.square().sum(-1, keepdim=True) + FLOOR).pow(-1 / 3)
        x = (spectrum * loud).permute(0, 3, 1, 2)
        found = []
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x), 0.1)
            found.append(x)
        return [*found, self.layers[-1](x)]


class Discriminators(nn.Module):
    """One of each resolution."""

    def __init__(self, channels: int = 16, windows: Sequence[int] = (512, 1_024, 2_048)) -> None:
        super().__init__()
        self.each = nn.ModuleList(Discriminator(window, channels) for window in windows)

    def discriminator_loss(self, said: Tensor, wanted: Tensor) -> Tensor:
        """What they learn by: 1 for what should have been said, 0 for what was."""
        losses = []
        for critic in self.each:
            real, made = critic(torch.cat([wanted, said]))[-1].float().chunk(2)
            losses.append((real - 1).square().mean() + made.square().mean())
        return torch.stack(losses).mean()

    def generator_loss(self, said: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """What the vocoder learns by: {"critic": that they take it for real; "layers": how unlike it looks to each
        of their layers}."""
        verdicts, gaps = [], []
        for critic in self.each:
            with torch.no_grad():
                real = critic(wanted)
            made = critic(said)
            verdicts.append((made[-1].float() - 1).square().mean())
            for a, b in zip(made[:-1], real[:-1], strict=True):
                gaps.append((a.float() - b.float()).abs().mean() / b.float().abs().mean().clamp(min=1e-4))
        return {"critic": torch.stack(verdicts).mean(), "layers": torch.stack(gaps).mean()}
