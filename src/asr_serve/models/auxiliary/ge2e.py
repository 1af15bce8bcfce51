"""GE2E: speaker embedding of 256 dimensions. Embeddings of one speaker's clips point in the same direction.

Three LSTM layers read 1.6 s of a mel spectrogram; the last state, projected, is the embedding. A longer clip is
cut into partial clips that overlap by half, and gets their mean. All values are at least 0, so that clips of
different speakers still have a cosine of 0.4 to 0.6, and one speaker's clips 0.75 to 0.95.

Source   Wan et al. 2018 (arXiv:1710.10467), as resemblyzer 0.1.4 trained it on LibriSpeech-other and VoxCeleb;
         tests/models/test_ge2e.py compares with that package's own network, spectrogram and parts. Its
         preprocessing, WebRTC's voice activity and loudness, is `normalize_clip` here, which needs no package.
Weights  `pretrained.pt` in that package, which is 17 MB and Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
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
"""Frames of a partial clip, and from one to the next: 1.3 partial clips a second."""
COVERED = 0.75
"""Least fraction of the last partial clip that must be audio; below it the partial clip is dropped."""
BATCH = 64
"""Partial clips that go through the network together: bounds memory for long recordings."""
LEVEL = 10 ** (-30 / 20)
"""Root mean square that a clip is scaled to: the spectrogram is not logarithmic, so loudness matters."""
QUIET_DB, BLOCK_SAMPLES, EDGE_BLOCKS = 35.0, units.ms_to_samples(30), 4
"""Threshold below the loudest block under which a block is silence, length of a block, and number of silent blocks
retained on either side of speech."""


class Ge2eEncoder(nn.Module):
    """GE2E network.

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
        embedding: Tensor = raw / raw.norm(dim=1, keepdim=True)
        return embedding

    def mel(self, pcm: Tensor) -> Tensor:
        """Computes the mel spectrogram, (samples,) -> (frames, 40): frames are centred on every 160th sample, the
        clip is padded with silence."""
        spectrum = torch.stft(
            pcm, WINDOW_SAMPLES, HOP_SAMPLES, window=self.hann, pad_mode="constant", return_complex=True
        )
        return (self.filters @ torch.view_as_real(spectrum).square().sum(-1)).T

    @torch.inference_mode()
    def embed(self, pcm: np.ndarray) -> np.ndarray:
        """Returns the embedding of (samples,) float32, 16 kHz: (256,) of length 1. The clip is not normalized: see
        `normalize_clip`. Raises EmptyAudio."""
        if not len(pcm):
            raise EmptyAudio("0 samples came", "a voice needs some, best of all five seconds or more")
        starts = partial_starts(len(pcm))
        needed = (starts[-1] + PART_FRAMES) * HOP_SAMPLES
        padded = np.pad(pcm.astype(np.float32, copy=False), (0, max(0, needed - len(pcm))))
        mel = self.mel(torch.from_numpy(padded).to(self.hann.device))
        partials = torch.stack([mel[start : start + PART_FRAMES] for start in starts])
        mean = torch.cat([self(batch) for batch in torch.split(partials, BATCH)]).mean(0)
        embedding: np.ndarray = (mean / mean.norm()).cpu().numpy()
        return embedding

    def embed_speaker(self, clips: Iterable[np.ndarray]) -> np.ndarray:
        """Returns the mean embedding of several clips of one speaker, each normalized: (256,) of length 1."""
        mean = np.mean([self.embed(normalize_clip(clip)) for clip in clips], axis=0)
        embedding: np.ndarray = mean / np.linalg.norm(mean)
        return embedding


def partial_starts(samples: int) -> list[int]:
    """Returns the first frames of a clip's partial clips; the last may reach past its end."""
    frames = math.ceil((samples + 1) / HOP_SAMPLES)
    starts = list(range(0, max(1, frames - PART_FRAMES + STEP_FRAMES + 1), STEP_FRAMES))
    covered = (samples - starts[-1] * HOP_SAMPLES) / (PART_FRAMES * HOP_SAMPLES)
    return starts[:-1] if covered < COVERED and len(starts) > 1 else starts


def normalize_clip(pcm: np.ndarray) -> np.ndarray:
    """Removes longer silences of a clip (samples,) at 16 kHz and scales it to LEVEL. Raises EmptyAudio for silence."""
    blocks = len(pcm) // BLOCK_SAMPLES
    if blocks:
        block_samples = pcm[: blocks * BLOCK_SAMPLES].reshape(blocks, BLOCK_SAMPLES)
        power = np.square(block_samples, dtype=np.float64).mean(1)
        loud = power > power.max() * 10 ** (-QUIET_DB / 10)
        retained = np.convolve(loud, np.ones(2 * EDGE_BLOCKS + 1), "same") > 0
        pcm = block_samples[retained].reshape(-1)
    level = math.sqrt(np.square(pcm, dtype=np.float64).mean()) if len(pcm) else 0.0
    if level < 1e-6:
        raise EmptyAudio("the clip holds silence and nothing else", "a voice", "record it again, nearer")
    scaled: np.ndarray = (pcm * (LEVEL / level)).astype(np.float32)
    return scaled


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the cosine of two embeddings, 0..1."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@cache
def load() -> Ge2eEncoder:
    """Returns the network with its weights, on the CPU. Raises WeightsMissing, WeightsCorrupt."""
    return read(store.verified_published_folder(CARDS[0]))


def read(folder: Path) -> Ge2eEncoder:
    model = Ge2eEncoder()
    try:
        weights = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)["model_state"]
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    except KeyError as missing:
        raise WeightsCorrupt(f"{folder / WEIGHTS} has no tensor {missing}", todo="install the package again") from None
    except (UnpicklingError, RuntimeError, EOFError) as failure:
        raise WeightsCorrupt(f"{folder / WEIGHTS}: {failure}", todo="install the package again") from failure
    return model.eval()
