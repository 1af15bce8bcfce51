"""The model that is taught another voice: it stays as it is, and says what a recording is compared with."""

from __future__ import annotations

import hashlib
import json
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
from asr_serve.models.tts.fastpitch import PAUSE, Config, whole_frames
from asr_serve.models.tts.fastpitch_layers import LoraChanges
from asr_serve.models.tts.fastpitch_network import F0_SCALE, PhonemeProsody, places

SPEAKER_EMBEDDINGS_FILE = "speakers.safetensors"
"""Beside a checkpoint: `ge2e` (voices, 256), what its voices are like to a speaker encoder."""
MODEL_FILE = "model.safetensors"


class CloningBaseModel:
    """A checkpoint, with one more place among its speakers: the last, for who is to be learnt."""

    def __init__(self, folder: Path) -> None:
        """Raises WeightsCorrupt."""
        try:
            self.config = Config.of(json.loads((folder / "config.json").read_text("utf-8")))
            tensors = load_file(folder / MODEL_FILE)
            near = (
                load_file(folder / SPEAKER_EMBEDDINGS_FILE)["ge2e"]
                if (folder / SPEAKER_EMBEDDINGS_FILE).is_file()
                else None
            )
        except (OSError, json.JSONDecodeError, SafetensorError, KeyError) as failure:
            raise WeightsCorrupt(f"{folder} holds no FastPitch: {failure}") from failure
        self.likeness = None if near is None else near.float().numpy()
        self.fingerprint = checkpoint_fingerprint(folder)
        self.speaker = self.config.sizes.speakers
        """Number of the new one."""
        sizes = msgspec.structs.replace(self.config.sizes, speakers=self.speaker + 1)
        self.learner = AcousticLearner(sizes)
        self.learner.load(tensors)
        self.learner.requires_grad_(False)
        self.norms = AcousticNorms(self.config.norms.mel, self.config.norms.energy, dict(self.config.norms.pitch))

    def nearest_voices(self, voice: np.ndarray, pitch: float) -> list[str]:
        """The model's voices, those most like this one first: by the speaker encoder's cosine, where the
        checkpoint tells what its own are like; else by how high they are. `pitch`: mean natural log of F0."""
        names = [name for name in self.config.voices if name in self.config.norms.pitch]
        if (known := self.likeness) is not None:
            heard = [name for name in names if known[self.number(name)].any()]
            return sorted(heard, key=lambda name: -similarity(voice, known[self.number(name)]))
        return sorted(names, key=lambda name: abs(self.config.norms.pitch[name][0] - pitch))

    def number(self, name: str) -> int:
        return self.config.voices.index(name)

    def phoneme_ids(self, phonemes: str) -> Tensor:
        """Of a sentence and the pauses around it. Raises OptionError for what the model does not know."""
        unknown = sorted(set(phonemes) - self.config.vocabulary.keys())
        if unknown:
            raise OptionError(f"the phonemes {' '.join(unknown)}", "those of the model's alphabet")
        return torch.tensor([[self.config.vocabulary[each] for each in f"{PAUSE}{phonemes}{PAUSE}"]])

    @torch.no_grad()
    def synthesize_mel(
        self, phonemes: str, speaker: int, changes: LoraChanges | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """How that speaker says it: mel (frames, 80), natural log, and frames of each phoneme and both pauses."""
        mel, _, frames = self.synthesize_prosody(phonemes, speaker, changes)
        return mel.numpy(), frames.numpy()

    @torch.no_grad()
    def synthesize_prosody(
        self,
        phonemes: str,
        speaker: int,
        changes: LoraChanges | None = None,
        pitch: tuple[float, float] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mel (frames, 80), F0 in Hz (frames,) and frames of each phoneme. `pitch`: the speaker's, where it is
        none of the model's own."""
        network, tables, ids = self.learner.network, self.learner.tables, self.phoneme_ids(phonemes)
        there = torch.ones_like(ids, dtype=torch.bool)
        hidden = network.encode(ids, there, tables["speakers"][[speaker]], changes)
        level, voiced, energy = network.prosody(hidden, there, changes)
        prosody = PhonemeProsody(level, (voiced > 0).float(), energy)
        durations = whole_frames(network.log_durations(hidden, there, changes).exp() * self.config.lengthen)
        frames = int(durations.sum())
        chunk = self.config.sizes.chunk
        numbers = torch.arange(-(-frames // chunk) * chunk)[None]
        index, place = places(durations, numbers)
        said = network.condition(hidden, prosody)[:, index[0]]
        x = network.decoder_input(said, place, tables["speakers_decoder"][[speaker]])
        out = network.decode(x, torch.tensor([frames]), changes)[0, :frames]
        mean, deviation = self.config.norms.mel
        middle, spread = pitch or self.config.norms.pitch.get(
            self.config.voices[min(speaker, self.speaker - 1)], (0.0, 1.0)
        )
        base = (level * prosody.voiced * spread + middle)[0][index[0]][:frames]
        f0 = torch.where(out[:, 81] > 0, torch.exp(base + out[:, 80] / F0_SCALE), 0.0)
        return out[:, :80] * deviation + mean, f0, durations[0]


def checkpoint_fingerprint(folder: Path) -> str:
    """Of a checkpoint's weights: a voice fits those that it was taught with, and no others."""
    with (folder / MODEL_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
