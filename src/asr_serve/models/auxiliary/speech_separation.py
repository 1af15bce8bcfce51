"""Separation of two speakers who talk at once, told by diarization when each of them talks.

A network of two bidirectional LSTM layers masks the spectrum of the mixture. The first layer encodes the mixture.
Its frames in which one speaker talks alone are averaged to an embedding of that speaker. The second layer runs once
for each speaker, conditioned on the embeddings of this speaker and of the other one and on the activity of both.
The masks of the two and of everything else add up to 1 at each frequency of each frame.

Source   masks for the speaker of an embedding: SpeakerBeam, Zmolikova et al. 2019 (doi:10.1109/JSTSP.2019.2922820);
         embeddings from the mixture's own frames: deep attractor networks, arXiv:1611.08930; speaker activity as
         input: TS-SEP, arXiv:2303.03849
Weights  `speech_separation.safetensors` beside this file, float16, trained by
         asr_serve_tools.train.speech_separation; docs/transcripts.md has the recipe
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt, WeightsMissing

FFT_SAMPLES, HOP_SAMPLES = 512, 256
BINS = FFT_SAMPLES // 2 + 1
FRONT, WIDTH, SPEAKER = 160, 128, 96
"""Widths of the input of the first layer, of each direction of both layers, and of a speaker's embedding."""
SPEAKERS = 2
WEIGHTS = Path(__file__).with_name("speech_separation.safetensors")
WEIGHTS_SHA256 = ""


class SeparationNetwork(nn.Module):
    """Masks of two speakers.

    In      spectrum (rows, frames, 257) complex64, see `spectrum_of`; activity (rows, 2, frames) float32, 1 where
            diarization found the speaker talking, 0 elsewhere
    Out     masks (rows, 2, frames, 257) float32 in 0..1
    """

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(BINS, FRONT)
        self.mixture: Any = nn.LSTM(FRONT, WIDTH, batch_first=True, bidirectional=True)
        self.speaker = nn.Linear(2 * WIDTH, SPEAKER)
        self.condition = nn.Linear(2 * SPEAKER, 4 * WIDTH)
        self.activity = nn.Linear(2, 2 * WIDTH)
        self.target: Any = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.mask = nn.Linear(2 * WIDTH, BINS)

    def forward(self, spectrum: Tensor, activity: Tensor) -> Tensor:
        rows, frames, _ = spectrum.shape
        mixture, _ = self.mixture(torch.tanh(self.front(_features(spectrum))))
        swapped = activity.flip(1)
        alone = (activity * (1 - swapped)).to(mixture.dtype)
        sums = alone @ torch.tanh(self.speaker(mixture))
        speakers = sums / alone.sum(2, keepdim=True).clamp(min=1)
        scale, shift = self.condition(torch.cat([speakers, speakers.flip(1)], 2)).chunk(2, 2)
        hidden = mixture[:, None] * (1 + scale[:, :, None]) + shift[:, :, None]
        hidden = hidden + self.activity(torch.stack([activity, swapped], 3))
        hidden, _ = self.target(hidden.flatten(0, 1))
        logits = self.mask(hidden).float().view(rows, SPEAKERS, frames, BINS)
        return torch.softmax(F.pad(logits, (0, 0, 0, 0, 0, 1)), 1)[:, :SPEAKERS]


def _features(spectrum: Tensor) -> Tensor:
    """Log magnitudes, of mean 0 and deviation 1 in each row."""
    levels = torch.log(spectrum.abs() + 1e-3)
    levels = levels - levels.mean((1, 2), keepdim=True)
    return levels / levels.std((1, 2), keepdim=True).clamp(min=1e-3)


LEVEL = 0.05
"""Root mean square to which audio is scaled before its spectrum is computed."""


def spectrum_of(pcm: Tensor) -> Tensor:
    """Returns the spectrum (rows, samples // 256 + 1, 257) of pcm (rows, samples); frame i is centred on sample
    256 i."""
    window = torch.hann_window(FFT_SAMPLES, device=pcm.device).sqrt()
    found = torch.stft(pcm, FFT_SAMPLES, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True)
    return found.transpose(1, 2)


def pcm_of(spectrum: Tensor, samples: int) -> Tensor:
    """Returns the audio (rows, samples) of a spectrum, the inverse of `spectrum_of`."""
    window = torch.hann_window(FFT_SAMPLES, device=spectrum.device).sqrt()
    return torch.istft(spectrum.transpose(1, 2), FFT_SAMPLES, HOP_SAMPLES, window=window, length=samples)


def activity_of(talks: Sequence[Sequence[tuple[int, int]]], samples: int) -> Tensor:
    """Returns the activity (speakers, frames) float32 of a mixture of `samples`: 1 in frames whose centre is in a
    turn."""
    activity = torch.zeros(len(talks), samples // HOP_SAMPLES + 1)
    for row, turns in zip(activity, talks, strict=True):
        for start, end in turns:
            row[-(-max(0, start) // HOP_SAMPLES) : -(-max(0, end) // HOP_SAMPLES)] = 1
    return activity


class SpeechSeparator:
    """Network on a device, in float32. Any number of threads may call it."""

    def __init__(self, network: SeparationNetwork, device: Device) -> None:
        self._network, self._device = network.to(device.torch_device, torch.float32).eval(), device.torch_device

    @torch.inference_mode()
    def separate(self, pcm: np.ndarray, talks: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
        """Returns what each of two speakers says, (2, samples) float32, of pcm (samples,) float32 at 16 kHz.
        `talks`: the (start, end) of each one's turns, in samples. Where one talks alone, their audio is the
        mixture's."""
        mixture = torch.from_numpy(pcm).to(self._device)[None]
        level = mixture.square().mean().sqrt().clamp(min=1e-6) / LEVEL
        spectrum = spectrum_of(mixture / level)
        active = activity_of(talks, len(pcm)).to(self._device)
        masks = self._network(spectrum, active[None])[0]
        alone = (active > active.flip(0))[:, :, None]
        tracks: np.ndarray = (pcm_of(torch.where(alone, 1.0, masks) * spectrum, len(pcm)) * level).cpu().numpy()
        return tracks


def load(device: Device) -> SpeechSeparator:
    """Returns the network with its weights. Raises WeightsMissing, WeightsCorrupt."""
    try:
        raw = WEIGHTS.read_bytes()
    except FileNotFoundError as error:
        raise WeightsMissing(
            f"{WEIGHTS} is not there", "it is part of the asr-serve package", "reinstall asr-serve"
        ) from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise WeightsCorrupt(f"{WEIGHTS} has sha256 {digest}", f"it must be {WEIGHTS_SHA256}", "reinstall asr-serve")
    network = SeparationNetwork()
    network.load_state_dict({name: each.float() for name, each in safetensors.torch.load(raw).items()})
    return SpeechSeparator(network, device)
