"""GE2E: whose voice it is, as a direction in 256 dimensions. Clips of one speaker point the same way.

Three LSTM layers hear 1.6 s of a mel spectrogram; the last state, projected, is the voice. A longer clip is heard
in parts that overlap by half, and is their mean. All values are at least 0, so that two voices that have nothing
in common are still at 0.4 to 0.6 of cosine, and one speaker's clips at 0.75 to 0.95.

Source   Wan et al. 2018 (arXiv:1710.10467), as resemblyzer 0.1.4 trained it on LibriSpeech-other and VoxCeleb;
         tests/models/test_ge2e.py compares with that package's own network, spectrogram and parts. What it does
         before them, WebRTC's voice activity and loudness, is `prepared` here, which needs neither package.
Weights  `pretrained.pt` in that package, which is 17 MB and Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asr_serve import units
from asr_serve.audio.features.whisper_log_mel import mel_filters
from asr_serve.errors import EmptyAudio, WeightsCorrupt
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import ModelCard, PackagedWeights

WEIGHTS = "pretrained.pt"
CARDS = (
    ModelCard(
        name="ge2e",
        task="speaker",
        kind="ge2e",
        languages=("en",),
        parameters=1_423_616,
        licence="Apache-2.0",
        source="arXiv:1710.10467",
        hub="",
        packaged=PackagedWeights(
            requirement="--no-deps resemblyzer==0.1.4",
            module="resemblyzer",
            folder="",
            sha256={WEIGHTS: "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"},
        ),
        files=(WEIGHTS,),
    ),
)
WIDTH, LAYERS, MELS = 256, 3, 40
WINDOW_SAMPLES, HOP_SAMPLES = units.ms_to_samples(25), units.ms_to_samples(10)
PART_FRAMES, STEP_FRAMES = 160, 77
"""Frames of a part, and from one to the next: 1.3 parts a second."""
COVERED = 0.75
"""The last part is heard if at least so much of it is there."""
BATCH = 64
"""Parts that go through the network together: an hour of speech must not want gigabytes."""
LEVEL = 10 ** (-30 / 20)
"""Root mean square that a clip is brought to: its spectrogram is not a logarithm, so loudness counts."""
QUIET_DB, BLOCK_SAMPLES, KEPT_BLOCKS = 35.0, units.ms_to_samples(30), 4
"""Blocks so far below the loudest are silence, but for as many as this beside what is none."""


class Ge2eEncoder(nn.Module):
    """The network.

    In      mels (parts, frames, 40) float32, power
    Out     (parts, 256) float32, each of length 1, no value below 0
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm: Any = nn.LSTM(MELS, WIDTH, LAYERS, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("hann", torch.hann_window(WINDOW_SAMPLES), persistent=False)
        self.register_buffer("filters", mel_filters(MELS).float(), persistent=False)
        self.hann: Tensor
        self.filters: Tensor

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = self.linear(hidden[-1]).relu()
        found: Tensor = raw / raw.norm(dim=1, keepdim=True)
        return found

    def mel(self, pcm: Tensor) -> Tensor:
        """(samples,) -> (frames, 40): frames are centred on every 160th sample, silence around the clip."""
        spectrum = torch.stft(
            pcm, WINDOW_SAMPLES, HOP_SAMPLES, window=self.hann, pad_mode="constant", return_complex=True
        )
        return (self.filters @ torch.view_as_real(spectrum).square().sum(-1)).T

    @torch.inference_mode()
    def embed(self, pcm: np.ndarray) -> np.ndarray:
        """The voice in (samples,) float32, 16 kHz: (256,) of length 1. As it is: see `prepared`. Raises
        EmptyAudio."""
        if not len(pcm):
            raise EmptyAudio("0 samples came", "a voice needs some, best of all five seconds or more")
        starts = partial_starts(len(pcm))
        needed = (starts[-1] + PART_FRAMES) * HOP_SAMPLES
        padded = np.pad(pcm.astype(np.float32, copy=False), (0, max(0, needed - len(pcm))))
        mel = self.mel(torch.from_numpy(padded).to(self.hann.device))
        heard = torch.stack([mel[start : start + PART_FRAMES] for start in starts])
        mean = torch.cat([self(batch) for batch in torch.split(heard, BATCH)]).mean(0)
        found: np.ndarray = (mean / mean.norm()).cpu().numpy()
        return found

    def embed_speaker(self, clips: Iterable[np.ndarray]) -> np.ndarray:
        """What several clips of one speaker have in common: each is prepared. (256,) of length 1."""
        mean = np.mean([self.embed(normalize_clip(clip)) for clip in clips], axis=0)
        found: np.ndarray = mean / np.linalg.norm(mean)
        return found


def partial_starts(samples: int) -> list[int]:
    """First frames of a clip's parts; the last may reach past its end."""
    frames = math.ceil((samples + 1) / HOP_SAMPLES)
    starts = list(range(0, max(1, frames - PART_FRAMES + STEP_FRAMES + 1), STEP_FRAMES))
    there = (samples - starts[-1] * HOP_SAMPLES) / (PART_FRAMES * HOP_SAMPLES)
    return starts[:-1] if there < COVERED and len(starts) > 1 else starts


def normalize_clip(pcm: np.ndarray) -> np.ndarray:
    """(samples,) at 16 kHz without its longer silences, as loud as all others. Raises EmptyAudio for silence."""
    blocks = len(pcm) // BLOCK_SAMPLES
    if blocks:
        cut = pcm[: blocks * BLOCK_SAMPLES].reshape(blocks, BLOCK_SAMPLES)
        power = np.square(cut, dtype=np.float64).mean(1)
        loud = power > power.max() * 10 ** (-QUIET_DB / 10)
        near = np.convolve(loud, np.ones(2 * KEPT_BLOCKS + 1), "same") > 0
        pcm = cut[near].reshape(-1)
    level = math.sqrt(np.square(pcm, dtype=np.float64).mean()) if len(pcm) else 0.0
    if level < 1e-6:
        raise EmptyAudio("the clip holds silence and nothing else", "a voice", "record it again, nearer")
    found: np.ndarray = (pcm * (LEVEL / level)).astype(np.float32)
    return found


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Cosine of two voices, 0..1."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@cache
def load() -> Ge2eEncoder:
    """The network with its weights, on the CPU. Raises WeightsMissing, WeightsCorrupt."""
    return read(store.verified_published_folder(CARDS[0]))


def read(folder: Path) -> Ge2eEncoder:
    kept = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["model_state"]
    model = Ge2eEncoder()
    try:
        model.load_state_dict({name: kept[name] for name in model.state_dict()})
    except KeyError as missing:
        raise WeightsCorrupt(
            f"{folder / WEIGHTS} has no tensor {missing}", todo="install the package again"
        ) from None
    return model.eval()
