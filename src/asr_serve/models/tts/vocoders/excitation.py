"""What a vocoder shapes: pulses as high as the pitch says, and noise.

Both are made in pieces of any size with the same samples: the pulses' phase is carried, the noise counts samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr_serve.audio.features.slaney_mel import HOP_SAMPLES, RATE_HZ

VOICED_HZ = 30.0
"""A lower F0 means no voice."""
TOP_HZ = RATE_HZ / 2
BREATH = math.sqrt(128 / 35)
"""What makes the power of a squared raised cosine 1."""
NEAR_PULSE = 3e-4
"""Radians: closer to a pulse's middle, its sum of cosines is their number."""
LEAST = 1e-5


def pulses(f0: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F0 in Hz of frames (n, 1 + T) and the phase (n, 1) in cycles at the first one's middle -> samples from there
    to the last one's middle (n, 256 T), a loudness of power 1 that swells at each pulse, and the phase at the end.

    All harmonics up to the middle of the rate, each as loud as a cosine; between frames F0 and loudness are
    straight lines."""
    share = (torch.arange(HOP_SAMPLES, device=f0.device) + 0.5) / HOP_SAMPLES
    voiced = (f0 > VOICED_HZ).float()
    before, after = voiced[:, :-1, None] * (1 - share), voiced[:, 1:, None] * share
    loud = before + after
    height = (f0[:, :-1, None] * before + f0[:, 1:, None] * after) / loud.clamp(min=LEAST)
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
    """Noise of variance 1 that depends on a row's seed (n,) and the position of a sample alone: from `first` (n,)
    on (n, count)."""
    place = (first[:, None] + torch.arange(count, device=first.device)) & 0xFFFFFFFF
    mixed = hash_bits(hash_bits(place) ^ hash_bits(seeds & 0xFFFFFFFF)[:, None])
    return (mixed.float() * 2**-32 - 0.5) * math.sqrt(12)


def hash_bits(x: Tensor) -> Tensor:
    """A mixing of 32 bits, in int64; its products fit. Source: C. Wellons, hash-prospector, 2018."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
