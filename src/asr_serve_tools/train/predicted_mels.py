"""Mel frames predicted by an acoustic model with the durations of recorded speech, to train a vocoder.

Predicted spectra are smoother than recorded ones. A vocoder trained only on recorded spectra sounds dull or buzzes
with predicted ones; one trained on both copes with both.

Source  teacher-forced spectra for a vocoder: Tacotron 2 (arXiv:1712.05884), HiFi-GAN (arXiv:2010.05646), 4.4
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from asr_serve.cloning.acoustic_training import AcousticLearner, AcousticNorms, acoustic_item, collate
from asr_serve.cloning.voice_corpus import VoiceRecording
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.tts.fastpitch import Config

AT_ONCE = 8


class MelPredictor:
    """Acoustic model from a checkpoint that predicts frames for given durations."""

    def __init__(self, folder: Path) -> None:
        """`folder`: config.json and model.safetensors. Raises OptionError."""
        try:
            self.config = Config.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            tensors = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError, WeightsCorrupt) as failure:
            raise OptionError(
                f"{folder}: {failure}", "a checkpoint of asr-serve train voice", param="acoustic"
            ) from failure
        known = self.config.norms
        self._norms = AcousticNorms(known.mel, known.energy, dict(known.pitch))
        self._learner = AcousticLearner(self.config.sizes)
        self._learner.load(tensors)

    @torch.no_grad()
    def frames(self, recordings: Sequence[VoiceRecording]) -> list[np.ndarray]:
        """Log-mel (frames, 80) float16 of each recording. Raises OptionError for a voice that the model lacks."""
        found: list[np.ndarray] = []
        mean, deviation = self._norms.mel
        for at in range(0, len(recordings), AT_ONCE):
            items = [
                acoustic_item(item, self._speaker(item), self.config.vocabulary)
                for item in recordings[at : at + AT_ONCE]
            ]
            batch = collate(items, self._norms, self.config.voices, self.config.sizes.chunk)
            mels = self._learner(batch).frames[..., :80].float() * deviation + mean
            found += [mel[: len(item.mel)].numpy().astype(np.float16) for mel, item in zip(mels, items, strict=True)]
        return found

    def _speaker(self, recording: VoiceRecording) -> int:
        name = recording.voice.rpartition("_")[2]
        if name not in self.config.voices:
            raise OptionError(f"speech of {recording.voice!r}", f"speakers: {', '.join(self.config.voices)}")
        return self.config.voices.index(name)
