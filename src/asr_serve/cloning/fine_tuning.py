"""Fine-tuning of one voice: a vector for the encoder, one for the decoder, and low-rank changes to linear layers.
The model's own weights stay unchanged, bit for bit.

A vector alone cannot represent a voice that was not in the training data; training all weights would damage the
other voices. The result is 1 MB, and is applied to single rows of a batch.

Source  LoRA (arXiv:2106.09685)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr_serve.cloning.acoustic_training import WEIGHTS, AcousticItem, collate
from asr_serve.cloning.base_model import CloningBaseModel
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ
from asr_serve.errors import Cancelled
from asr_serve.models.tts.fastpitch_layers import LoraChanges

RANK = 16
BATCH_FRAMES = 1_600
RATE, RATE_OF_VECTORS = 2e-3, 1e-2
WARM_UP = 10
STEPS, STEPS_A_SECOND, MOST_STEPS = 90, 0.7, 600
"""Number of training steps, additional steps for each second of speech, and their limit. A voice of few clips is
faint and less similar to its speaker's after fifty; after 120 its similarity hardly grows, while fewer of its
words are intelligible. The loss on held-out clips, one or two, shows neither."""
EVERY = 12
"""Steps between evaluations of the held-out clips."""
WORSE = 1.25
"""Factor of the best held-out loss above which the best parameters are restored."""
HELD_OUT, MOST_HELD_OUT = 0.15, 8
DECAY = 0.01


class FineTuningResult(NamedTuple):
    """Content of a voice's file, and statistics of the training."""

    tensors: dict[str, Tensor]
    steps: int
    before: float
    after: float
    """Losses on held-out clips: of the nearest voice, and of this one."""
    seconds: float


class FineTuningProgress(NamedTuple):
    """Progress. `share`: completed fraction of the time or steps; `left_s`: an estimate."""

    share: float
    held_out: float
    left_s: float


class VoiceDelta(nn.Module):
    """Trained parameters of a voice: low-rank changes of linear layers, and the last row of the base's speaker
    tables. Their other rows are never looked up, so that their gradients are zero and they do not change."""

    def __init__(self, base: CloningBaseModel, start: str) -> None:
        """Initializes the parameters. `start`: the model's voice that the new one is initialized from."""
        super().__init__()
        self.tables = nn.ParameterDict()
        for name in ("speakers", "speakers_decoder"):
            table = base.learner.tables[name].requires_grad_()
            with torch.no_grad():
                table[base.speaker] = table[base.number(start)]
            self.tables[name] = table
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, (outputs, inputs) in base.config.sizes.adapted().items():
            self.down[name.replace(".", "/")] = nn.Parameter(torch.randn(inputs, RANK) / math.sqrt(inputs))
            self.up[name.replace(".", "/")] = nn.Parameter(torch.zeros(RANK, outputs))

    def changes(self, rows: int = 1) -> LoraChanges:
        """Returns the changes for a batch whose rows all have this voice."""
        return {
            name.replace("/", "."): (down.expand(rows, -1, -1), self.up[name].expand(rows, -1, -1))
            for name, down in self.down.items()
        }

    def tensors(self, pitch: tuple[float, float]) -> dict[str, Tensor]:
        """Returns the tensors for models/tts/fastpitch.read_voice: matrices in half precision."""
        tensors = {
            "speaker": self.tables["speakers"][-1].detach().clone(),
            "speaker_decoder": self.tables["speakers_decoder"][-1].detach().clone(),
            "pitch": torch.tensor(pitch),
        }
        for name, down in self.down.items():
            layer = name.replace("/", ".")
            tensors[f"{layer}.down"] = down.detach().half()
            tensors[f"{layer}.up"] = self.up[name].detach().half()
        return tensors


class VoiceFineTuning:
    """Training of a voice: `items` of speaker `base.speaker`, whose pitch is in `base.norms` by `name`."""

    def __init__(self, base: CloningBaseModel, name: str, start: str, items: Sequence[AcousticItem], seed: int) -> None:
        torch.manual_seed(seed)
        self.base, self.name = base, name
        self.delta = VoiceDelta(base, start)
        self._speakers = [*base.config.voices, name]
        self._chance = random.Random(seed)
        self.training_items, self.held_out_items = split_items(items)

    def losses(self, items: Sequence[AcousticItem]) -> dict[str, Tensor]:
        """Computes the losses of a batch with the current parameters."""
        batch = collate(items, self.base.norms, self._speakers, self.base.config.sizes.chunk)
        return self.base.learner.losses(batch, self.base.norms, self.delta.changes(len(items)))

    @torch.no_grad()
    def held_out(self) -> float:
        """Computes the loss on held-out clips."""
        losses = [(len(part), float(total_loss(self.losses(part)))) for part in length_batches(self.held_out_items)]
        return sum(count * loss for count, loss in losses) / sum(count for count, _ in losses)

    def steps(self) -> int:
        """Returns the number of steps for the amount of speech."""
        seconds = sum(len(each.mel) for each in self.training_items) * HOP / RATE_HZ
        return min(MOST_STEPS, round(STEPS + STEPS_A_SECOND * seconds))

    def train(
        self, minutes: float, on_progress: Callable[[FineTuningProgress], None], stop: Callable[[], bool]
    ) -> FineTuningResult:
        """Trains for `steps()` steps, with a decaying learning rate, within `minutes`; held-out clips are only
        evaluated. Raises Cancelled."""
        began = time.monotonic()
        vectors = list(self.delta.tables.parameters())
        matrices = [*self.delta.down.parameters(), *self.delta.up.parameters()]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": DECAY, "at_most": RATE},
                {"params": vectors, "weight_decay": 0.0, "at_most": RATE_OF_VECTORS},
            ],
            lr=RATE,
            betas=(0.9, 0.98),
        )
        before = best = now = self.held_out()
        best_parameters, best_step, steps = self._copied(), 0, self.steps()
        for step, part in enumerate(self._drawn()):
            elapsed_s = time.monotonic() - began
            share = max(elapsed_s / 60 / minutes, step / steps)
            if step and (step % EVERY == 0 or share >= 1):
                now = self.held_out()
                if now < best:
                    best, best_parameters, best_step = now, self._copied(), step
                left_s = min(elapsed_s * (steps / step - 1), max(0.0, 60 * minutes - elapsed_s))
                on_progress(FineTuningProgress(min(1.0, share), now, left_s))
            if share >= 1:
                break
            if stop():
                raise Cancelled("the cloning was cancelled")
            for group in optimizer.param_groups:
                warm = min(1.0, (step + 1) / WARM_UP)
                group["lr"] = group["at_most"] * warm * 0.5 * (1 + math.cos(math.pi * share))
            optimizer.zero_grad(set_to_none=True)
            total_loss(self.losses(part)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_([*vectors, *matrices], 1.0)
            optimizer.step()
        if not now <= WORSE * best:
            self._restore(best_parameters)
            now, step = best, best_step
        tensors = self.delta.tensors(self.base.norms.pitch[self.name])
        return FineTuningResult(tensors, step, before, now, time.monotonic() - began)

    def _drawn(self) -> Iterator[list[AcousticItem]]:
        """Yields batches of all training items, again and again."""
        while True:
            yield from length_batches(self.training_items, self._chance)

    def _copied(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.delta.parameters()]

    @torch.no_grad()
    def _restore(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.delta.parameters(), values, strict=True):
            parameter.copy_(value)


def total_loss(losses: dict[str, Tensor]) -> Tensor:
    return sum((WEIGHTS[name] * loss for name, loss in losses.items()), torch.zeros(()))


def split_items(items: Sequence[AcousticItem]) -> tuple[list[AcousticItem], list[AcousticItem]]:
    """Splits into training and held-out items: the latter are of all lengths, one at least."""
    order = sorted(items, key=lambda item: len(item.mel))
    count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(order))))
    held_out = {int((at + 0.5) * len(order) / count) for at in range(count)}
    return (
        [each for at, each in enumerate(order) if at not in held_out],
        [each for at, each in enumerate(order) if at in held_out],
    )


def length_batches(items: Sequence[AcousticItem], chance: random.Random | None = None) -> list[list[AcousticItem]]:
    """Batches all items by length; `chance` varies and shuffles the batches."""
    batches: list[list[AcousticItem]] = [[]]
    lengths = {id(item): len(item.mel) * (chance.uniform(0.8, 1.25) if chance else 1.0) for item in items}
    for each in sorted(items, key=lambda item: lengths[id(item)]):
        longest = max([len(each.mel), *(len(other.mel) for other in batches[-1])])
        if batches[-1] and (len(batches[-1]) + 1) * longest > BATCH_FRAMES:
            batches.append([])
        batches[-1].append(each)
    if chance:
        chance.shuffle(batches)
    return batches
