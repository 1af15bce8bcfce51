"""Excitation of a vocoder: pulses at the pitch, and noise.

Both give the same samples in pieces of any size: the pulses' phase is carried, the noise depends on sample
positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr_serve.audio.features.slaney_mel import HOP_SAMPLES, RATE_HZ

VOICED_HZ = 30.0
"""Lowest F0 of voiced frames."""
TOP_HZ = RATE_HZ / 2
BREATH = math.sqrt(128 / 35)
"""Factor that normalizes the power of a squared raised cosine to 1."""
NEAR_PULSE = 3e-4
"""Angle in radians below which the pulse's sum of cosines is taken as their number."""
LEAST = 1e-5


def pulses(f0: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Generates pulses from F0 in Hz of frames (n, 1 + T) and the phase (n, 1) in cycles at the first one's
    middle. Returns samples from there to the last one's middle (n, 256 T), a gain of power 1 that peaks at each
    pulse, and the phase at the end.

    The pulses are all harmonics up to half the rate as cosines of equal amplitude; F0 and loudness are linear
    between frames.
    """
    share = (torch.arange(HOP_SAMPLES, device=f0.device) + 0.5) / HOP_SAMPLES
    voiced = (f0 > VOICED_HZ).float()
    weight_before, weight_after = voiced[:, :-1, None] * (1 - share), voiced[:, 1:, None] * share
    loud = weight_before + weight_after
    height = (f0[:, :-1, None] * weight_before + f0[:, 1:, None] * weight_after) / loud.clamp(min=LEAST)
    height, loud = height.flatten(1), loud.flatten(1)
    cycles = phase + (height.double() / RATE_HZ).cumsum(1)
    half = math.pi * (cycles - cycles.round()).float()
    harmonics = (TOP_HZ / height.clamp(min=VOICED_HZ)).floor()
    # sum of cos(2 h x) for h = 1 .. H = sin((2 H + 1) x) / (2 sin x) - 1/2
    middle = half.abs() < NEAR_PULSE
    below = torch.where(middle, 1.0, 2 * half.sin())
    sums = torch.where(middle, harmonics, ((2 * harmonics + 1) * half).sin() / below - 0.5)
    swell = half.cos().square().square() * BREATH
    return sums * loud, swell * loud, cycles[:, -1:] - cycles[:, -1:].round()


def white_noise(seeds: Tensor, first: Tensor, count: int) -> Tensor:
    """Generates noise of variance 1 that depends only on a row's seed (n,) and the position of a sample: (n,
    count) from `first` (n,) on."""
    position = (first[:, None] + torch.arange(count, device=first.device)) & 0xFFFFFFFF
    mixed = hash_bits(hash_bits(position) ^ hash_bits(seeds & 0xFFFFFFFF)[:, None])
    return (mixed.float() * 2**-32 - 0.5) * math.sqrt(12)


def hash_bits(x: Tensor) -> Tensor:
    """Hashes 32 bits, in int64; its products fit. Source: C. Wellons, hash-prospector, 2018."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
