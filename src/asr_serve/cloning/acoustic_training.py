"""Training of the acoustic model: phonemes, durations and spectrograms of many voices' recorded speech.

In training the decoder gets the recorded durations, pitch and energy of each phoneme. The predictors learn those
from the encoder's output. Attention is masked in chunks, as in synthesis.

Source  FastPitch (arXiv:2006.06873) for what is predicted and how it is conditioned; AdamW (arXiv:1711.05101) with
        a cosine; weights averaged over the last steps (EMA)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.audio.features.slaney_mel import SlaneyMel
from asr_serve.cloning.voice_corpus import FULL_SCALE, VoiceRecording
from asr_serve.devices.cpu import bf16_supported
from asr_serve.models.tts.fastpitch_layers import LoraChanges
from asr_serve.models.tts.fastpitch_network import (
    F0_SCALE,
    FastPitchNetwork,
    FastPitchSizes,
    PhonemeProsody,
    frame_positions,
)

WEIGHTS = {"mel": 1.0, "f0": 0.3, "voice": 0.1, "duration": 0.2, "pitch": 0.1, "voiced": 0.1, "energy": 0.1}


class AcousticNorms(msgspec.Struct, frozen=True):
    """Mean and deviation of features: of all speech, and of each speaker's pitch."""

    mel: tuple[float, float]
    energy: tuple[float, float]
    pitch: dict[str, tuple[float, float]]
    """Speaker -> mean and deviation of the natural log of F0 in Hz."""


class AcousticItem(NamedTuple):
    """Training item: an utterance's features."""

    speaker: int
    ids: np.ndarray
    durations: np.ndarray
    pitch: np.ndarray
    voiced: np.ndarray
    energy: np.ndarray
    mel: np.ndarray
    """(frames, 80) float16, natural log."""
    f0: np.ndarray
    """(frames,) natural log of F0, 0 where unvoiced."""


class AcousticBatch(NamedTuple):
    """Batch of utterances, padded with zeros."""

    ids: Tensor
    phoneme_mask: Tensor
    speaker: Tensor
    durations: Tensor
    prosody: PhonemeProsody
    base: Tensor
    """(rows, phonemes): natural log of F0 for the phonemes' pitch."""
    mel: Tensor
    f0: Tensor
    frames: Tensor

    def to(self, device: torch.device) -> AcousticBatch:
        prosody = PhonemeProsody(*(each.to(device) for each in self.prosody))
        rest = {name: getattr(self, name).to(device) for name in self._fields if name != "prosody"}
        return AcousticBatch(prosody=prosody, **rest)


@cache
def mels() -> SlaneyMel:
    return SlaneyMel()


def loudness(mel: np.ndarray) -> np.ndarray:
    """Computes the natural log of the root of the summed power, (frames,), from (frames, 80) natural log."""
    return np.asarray(0.5 * np.log(np.exp(2 * mel.astype(np.float32)).sum(1)), np.float32)


def acoustic_item(recording: VoiceRecording, speaker: int, vocabulary: Mapping[str, int]) -> AcousticItem:
    """Computes the features of a recording. Raises KeyError for a phoneme that is not in the vocabulary."""
    line = recording.line
    mel = mels()(torch.from_numpy(recording.pcm.astype(np.float32) / FULL_SCALE)[None])[0].numpy()
    durations = np.array(line.frames, np.int64)
    f0 = np.array(recording.f0)
    voiced_frames = f0 > 0
    log_f0 = np.where(voiced_frames, np.log(np.maximum(f0, 1)), 0).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(durations)[:-1]])
    count = np.add.reduceat(voiced_frames.astype(np.float32), starts)
    pitch = np.where(count > 0, np.add.reduceat(log_f0, starts) / np.maximum(count, 1), 0)
    energy = np.add.reduceat(loudness(mel), starts) / durations
    ids = np.array([vocabulary[letter] for letter in line.phonemes], np.int64)
    return AcousticItem(
        speaker,
        ids,
        durations,
        pitch.astype(np.float32),
        (count > 0).astype(np.float32),
        energy.astype(np.float32),
        mel.astype(np.float16),
        log_f0,
    )


def compute_norms(items: Sequence[AcousticItem], speakers: Sequence[str]) -> AcousticNorms:
    sample = items[:: max(1, len(items) // 400)]
    mel = np.concatenate([each.mel.astype(np.float32) for each in sample])
    energy = np.concatenate([each.energy for each in sample])
    pitch = {}
    for at, name in enumerate(speakers):
        voiced_pitch = np.concatenate(
            [each.pitch[each.voiced > 0] for each in items if each.speaker == at] or [np.zeros(1)]
        )
        pitch[name] = (float(voiced_pitch.mean()), float(voiced_pitch.std()) or 1.0)
    return AcousticNorms((float(mel.mean()), float(mel.std())), (float(energy.mean()), float(energy.std())), pitch)


def collate(items: Sequence[AcousticItem], norms: AcousticNorms, speakers: Sequence[str], chunk: int) -> AcousticBatch:
    rows, phonemes = len(items), max(len(each.ids) for each in items)
    total = -(-max(len(each.mel) for each in items) // chunk) * chunk

    def stacked(name: str, length: int, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(rows, length, dtype=dtype)
        for row, each in enumerate(items):
            value = getattr(each, name)
            out[row, : len(value)] = torch.from_numpy(value)
        return out

    mel = torch.zeros(rows, total, items[0].mel.shape[1])
    for row, each in enumerate(items):
        mel[row, : len(each.mel)] = torch.from_numpy(each.mel.astype(np.float32))
    mean, deviation = (
        torch.tensor([norms.pitch[speakers[each.speaker]][at] for each in items])[:, None] for at in (0, 1)
    )
    voiced = stacked("voiced", phonemes, torch.float32)
    pitch = (stacked("pitch", phonemes, torch.float32) - mean) / deviation * voiced
    mask = torch.arange(phonemes) < torch.tensor([len(each.ids) for each in items])[:, None]
    energy = (stacked("energy", phonemes, torch.float32) - norms.energy[0]) / norms.energy[1] * mask
    return AcousticBatch(
        stacked("ids", phonemes, torch.int64),
        mask,
        torch.tensor([each.speaker for each in items]),
        stacked("durations", phonemes, torch.int64),
        PhonemeProsody(pitch, voiced, energy),
        pitch * deviation + mean,
        mel,
        stacked("f0", total, torch.float32),
        torch.tensor([len(each.mel) for each in items]),
    )


class AcousticOutput(NamedTuple):
    """Network's output for a batch. `frames`: (rows, frames, 82), as from FastPitchNetwork.decode; `phoneme`:
    index of each frame's phoneme; `numbers`: each frame's number."""

    log_durations: Tensor
    pitch: Tensor
    voiced: Tensor
    energy: Tensor
    frames: Tensor
    phoneme: Tensor
    numbers: Tensor


class AcousticLearner(nn.Module):
    """Trainable network."""

    def __init__(self, sizes: FastPitchSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.linears = nn.ModuleDict({_key(name): _Linear(i, o) for name, (o, i) in sizes.linears().items()})
        self.norms = nn.ParameterDict()
        for name in sizes.norms():
            self.norms[_key(f"{name}.weight")] = nn.Parameter(torch.ones(sizes.width))
            self.norms[_key(f"{name}.bias")] = nn.Parameter(torch.zeros(sizes.width))
        deviations = {"phonemes": sizes.width**-0.5, "speakers": 0.02, "speakers_decoder": 0.02}
        self.tables = nn.ParameterDict(
            {name: nn.Parameter(deviations[name] * torch.randn(size)) for name, size in sizes.tables().items()}
        )
        self.network = FastPitchNetwork(sizes, self)

    def on(self, device: torch.device) -> AcousticLearner:
        """Moves the module to a device, and rebuilds the network from its parameters there."""
        self.to(device)
        self.network = FastPitchNetwork(self.sizes, self)  # it holds references to its parameters
        return self

    # Parameters of the network (TensorSource).
    def linear(self, name: str) -> Any:
        return self.linears[_key(name)]

    def vector(self, name: str) -> Tensor:
        tensor: Tensor = self.tables[name] if name in self.tables else self.norms[_key(name)]
        return tensor

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the weights by the names that the model file reads."""
        tensors = {name: table.data for name, table in self.tables.items()}
        for name in self.sizes.linears():
            linear = self.linears[_key(name)]
            tensors |= {f"{name}.weight": linear.weight.data, f"{name}.bias": linear.bias.data}
        return tensors | {name.replace("/", "."): norm.data for name, norm in self.norms.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads such a checkpoint. Tables may have grown: a new speaker is initialized as the mean of all."""
        for name, own in self.checkpoint().items():
            loaded = tensors[name].float()
            if name in self.tables and len(loaded) < len(own):
                own.copy_(loaded.mean(0).expand_as(own))
                own[: len(loaded)] = loaded
            else:
                own.copy_(loaded)

    def forward(self, b: AcousticBatch, changes: LoraChanges | None = None) -> AcousticOutput:
        """Runs the network with the recorded durations, pitch and energy; `changes`: a voice's low-rank changes."""
        network, mask, device = self.network, b.phoneme_mask, b.ids.device
        bf16 = device.type != "cpu" or bf16_supported()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden = network.encode(b.ids, mask, self.tables["speakers"][b.speaker], changes)
            log_durations = network.log_durations(hidden, mask, changes)
            pitch, voiced, energy = network.prosody(hidden, mask, changes)
            numbers = torch.arange(b.mel.shape[1], device=device).expand(len(b.ids), -1)
            index, position = frame_positions(b.durations, numbers)
            conditioned = network.condition(hidden, b.prosody)
            conditioned = conditioned.gather(1, index[..., None].expand(-1, -1, conditioned.shape[-1]))
            x = network.decoder_input(conditioned, position, self.tables["speakers_decoder"][b.speaker])
            return AcousticOutput(
                log_durations, pitch, voiced, energy, network.decode(x, b.frames, changes), index, numbers
            )

    def losses(self, b: AcousticBatch, norms: AcousticNorms, changes: LoraChanges | None = None) -> dict[str, Tensor]:
        """Computes the losses between predictions and recorded features."""
        log_durations, pitch, voiced, energy, out, index, numbers = self(b, changes)
        mask = b.phoneme_mask
        inside = (numbers < b.frames[:, None]).float()
        has_voice = (b.f0 > 0).float() * inside
        offset = b.f0 - b.base.gather(1, index)
        target = (b.mel - norms.mel[0]) / norms.mel[1]
        count, phonemes = inside.sum(), mask.sum()
        voiced_phonemes = b.prosody.voiced.sum().clamp(min=1)
        in_frames = F.binary_cross_entropy_with_logits(out[..., 81], has_voice, reduction="none") * inside
        in_phonemes = F.binary_cross_entropy_with_logits(voiced, b.prosody.voiced, reduction="none") * mask
        log_targets = b.durations.clamp(min=1).float().log()
        return {
            "mel": ((out[..., :80] - target).abs() * inside[..., None]).sum() / (80 * count),
            "f0": ((out[..., 80] - offset * F0_SCALE).abs() * has_voice).sum() / has_voice.sum().clamp(min=1),
            "voice": in_frames.sum() / count,
            "duration": (torch.where(mask, log_durations - log_targets, 0.0) ** 2).sum() / phonemes,
            "pitch": ((pitch - b.prosody.pitch) ** 2 * b.prosody.voiced).sum() / voiced_phonemes,
            "voiced": in_phonemes.sum() / phonemes,
            "energy": ((energy - b.prosody.energy) ** 2 * mask).sum() / phonemes,
        }


def _key(name: str) -> str:
    return name.replace(".", "/")


class _Linear(nn.Linear):
    """Trainable Linear with the interface of devices/interface.py."""

    nbytes = 0

    def forward(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        if gelu:
            out = F.gelu(out)
        return out if add is None else out + add
