"""Training of the acoustic model: data, learning rate, checkpoint."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve.cloning.acoustic_training import (
    WEIGHTS,
    AcousticItem,
    AcousticLearner,
    AcousticNorms,
    acoustic_item,
    collate,
    compute_norms,
)
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ, open_voice_corpora
from asr_serve.errors import OptionError
from asr_serve.models.tts.fastpitch_network import FastPitchSizes
from asr_serve_tools.train.voice.sentences import held_out

WARM_UP = 100
"""Steps in which the learning rate rises."""
AVERAGED = 0.998
"""Decay of the averaged weights per step."""
POOL = 400
"""Utterances that are drawn at once and sorted by length, so that a batch has little padding."""
EVENNESS = 0.5
"""Exponent of sampling: a speaker with n times the speech is drawn n ** EVENNESS times as often."""
TESTED = 48
"""Held-out utterances in a test."""


class AcousticTrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    speech: Path
    """Folder of recorded speech (cloning/voice_corpus)."""
    out: Path
    """Folder of the checkpoint: config.json and model.safetensors."""
    minutes: float = math.inf
    steps: int = 1 << 40
    """Most steps; training ends after `minutes` or `steps`, whichever comes first."""
    start: Path | None = None
    """Checkpoint to start from."""
    speakers: tuple[str, ...]
    """Names of speakers in the order of their ids. A file's speaker is the name after its last underscore."""
    phonemes: dict[str, int]
    rate: float = 1.2e-3
    falling: float = 0.5
    """Last share of the run, in which the learning rate falls as a cosine."""
    frames: int = 4_000
    """Frames in a batch, padding included."""
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    sizes: FastPitchSizes = FastPitchSizes()


class AcousticTrainingData:
    """All speech, divided into training and held-out utterances."""

    def __init__(self, options: AcousticTrainingOptions, say: Callable[[str], None]) -> None:
        self.items: dict[int, list[AcousticItem]] = {}
        self.test: list[AcousticItem] = []
        for voice in open_voice_corpora(options.speech):
            name = voice.name.rpartition("_")[2]
            if name not in options.speakers:
                raise OptionError(f"speech of {voice.name!r}", f"speakers: {', '.join(options.speakers)}")
            speaker = options.speakers.index(name)
            for recording in voice:
                found = acoustic_item(recording, speaker, options.phonemes)
                (self.test if held_out(recording.line.text) else self.items.setdefault(speaker, [])).append(found)
        everything = [item for of_one in self.items.values() for item in of_one]
        chance = random.Random(options.seed)
        chance.shuffle(self.test)
        self.test = self.test[:TESTED]
        if not self.items or not self.test:
            raise OptionError(
                f"{options.speech} has {len(everything)} utterances to learn from and {len(self.test)} held out",
                "some of each: one sentence in twenty is held out",
                "have more sentences read",
                param="speech",
            )
        self.norms = compute_norms(everything, options.speakers)
        hours = sum(len(item.mel) for item in everything) * HOP / RATE_HZ / 3_600
        say(f"{len(everything)} utterances, {hours:.2f} hours, {len(self.items)} speakers")

    def batches(self, options: AcousticTrainingOptions) -> Iterator[list[AcousticItem]]:
        """Endless sequence of training batches."""
        chance = random.Random(options.seed)
        speakers = sorted(self.items)
        weights = [len(self.items[speaker]) ** EVENNESS for speaker in speakers]
        while True:
            drawn = [chance.choice(self.items[speaker]) for speaker in chance.choices(speakers, weights, k=POOL)]
            drawn.sort(key=lambda item: len(item.mel))
            batches: list[list[AcousticItem]] = [[]]
            for item in drawn:
                if batches[-1] and (len(batches[-1]) + 1) * len(item.mel) > options.frames:
                    batches.append([])
                batches[-1].append(item)
            chance.shuffle(batches)
            yield from batches


def train_acoustic_model(options: AcousticTrainingOptions, say: Callable[[str], None] = print) -> dict[str, float]:
    """Train for the given minutes or steps; returns the held-out losses. Raises OptionError."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    data = AcousticTrainingData(options, say)
    device = torch.device(options.device)
    learner = AcousticLearner(options.sizes).on(device)
    norms = data.norms
    if options.start is not None:
        learner.load(load_file(options.start / "model.safetensors"))
        before = msgspec.convert(json.loads((options.start / "config.json").read_text())["norms"], AcousticNorms)
        norms = msgspec.structs.replace(before, pitch={**before.pitch, **data.norms.pitch})
    decayed = [p for p in learner.linears.parameters() if p.dim() > 1]
    others = [*learner.tables.parameters(), *learner.norms.parameters()]
    others += [p for p in learner.linears.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    averaged = {name: tensor.clone() for name, tensor in learner.checkpoint().items()}
    started, last_report, sums, steps = time.monotonic(), 0.0, dict.fromkeys(WEIGHTS, 0.0), 0
    for step, drawn in enumerate(data.batches(options)):
        minutes = (time.monotonic() - started) / 60
        share = max(minutes / options.minutes, step / options.steps)
        if share >= 1:
            break
        rate = options.rate * min(1.0, (step + 1) / WARM_UP) * learning_rate_factor(share, options.falling)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = learner.losses(collate(drawn, norms, options.speakers, options.sizes.chunk).to(device), norms)
        total = sum((WEIGHTS[name] * loss for name, loss in losses.items()), torch.zeros((), device=device))
        optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        update_average(averaged, learner.checkpoint(), min(AVERAGED, (step + 1) / (step + 10)))
        steps += 1
        for name, loss in losses.items():
            sums[name] += float(loss.detach())
        if steps == 50:
            shown = " ".join(f"{name} {value / steps:.3f}" for name, value in sums.items())
            say(f"step {step + 1}, {minutes:.1f} min, rate {rate:.1e}: {shown}")
            sums, steps = dict.fromkeys(WEIGHTS, 0.0), 0
        if share - last_report > 0.1:
            last_report = share
            held_out_losses(learner, averaged, data, options, norms, say)
            save(options, averaged, norms, 1.0)
    found = held_out_losses(learner, averaged, data, options, norms, say)
    save(options, averaged, norms, found.pop("lengthen"))
    return found


def learning_rate_factor(share: float, last: float) -> float:
    """Factor on the learning rate at a share of the run, with the fall in the `last` share."""
    done = max(0.0, (share - (1 - last)) / last) if last else 0.0
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def update_average(averaged: dict[str, Tensor], now: dict[str, Tensor], decay: float) -> None:
    names = list(averaged)
    torch._foreach_lerp_([averaged[name] for name in names], [now[name] for name in names], 1 - decay)


@torch.no_grad()
def held_out_losses(
    learner: AcousticLearner,
    averaged: dict[str, Tensor],
    data: AcousticTrainingData,
    options: AcousticTrainingOptions,
    known: AcousticNorms,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Held-out losses of the averaged weights; `lengthen`: ratio of the teachers' durations to the predicted ones."""
    now = {name: tensor.clone() for name, tensor in learner.checkpoint().items()}
    learner.load(averaged)
    found: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    actual = predicted = 0.0
    for at in range(0, len(data.test), 8):
        b = collate(data.test[at : at + 8], known, options.speakers, options.sizes.chunk)
        b = b.to(torch.device(options.device))
        for name, loss in learner.losses(b, known).items():
            found[name].append(float(loss))
        hidden = learner.network.encode(b.ids, b.phoneme_mask, learner.tables["speakers"][b.speaker])
        actual += float(b.durations.sum())
        predicted += float((learner.network.log_durations(hidden, b.phoneme_mask).exp() * b.phoneme_mask).sum())
    learner.load(now)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    means["lengthen"] = actual / predicted
    say("held out: " + " ".join(f"{name} {value:.4f}" for name, value in means.items()))
    return means


def save(options: AcousticTrainingOptions, tensors: dict[str, Tensor], known: AcousticNorms, lengthen: float) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "model_type": "fastpitch",
        **msgspec.to_builtins(options.sizes),
        "norms": msgspec.to_builtins(known),
        "lengthen": lengthen,
        "voices": list(options.speakers),
        "vocabulary": options.phonemes,
    }
    (options.out / "config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False))
    weights, building = options.out / "model.safetensors", options.out / "building.safetensors"
    save_file({name: tensor.half().cpu().contiguous() for name, tensor in tensors.items()}, building)
    building.chmod(0o644)  # the server may run as another user
    building.replace(weights)  # atomic, so that the file is always complete
