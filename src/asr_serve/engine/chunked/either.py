"""Streaming searches of whom some sessions have hot words: those go through a beam that knows them, on its own,
and the others through the search that the engine was set up with, as if they were alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from asr_serve.decoding.hotwords import StreamWords
from asr_serve.models.streaming import Chunk, Found, Guess, Search, State, StateSpec


class Biased(Protocol):
    """A search that knows hot words: CtcPrefixBeam and TransducerBeam, made with a boost."""

    def state(self) -> dict[str, StateSpec]: ...
    def step(self, hidden: Tensor, chunk: Chunk, state: State, words: StreamWords | None) -> list[Found]: ...
    def finish(self, row: int, state: State, words: StreamWords | None) -> list[Guess]: ...


class Either:
    """See models/streaming.Search. A session's search is chosen before its first step, and again where a session
    that was saved goes on: `expect`."""

    def __init__(self, plain: Search, biased: Biased) -> None:
        self.plain, self.biased = plain, biased
        self._words: dict[int, StreamWords] = {}

    def state(self) -> dict[str, StateSpec]:
        return {**named("plain", self.plain.state()), **named("hot", self.biased.state())}

    def expect(self, row: int, words: StreamWords | None) -> None:
        if words is None:
            self._words.pop(row, None)
        else:
            self._words[row] = words

    def step(self, hidden: Tensor, chunk: Chunk, state: State) -> list[Found]:
        groups = self._groups(chunk.rows.tolist()) if self._words else {}
        if not groups:
            return self.plain.step(hidden, chunk, part("plain", state))
        found: list[Found] = [Found([], [])] * len(hidden)
        for words, at in groups.items():
            where = torch.tensor(at, device=hidden.device)
            own = Chunk(*(each[where.to(each.device)] for each in chunk))
            if words is None:
                heard = self.plain.step(hidden[where], own, part("plain", state))
            else:
                heard = self.biased.step(hidden[where], own, part("hot", state), words)
            for index, each in zip(at, heard, strict=True):
                found[index] = each
        return found

    def _groups(self, rows: list[int]) -> dict[StreamWords | None, list[int]]:
        """Places in the step, by hot words; empty where nobody has any."""
        groups: dict[StreamWords | None, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault(self._words.get(row), []).append(at)
        return groups if groups.keys() != {None} else {}

    def finish(self, row: int, state: State) -> list[Guess]:
        words = self._words.get(row)
        if words is None:
            return self.plain.finish(row, part("plain", state))
        return self.biased.finish(row, part("hot", state), words)


def named(part: str, specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
    """Of one part of some state, under names that no other part has."""
    return {f"{part}.{name}": spec for name, spec in specs.items()}


def part(part: str, state: State) -> State:
    """The inverse: its tensors, under the names it gave them."""
    return {name.removeprefix(f"{part}."): each for name, each in state.items() if name.startswith(f"{part}.")}
