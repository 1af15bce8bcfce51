"""What a checkpoint should say of itself: what its voices are like, and how it came to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from asr_serve.audio.resample import resampled
from asr_serve.models.speaker import ge2e
from asr_serve.train.voice.record import Recording
from asr_serve.train.voice.recorded import FULL_SCALE, RATE_HZ, voices
from asr_serve.train.voice.teach import Options
from asr_serve.units import RATE_HZ as HEARD_HZ

COMPARED = 12
"""Utterances of a voice that its likeness is the mean of."""
LIKENESS, CARD = "speakers.safetensors", "card.md"


def likeness(options: Options) -> dict[str, int]:
    """Write what each speaker is like to a speaker encoder, (speakers, 256), beside the checkpoint: whoever is cloned
    begins as the nearest. Returns how many utterances each was taught with."""
    encoder = ge2e.load()
    found = torch.zeros(len(options.speakers), ge2e.WIDTH)
    counts: dict[str, int] = {}
    for voice in voices(options.speech):
        name = voice.name.rpartition("_")[2]
        counts[name] = counts.get(name, 0) + len(voice.lines)
        some = [
            resampled(recording.pcm.astype(np.float32) / FULL_SCALE, RATE_HZ, HEARD_HZ)
            for recording, _ in zip(voice, range(COMPARED), strict=False)
        ]
        found[options.speakers.index(name)] = torch.from_numpy(encoder.voice(some))
    save_file({"ge2e": found}, options.out / LIKENESS)
    return counts


def write_card(job: Recording, options: Options, losses: Mapping[str, float]) -> None:
    """Beside the checkpoint: data, seeds, licences, losses on what was held out."""
    counts = likeness(options)
    minutes = {voice.name: voice.minutes for voice in voices(options.speech)}
    lines = [
        "# A FastPitch taught by asr-serve train voice",
        "",
        f"{options.minutes:g} minutes on {options.device}, {options.threads} threads, seed {options.seed}"
        + (f", begun from {options.start.name}" if options.start else "")
        + f". Learning rate {options.rate:g}, batches of {options.frames} frames.",
        "",
        f"Sentences from {', '.join(path.name for path in job.texts)}; one in twenty is held out by its letters.",
        "Speech: hibari's voice (Apache-2.0) and Kokoro-82M's English voices (Apache-2.0).",
        "",
        "| voice | minutes | utterances |",
        "|---|---|---|",
        *(f"| {name} | {spoken:.1f} | {counts[name.rpartition('_')[2]]} |" for name, spoken in minutes.items()),
        "",
        "Losses on what was held out: " + ", ".join(f"{name} {value:.4f}" for name, value in losses.items()) + ".",
        "",
    ]
    (options.out / CARD).write_text("\n".join(lines), encoding="utf-8")
