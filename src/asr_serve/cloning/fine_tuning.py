"""Teaches a model one more voice, and nothing else: a vector for its encoder, one for its decoder, and low-rank
changes to its products. All that the model knows of others stays as it is, bit for bit.

A vector alone does not hold a voice that the model has never heard; teaching all weights erases the others. What
is learnt here is 1 MB, and belongs to rows of a batch.

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
"""How long it is taught: so many steps, and so many more for each second of speech. A voice of few clips is faint
and less like its speaker's after fifty; after 120 it gets hardly more like it, while fewer words of what it says
are understood. The loss on what is held out, a clip or two, tells neither."""
EVERY = 12
"""Steps between two looks at what is held out."""
WORSE = 1.25
"""Times the best loss on what is held out, above which it goes back to the best."""
HELD_OUT, MOST_HELD_OUT = 0.15, 8
DECAY = 0.01


class FineTuningResult(NamedTuple):
    """What a voice's file holds, and how it went."""

    tensors: dict[str, Tensor]
    steps: int
    before: float
    after: float
    """The loss on clips that were never learnt from: as the nearest voice would have said them, and as this
    one."""
    seconds: float


class FineTuningProgress(NamedTuple):
    """How far it is. `share` of the time or steps that there are; `left_s`: about."""

    share: float
    held_out: float
    left_s: float


class VoiceDelta(nn.Module):
    """What is learnt of a voice: changes to products here, and the last row of the base's tables of speakers.
    Their other rows are never looked up, so that their gradients are zero and they stay."""

    def __init__(self, base: CloningBaseModel, start: str) -> None:
        """`start`: the voice of the model's own that it begins as."""
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
        """For a batch in which all rows are this voice."""
        return {
            name.replace("/", "."): (down.expand(rows, -1, -1), self.up[name].expand(rows, -1, -1))
            for name, down in self.down.items()
        }

    def tensors(self, pitch: tuple[float, float]) -> dict[str, Tensor]:
        """As models/tts/fastpitch.read_voice has them: what is large in half precision."""
        found = {
            "speaker": self.tables["speakers"][-1].detach().clone(),
            "speaker_decoder": self.tables["speakers_decoder"][-1].detach().clone(),
            "pitch": torch.tensor(pitch),
        }
        for name, down in self.down.items():
            own = name.replace("/", ".")
            found[f"{own}.down"] = down.detach().half()
            found[f"{own}.up"] = self.up[name].detach().half()
        return found


class VoiceFineTuning:
    """A voice while it is learnt: `items` of speaker `base.speaker`, whose pitch is in `base.norms` by `name`."""

    def __init__(
        self, base: CloningBaseModel, name: str, start: str, items: Sequence[AcousticItem], seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.base, self.name = base, name
        self.delta = VoiceDelta(base, start)
        self._speakers = [*base.config.voices, name]
        self._chance = random.Random(seed)
        self.training_items, self.held_out_items = split_items(items)

    def losses(self, items: Sequence[AcousticItem]) -> dict[str, Tensor]:
        """Of a batch, as this voice says it now."""
        made = collate(items, self.base.norms, self._speakers, self.base.config.sizes.chunk)
        return self.base.learner.losses(made, self.base.norms, self.delta.changes(len(items)))

    @torch.no_grad()
    def held_out(self) -> float:
        """The loss on clips that are not learnt from."""
        found = [(len(part), float(total_loss(self.losses(part)))) for part in length_batches(self.held_out_items)]
        return sum(count * loss for count, loss in found) / sum(count for count, _ in found)

    def steps(self) -> int:
        """As many as there is speech to learn from."""
        seconds = sum(len(each.mel) for each in self.training_items) * HOP / RATE_HZ
        return min(MOST_STEPS, round(STEPS + STEPS_A_SECOND * seconds))

    def train(
        self, minutes: float, told: Callable[[FineTuningProgress], None], stop: Callable[[], bool]
    ) -> FineTuningResult:
        """So many steps, ever more slowly, within so many minutes; what is held out is only watched. Raises
        Cancelled."""
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
        kept, kept_at, steps = self._copied(), 0, self.steps()
        for step, part in enumerate(self._drawn()):
            passed = time.monotonic() - began
            share = max(passed / 60 / minutes, step / steps)
            if step and (step % EVERY == 0 or share >= 1):
                now = self.held_out()
                if now < best:
                    best, kept, kept_at = now, self._copied(), step
                left_s = min(passed * (steps / step - 1), max(0.0, 60 * minutes - passed))
                told(FineTuningProgress(min(1.0, share), now, left_s))
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
            self._restore(kept)
            now, step = best, kept_at
        tensors = self.delta.tensors(self.base.norms.pitch[self.name])
        return FineTuningResult(tensors, step, before, now, time.monotonic() - began)

    def _drawn(self) -> Iterator[list[AcousticItem]]:
        """All that is learnt from, over and over, in batches."""
        while True:
            yield from length_batches(self.training_items, self._chance)

    def _copied(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.delta.parameters()]

    @torch.no_grad()
    def _restore(self, kept: Sequence[Tensor]) -> None:
        for parameter, was in zip(self.delta.parameters(), kept, strict=True):
            parameter.copy_(was)


def total_loss(losses: dict[str, Tensor]) -> Tensor:
    return sum((WEIGHTS[name] * loss for name, loss in losses.items()), torch.zeros(()))


def split_items(items: Sequence[AcousticItem]) -> tuple[list[AcousticItem], list[AcousticItem]]:
    """To learn from, and held out: short, middling and long ones, at least one."""
    order = sorted(items, key=lambda item: len(item.mel))
    count = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(order))))
    held = {int((at + 0.5) * len(order) / count) for at in range(count)}
    return (
        [each for at, each in enumerate(order) if at not in held],
        [each for at, each in enumerate(order) if at in held],
    )


def length_batches(items: Sequence[AcousticItem], chance: random.Random | None = None) -> list[list[AcousticItem]]:
    """All of them, those of a length together, in an order by `chance`."""
    made: list[list[AcousticItem]] = [[]]
    lengths = {id(item): len(item.mel) * (chance.uniform(0.8, 1.25) if chance else 1.0) for item in items}
    for each in sorted(items, key=lambda item: lengths[id(item)]):
        longest = max([len(each.mel), *(len(other.mel) for other in made[-1])])
        if made[-1] and (len(made[-1]) + 1) * longest > BATCH_FRAMES:
            made.append([])
        made[-1].append(each)
    if chance:
        chance.shuffle(made)
    return made
