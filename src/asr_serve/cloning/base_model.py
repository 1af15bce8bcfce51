"""Base model of fine-tuning: its weights stay unchanged, and its voices are references for alignment."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.cloning.acoustic_training import AcousticLearner, AcousticNorms
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.auxiliary.ge2e import similarity
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.tts.fastpitch import PAUSE, Config, whole_frames
from asr_serve.models.tts.fastpitch_layers import LoraChanges
from asr_serve.models.tts.fastpitch_network import F0_SCALE, PhonemeProsody, frame_positions

SPEAKER_EMBEDDINGS_FILE = "speakers.safetensors"
"""File beside a checkpoint: `ge2e` (voices, 256), speaker embeddings of its voices."""
MODEL_FILE = "model.safetensors"


class CloningBaseModel:
    """Checkpoint with one more row in its speaker tables: the last, for the new voice."""

    def __init__(self, folder: Path) -> None:
        """Loads a checkpoint. Raises WeightsCorrupt."""
        self.config = read_config(folder, "fastpitch", Config.of)
        try:
            tensors = load_file(folder / MODEL_FILE)
            embeddings = (
                load_file(folder / SPEAKER_EMBEDDINGS_FILE)["ge2e"]
                if (folder / SPEAKER_EMBEDDINGS_FILE).is_file()
                else None
            )
        except (OSError, SafetensorError, KeyError) as failure:
            raise WeightsCorrupt(f"{folder} holds no FastPitch: {failure}") from failure
        self.likeness = None if embeddings is None else embeddings.float().numpy()
        self.fingerprint = checkpoint_fingerprint(folder)
        self.speaker = self.config.sizes.speakers
        """Number of the new speaker."""
        sizes = msgspec.structs.replace(self.config.sizes, speakers=self.speaker + 1)
        self.learner = AcousticLearner(sizes)
        self.learner.load(tensors)
        self.learner.requires_grad_(False)
        self.norms = AcousticNorms(self.config.norms.mel, self.config.norms.energy, dict(self.config.norms.pitch))

    def nearest_voices(self, voice: np.ndarray, pitch: float) -> list[str]:
        """Returns the model's voices, the most similar first: by the speaker encoder's cosine, where the
        checkpoint has embeddings; else by pitch. `pitch`: mean natural log of F0."""
        names = [name for name in self.config.voices if name in self.config.norms.pitch]
        if (known := self.likeness) is not None:
            with_embedding = [name for name in names if known[self.number(name)].any()]
            return sorted(with_embedding, key=lambda name: -similarity(voice, known[self.number(name)]))
        return sorted(names, key=lambda name: abs(self.config.norms.pitch[name][0] - pitch))

    def number(self, name: str) -> int:
        return self.config.voices.index(name)

    def phoneme_ids(self, phonemes: str) -> Tensor:
        """Returns ids of a sentence and the pauses around it. Raises OptionError for unknown phonemes."""
        unknown = sorted(set(phonemes) - self.config.vocabulary.keys())
        if unknown:
            raise OptionError(f"the phonemes {' '.join(unknown)}", "those of the model's alphabet")
        return torch.tensor([[self.config.vocabulary[each] for each in f"{PAUSE}{phonemes}{PAUSE}"]])

    @torch.no_grad()
    def synthesize_mel(
        self, phonemes: str, speaker: int, changes: LoraChanges | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Synthesizes mel (frames, 80), natural log, and frames of each phoneme and both pauses."""
        mel, _, frames = self.synthesize_prosody(phonemes, speaker, changes)
        return mel.numpy(), frames.numpy()

    @torch.no_grad()
    def synthesize_prosody(
        self, phonemes: str, speaker: int, changes: LoraChanges | None = None, pitch: tuple[float, float] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Synthesizes mel (frames, 80), F0 in Hz (frames,) and frames of each phoneme. `pitch`: statistics of a
        speaker who is none of the model's own."""
        network, tables, ids = self.learner.network, self.learner.tables, self.phoneme_ids(phonemes)
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden = network.encode(ids, mask, tables["speakers"][[speaker]], changes)
        level, voiced, energy = network.prosody(hidden, mask, changes)
        prosody = PhonemeProsody(level, (voiced > 0).float(), energy)
        durations = whole_frames(network.log_durations(hidden, mask, changes).exp() * self.config.lengthen)
        frames = int(durations.sum())
        chunk = self.config.sizes.chunk
        numbers = torch.arange(-(-frames // chunk) * chunk)[None]
        index, position = frame_positions(durations, numbers)
        conditioned = network.condition(hidden, prosody)[:, index[0]]
        x = network.decoder_input(conditioned, position, tables["speakers_decoder"][[speaker]])
        out = network.decode(x, torch.tensor([frames]), changes)[0, :frames]
        mean, deviation = self.config.norms.mel
        pitch_mean, pitch_deviation = pitch or self.config.norms.pitch.get(
            self.config.voices[min(speaker, self.speaker - 1)], (0.0, 1.0)
        )
        base = (level * prosody.voiced * pitch_deviation + pitch_mean)[0][index[0]][:frames]
        f0 = torch.where(out[:, 81] > 0, torch.exp(base + out[:, 80] / F0_SCALE), 0.0)
        return out[:, :80] * deviation + mean, f0, durations[0]


def checkpoint_fingerprint(folder: Path) -> str:
    """Returns the sha256 of a checkpoint's weights: a voice fits only those that it was trained with."""
    with (folder / MODEL_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
