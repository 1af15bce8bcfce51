"""The smallest FastPitch, of random weights, in the form of a checkpoint; and somebody who is to be learnt."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from asr_serve.cloning.acoustic_training import AcousticItem, AcousticLearner
from asr_serve.models.tts.fastpitch_network import FastPitchSizes

SIZES = FastPitchSizes(
    phonemes=40, speakers=3, width=32, heads=2, inner=48, encoder_layers=1, decoder_layers=1, chunk=16, past=2
)
VOICES = ("heart", "emma", "adam")
LETTERS = "_ abcdefghijklmnopqrstuvwxyz"


def save(folder: Path, likeness: np.ndarray | None = None, letters: str = LETTERS) -> Path:
    """`letters`: its vocabulary."""
    torch.manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = msgspec.structs.replace(SIZES, phonemes=max(SIZES.phonemes, len(letters)))
    learner = AcousticLearner(sizes)
    save_file({name: t.clone() for name, t in learner.checkpoint().items()}, folder / "model.safetensors")
    settings = {
        "model_type": "fastpitch",
        **msgspec.to_builtins(sizes),
        "norms": {
            "mel": [-5.0, 2.0],
            "energy": [0.0, 1.0],
            "pitch": {"heart": [5.3, 0.2], "emma": [5.4, 0.2], "adam": [4.7, 0.15]},
        },
        "lengthen": 1.0,
        "voices": list(VOICES),
        "vocabulary": {letter: number for number, letter in enumerate(letters)},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    if likeness is not None:
        save_file({"ge2e": torch.from_numpy(likeness)}, folder / "speakers.safetensors")
    return folder


def items(speaker: int, count: int = 10) -> list[AcousticItem]:
    """Somebody whose spectrum is always the same, but for how it moves with the phoneme."""
    rng = np.random.default_rng(7)
    shape = rng.normal(-5, 2, (len(LETTERS), 80)).astype(np.float32)
    found = []
    for _ in range(count):
        ids = np.concatenate([[0], rng.integers(2, len(LETTERS), rng.integers(8, 20)), [0]])
        durations = 3 + ids % 4
        mel = np.repeat(shape[ids], durations, 0) + 0.05 * rng.standard_normal((durations.sum(), 80))
        f0 = np.where(np.repeat(ids % 3, durations) > 0, 5.0, 0).astype(np.float32)
        voiced = (ids % 3 > 0).astype(np.float32)
        pitch, energy = 5.0 * voiced + 0.1 * voiced * (ids % 5), shape[ids].mean(1)
        found.append(
            AcousticItem(
                speaker,
                ids.astype(np.int64),
                durations.astype(np.int64),
                pitch.astype(np.float32),
                voiced,
                energy.astype(np.float32),
                mel.astype(np.float16),
                f0,
            )
        )
    return found
