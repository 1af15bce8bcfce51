"""A transducer small enough to reckon with, and callers whose chunks come as they may."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr_serve.models.interfaces import (
    UNBOUNDED_SAMPLES,
    NBestHypothesis,
    SearchToken,
    StateSpec,
    StreamingChunk,
    StreamingSearch,
)


class TinyTransducer:
    """`Transducer`, with the two numbers of a streaming model that searches ask for: LSTM, relu."""

    def __init__(
        self,
        *,
        vocab: int = 9,
        width: int = 6,
        hidden: int = 8,
        joint: int = 10,
        layers: int = 1,
        durations: tuple[int, ...] = (),
        blank: int | None = None,
    ) -> None:
        self.vocab_size, self.width, self.durations = vocab, width, durations
        self.blank_id = vocab - 1 if blank is None else blank
        self.parts = nn.ModuleDict(
            {
                "embedding": nn.Embedding(vocab, hidden),
                "lstm": nn.LSTM(hidden, hidden, layers, batch_first=True),
                "encoded": nn.Linear(width, joint),
                "predicted": nn.Linear(hidden, joint),
                "out": nn.Linear(joint, vocab + len(durations)),
            }
        ).eval()
        self.memory = (layers, hidden)
        self.calls = {"predict": 0, "joint": 0, "project": 0}

    @classmethod
    def random(cls, seed: int, *, sharp: float = 1.0, eager: float = 0.0, **sizes) -> TinyTransducer:
        """`sharp`: how sure it is of what it says. `eager`: what makes a blank less likely. After some tokens, at
        some frames, it is likelier: else such a model mostly says as much as it may, or nothing."""
        made = cls(**sizes)
        numbers = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in made.parts.named_parameters():
                scale = {"out": sharp, "embedding": 2.0}.get(name.split(".")[0], 1.2)
                weight.copy_(torch.randn(weight.shape, generator=numbers) * scale)
            made.parts["encoded"].weight[0] *= 2
            made.parts["predicted"].weight[0] *= 3
            made.parts["out"].weight[:, 0] = 0.0
            made.parts["out"].weight[made.blank_id, 0] = 3 * sharp
            made.parts["out"].bias[made.blank_id] -= eager
        return made

    def load(self, tensors: Mapping[str, Tensor]) -> TinyTransducer:
        self.parts.load_state_dict(dict(tensors), strict=True)
        return self

    def to(self, device: str) -> TinyTransducer:
        self.parts.to(device)
        return self

    def predictor_state_specs(self) -> dict[str, StateSpec]:
        return {"h": StateSpec(self.memory), "c": StateSpec(self.memory)}

    def predict(self, tokens: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls["predict"] += 1
        before = memory["h"].transpose(0, 1).contiguous(), memory["c"].transpose(0, 1).contiguous()
        heard, (h, c) = self.parts["lstm"](self.parts["embedding"](tokens)[:, None], before)
        return self.parts["predicted"](heard[:, 0]), {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}

    def project_encoder(self, hidden: Tensor) -> Tensor:
        self.calls["project"] += 1
        return self.parts["encoded"](hidden)

    def joint(self, projected: Tensor, predicted: Tensor) -> Tensor:
        self.calls["joint"] += 1
        return self.parts["out"](torch.relu(projected + predicted)).float()


def noise(seed: int, lengths: Sequence[int], width: int = 6) -> list[Tensor]:
    """Encoder output of sessions: (frames, width) each."""
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(length, width, generator=numbers) for length in lengths]


class Partial(NamedTuple):
    """After a step."""

    frames: int
    """So far."""
    tokens: list[SearchToken]
    """All, so far."""
    unfixed: int
    """How many of them may change."""


@dataclass
class Heard:
    """What a search said of one session."""

    fixed: list[SearchToken] = field(default_factory=list)
    partials: list[Partial] = field(default_factory=list)
    guesses: list[NBestHypothesis] = field(default_factory=list)

    @property
    def best(self) -> list[SearchToken]:
        return self.fixed + self.guesses[0].tokens


def poison(state: Mapping[str, Tensor], row: int) -> None:
    """What nobody may read."""
    for tensor in state.values():
        tensor[row] = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min


def run(
    search: StreamingSearch,
    sessions: Sequence[Tensor],
    *,
    slots: int | None = None,
    chunks: Sequence[int] = (4,),
    company: int | None = None,
    shuffle: int = 0,
    fill: int = 0,
    idle: float = 0.0,
    device: str = "cpu",
) -> list[Heard]:
    """All `sessions` through `search`, as an engine would: in steps of one of `chunks` frames, of some of those
    that have a row, at most `company`, in any order. So many of them as `idle` says have no frames in a step, and
    `fill` rows besides are nobody's. A session takes a row when one is free and gives it back when it ends. Rows
    that do not run must stay as they are."""
    draw = random.Random(shuffle)
    slots = len(sessions) if slots is None else slots
    specs = search.state_specs()
    state = {name: torch.zeros(slots + 1, *spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}
    for row in range(slots + 1):
        poison(state, row)
    heard = [Heard() for _ in sessions]
    seen = [0] * len(sessions)
    waiting, free, running = list(range(len(sessions))), list(range(slots)), dict[int, int]()
    while waiting or running:
        while waiting and free and (not running or draw.random() < 0.7):
            row = running[waiting.pop(0)] = free.pop(draw.randrange(len(free)))
            for name, spec in specs.items():
                if spec.initial_value is not None:
                    state[name][row] = spec.initial_value
        size = draw.choice(chunks)
        most = min(len(running), company or len(running))
        who = draw.sample(sorted(running), draw.randint(1, most))
        frames = [0 if draw.random() < idle else min(size, len(sessions[each]) - seen[each]) for each in who]
        rows = [running[each] for each in who] + [slots] * fill
        hidden = torch.full((len(rows), size, sessions[0].shape[1]), math.nan)
        for index, (each, count) in enumerate(zip(who, frames, strict=True)):
            hidden[index, :count] = sessions[each][seen[each] : seen[each] + count]
        others = [row for row in range(slots) if row not in rows]
        before = {name: tensor[others].clone() for name, tensor in state.items()}
        chunk = StreamingChunk(
            torch.zeros(len(rows), 0, device=device),
            torch.tensor(rows, device=device),
            torch.tensor([seen[each] for each in who] + [0] * fill, device=device),
            torch.tensor(frames + [0] * fill, device=device),
            torch.full((len(rows),), UNBOUNDED_SAMPLES, device=device),
        )
        found = search.step(hidden.to(device), chunk, state)
        assert len(found) == len(rows)
        for name, tensor in state.items():
            assert torch.equal(tensor[others].nan_to_num(), before[name].nan_to_num()), f"{name} of others moved"
        for each, count, new in zip(who, frames, found, strict=False):
            seen[each] += count
            heard[each].fixed += new.fixed_tokens
            heard[each].partials.append(Partial(seen[each], heard[each].fixed + new.tail_tokens, len(new.tail_tokens)))
            if seen[each] == len(sessions[each]):
                row = running.pop(each)
                heard[each].guesses = search.finish(row, state)
                poison(state, row)
                free.append(row)
    return heard
