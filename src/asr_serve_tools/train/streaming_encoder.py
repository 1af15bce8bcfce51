"""Distillation of Moonshine's encoder into a streaming encoder, from audio alone: no text is needed.

Moonshine's encoder (the teacher) attends to an utterance as a whole. The student attends to a window around each
frame, so that it can run while a caller speaks. It starts with the teacher's layers, after convolutions of its
own, and learns to compute the same frames for the same audio. Moonshine's decoder is used unchanged: the result
is a checkpoint of kind moonshine_streaming.

Source  distillation to features: arXiv:1412.6550; of whole-utterance teachers to streaming ones: arXiv:2010.12096.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve import devices, units
from asr_serve.devices.interface import Device
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve_tools.train.audio_corpus import AudioCorpus, CorpusClip
from asr_serve_tools.train.streaming_student import StreamingStudent, config_of, save

LATE_FRAMES = 2
"""Delay of the student's frames: a teacher's frame covers 895 samples from its start, a student's 96, so two
frames later the student has processed as much audio."""
WEIGHTS = {"end": 1.0, "layer": 0.3, "front": 0.3}
"""Weights of the losses: at the end, in the middle layer, after the convolutions, which are not copied."""
SETTLING_BATCHES = 40
"""Batches from which the convolutions are initialized."""
WARM_UP = 0.05
"""Share of the steps in which the learning rate rises; then it falls as a cosine to LEAST of it."""
LEAST = 0.02
CLIPS_S = (2.0, 20.0)
HELD_OUT_CLIPS, HELD_OUT_S = 16, 10.0
QUIETER_DB = 12.0

HELP = """\
Teach a streaming encoder to hear what Moonshine's hears, from audio alone.

  python -m asr_serve_tools.train.streaming_encoder --audio speech/ --run runs/first

--audio takes files, folders and lists, as `asr-serve transcribe` does. They are decoded once, into the run folder,
at 115 MB an hour. Many speakers matter more than many hours of few.

The run folder holds
  log.jsonl     a line for every --log-every steps: the losses, how much audio was heard, how fast; with "held_out"
                every --save-every steps: the same loss on recordings that are never trained on
  checkpoint/   the model so far, ready to serve (see below)
  state.pt      what is needed to go on. The same command goes on where the last one stopped, however that ended;
                a finished run goes on when --steps grows

The loss is the squared difference from the teacher over the teacher's own square: 1 is a student without output,
0.45 one that always says the same. A sibling of this one, which had the teacher's own convolutions, went from 0.24
to 0.07 in five hours of audio and still got two words in five wrong; how low it must be is not known yet. Expect
to need a GPU and hundreds of hours.

Each layer has a window: "200,4" sees itself and 199 frames (24 ms each) back, and 3 ahead. What all layers see
ahead adds up to the delay of a word: 12 frames, 288 ms, unless told.

To hear it:
  asr-serve transcribe --model moonshine-streaming-tiny-en --weights runs/first/checkpoint clip.wav
"""


class StreamingTrainingSettings(NamedTuple):
    """Settings that must not change when a run continues."""

    teacher: str
    windows: list[tuple[int, int]]
    lr: float
    batch_s: float
    held_out: float
    seed: int


class TeacherEncoder:
    """Moonshine's encoder, with outputs at its front, middle and end."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self.config = moonshine.Config.of(json.loads((folder / "config.json").read_text()))
        self.tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self.model = moonshine.Model(self.config, self.tensors, device)
        self.middle = max(1, 2 * len(self.model.encoder) // 3)
        """Number of layers after which the student is compared."""

    @torch.no_grad()
    def __call__(self, batch: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Hidden states of each clip, by the name of a loss: (frames, width) float32."""
        model = self.model
        x, packing = model.stem(batch)
        outputs = {"front": x}
        angles = model.angles(max(packing.frames))
        for i, layer in enumerate(model.encoder):
            x = layer(x, packing, angles, self.device)
            if i + 1 == self.middle:
                outputs["layer"] = x
        outputs["end"] = F.layer_norm(x, x.shape[-1:], model.encoder_norm)
        return [
            {name: hidden[at : at + frames].float() for name, hidden in outputs.items()}
            for at, frames in zip(packing.offsets, packing.frames, strict=True)
        ]


class DistillationBatch(NamedTuple):
    """Clips with the teacher's hidden states."""

    pcm: Tensor
    """Samples (clips, n), zeros past each clip."""
    samples: Tensor
    targets: dict[str, Tensor]
    """Teacher's hidden states for the student's frames, by the name of a loss: (frames of all clips, width)."""


def distillation_batch(
    student: StreamingStudent, teacher: TeacherEncoder, batch: Sequence[np.ndarray]
) -> DistillationBatch:
    device = teacher.device.torch_device
    clips = [torch.from_numpy(clip).to(device) for clip in batch]
    targets: dict[str, list[Tensor]] = {name: [] for name in WEIGHTS}
    for clip, outputs in zip(clips, teacher(clips), strict=True):
        # The student's first frames, before the teacher's first, get that one as their target.
        frames = torch.arange(student.frames(len(clip)), device=device) - LATE_FRAMES
        for name, hidden in outputs.items():
            targets[name].append(hidden[frames.clamp(0, len(hidden) - 1)])
    samples = torch.tensor([len(clip) for clip in clips], device=device)
    padded = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    return DistillationBatch(padded, samples, {name: torch.cat(parts) for name, parts in targets.items()})


def losses(student: StreamingStudent, teacher: TeacherEncoder, batch: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Squared difference over the teacher's square, over all frames of the clips, by name."""
    pcm, samples, targets = distillation_batch(student, teacher, batch)
    with torch.autocast(pcm.device.type, torch.bfloat16, enabled=teacher.device.dtype == torch.bfloat16):
        hidden_states, frames = student(pcm, samples)
    found = {}
    for name, hidden in (
        ("front", hidden_states[0]),
        ("layer", hidden_states[teacher.middle]),
        ("end", hidden_states[-1]),
    ):
        parts = [part[:count] for part, count in zip(hidden, frames.tolist(), strict=True)]
        found[name] = (torch.cat(parts).float() - targets[name]).square().mean() / targets[name].square().mean()
    return found


def total(found: dict[str, Tensor]) -> Tensor:
    return sum((WEIGHTS[name] * loss for name, loss in found.items()), start=torch.zeros(()).to(found["end"]))


def batch_of(
    corpus: AudioCorpus, clips: Sequence[CorpusClip], batch_s: float, chance: random.Random
) -> list[np.ndarray]:
    """Crops of about equal length, `batch_s` seconds in all, attenuated by up to QUIETER_DB. Recordings are drawn
    in proportion to their length."""
    length_s = min(chance.uniform(*CLIPS_S), batch_s)
    length = units.s_to_samples(length_s)
    chosen = chance.choices(clips, [clip.samples for clip in clips], k=max(1, int(batch_s / length_s)))
    batch = []
    for clip in chosen:
        pcm = corpus.read(clip, chance.randint(0, max(0, clip.samples - length)), length)
        batch.append((pcm * 10 ** (-chance.uniform(0, QUIETER_DB) / 20)).astype(np.float32))
    return batch


def rate(step: int, steps: int) -> float:
    """Learning rate at a step, as a share of the highest."""
    done = step / steps
    return min(1.0, (done + 1 / steps) / WARM_UP) * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2)


class StreamingEncoderTraining:
    """Resumable training of a student in a run folder."""

    def __init__(
        self,
        folder: Path,
        settings: StreamingTrainingSettings,
        teacher: TeacherEncoder,
        corpus: AudioCorpus,
        steps: int,
    ) -> None:
        self.folder, self.settings, self.steps = folder, settings, steps
        self.teacher, self.corpus = teacher, corpus
        torch.manual_seed(settings.seed)
        self.config = config_of(teacher.config, settings.windows)
        self.student = StreamingStudent(self.config)
        self.student.start_from(teacher.tensors)
        self.student.to(teacher.device.torch_device)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), settings.lr, (0.9, 0.98), weight_decay=0.0)
        self.step, self.heard_s = 0, 0.0
        self.learning, self.held = corpus.split(settings.held_out)
        if (folder / "state.pt").is_file():
            self._resume()
        else:
            batches = (distillation_batch(self.student, teacher, self._batch(-1 - i)) for i in range(SETTLING_BATCHES))
            self.student.fit_convolutions((pcm, samples, targets["front"]) for pcm, samples, targets in batches)

    def _batch(self, step: int) -> list[np.ndarray]:
        """Audio of a step, which depends on its number alone, so that a resumed run gets the same audio."""
        chance = random.Random(self.settings.seed * 1_000_003 + step)
        return batch_of(self.corpus, self.learning, self.settings.batch_s, chance)

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location="cpu", weights_only=True)
        current = json.loads(json.dumps(self.settings._asdict()))
        for name, was in state["settings"].items():
            if current[name] != was:
                raise OptionError(
                    f"{name}: {current[name]}", f"{self.folder} began with {was}", "take another run folder"
                )
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.heard_s = state["step"], state["heard_s"]

    def save(self) -> None:
        part = self.folder / "state.part"
        torch.save(
            {
                "settings": json.loads(json.dumps(self.settings._asdict())),
                "student": self.student.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "heard_s": self.heard_s,
            },
            part,
        )
        os.replace(part, self.folder / "state.pt")
        save(self.student, self.config, self.teacher.tensors, self.teacher.folder, self.folder / "checkpoint")

    def train(self, log_every: int, save_every: int) -> Iterator[dict[str, Any]]:
        """Train up to the last step. Yields lines of the log."""
        since, sums, heard_s = time.monotonic(), dict.fromkeys(WEIGHTS, 0.0), 0.0
        count = 0
        while self.step < self.steps:
            batch = self._batch(self.step)
            share = rate(self.step, self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * share
            found = losses(self.student, self.teacher, batch)
            self.optimizer.zero_grad()
            total(found).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            count += 1
            seconds = units.samples_to_s(sum(map(len, batch)))
            heard_s, self.heard_s = heard_s + seconds, self.heard_s + seconds
            for name, loss in found.items():
                sums[name] += loss.item()
            last = self.step == self.steps
            if last or self.step % log_every == 0 or self.step % save_every == 0:
                wall_s = time.monotonic() - since
                line: dict[str, Any] = {"step": self.step, "steps": self.steps}
                line |= {f"{name}_loss": round(value / count, 5) for name, value in sums.items()}
                line |= {"lr": self.settings.lr * share, "heard_h": round(self.heard_s / 3_600, 4)}
                line |= {"times_real_time": round(heard_s / wall_s, 2)}
                if last or self.step % save_every == 0:
                    line["held_out"] = round(self.held_out(), 5)
                    self.save()
                yield line
                since, sums, heard_s, count = time.monotonic(), dict.fromkeys(WEIGHTS, 0.0), 0.0, 0

    @torch.no_grad()
    def held_out(self) -> float:
        """Loss at the end of the encoder, on the first HELD_OUT_S seconds of held-out recordings."""
        clips = self.held[:: -(-len(self.held) // HELD_OUT_CLIPS)]
        found = []
        for clip in clips:
            pcm = self.corpus.read(clip, 0, units.s_to_samples(HELD_OUT_S))
            found.append(losses(self.student, self.teacher, [pcm])["end"])
        return float(torch.stack(found).mean())


def windows_of(text: str, layers: int) -> list[tuple[int, int]]:
    """Attention windows (back, ahead) of the layers, from "200,4 200,0": one for each layer, or one for all.
    Empty: only the first two and the last two layers look ahead. Raises OptionError."""
    if not text:
        return [(200, 4 if layer < 2 or layer >= layers - 2 else 0) for layer in range(layers)]
    try:
        found = [(int(back), int(ahead)) for back, ahead in (part.split(",") for part in text.split())]
    except ValueError as wrong:
        raise OptionError(f"--windows {text!r}", '"back,ahead" for each layer: "200,4 200,0"') from wrong
    found = found * layers if len(found) == 1 else found
    if len(found) != layers:
        raise OptionError(f"--windows of {len(found)} layers", f"1, or {layers}: as many as the teacher has")
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m asr_serve_tools.train.streaming_encoder",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--audio", nargs="+", required=True, metavar="PATH", help="files, folders or lists")
    add("--run", type=Path, required=True, metavar="FOLDER", help="everything that is written goes here")
    add("--teacher", default="moonshine-tiny-en", help="a Moonshine's name, or the folder of its checkpoint")
    add("--steps", type=int, default=20_000, help="when to stop; the learning rate falls towards it (%(default)s)")
    add("--batch-s", type=float, default=26.0, help="seconds of audio in a step (%(default)s)")
    add("--lr", type=float, default=4e-4, help="highest learning rate (%(default)s)")
    add("--windows", default="", help='what each layer sees: "200,4 200,0 ...", or one for all')
    add("--held-out", type=float, default=0.02, help="share of the recordings to measure on (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, fp32 or bf16")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=25, metavar="STEPS", help="(%(default)s)")
    add("--save-every", type=int, default=500, metavar="STEPS", help="(%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(argv)
    for name in ("steps", "batch_s", "lr", "held_out", "log_every", "save_every"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0")
    try:
        run_training(options)
    except AsrServeError as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last save", file=sys.stderr)
        return 130
    return 0


def run_training(options: argparse.Namespace) -> None:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    path = Path(options.teacher).expanduser()
    card = asr_card("moonshine-tiny-en" if path.is_dir() else options.teacher)
    folder = store.resolve(card, path if path.is_dir() else None, say)
    teacher = TeacherEncoder(folder, devices.make_device(options.device, options.dtype))
    windows = windows_of(options.windows, len(teacher.model.encoder))
    settings = StreamingTrainingSettings(
        options.teacher, windows, options.lr, options.batch_s, options.held_out, options.seed
    )
    corpus = AudioCorpus.build(options.audio, options.run / "audio", say)
    run = StreamingEncoderTraining(options.run, settings, teacher, corpus, options.steps)
    say(f"step {run.step} of {run.steps} on {teacher.device.name} {teacher.device.dtype_name}")
    with (options.run / "log.jsonl").open("a") as log:
        for line in run.train(options.log_every, options.save_every):
            text = json.dumps(line)
            log.write(text + "\n")
            log.flush()
            say(text)


if __name__ == "__main__":
    sys.exit(main())
