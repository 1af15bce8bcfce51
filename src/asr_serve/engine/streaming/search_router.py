"""Streaming searches of whom some sessions have hot words: those go through a beam that knows them, on its own,
and the others through the search that the engine was set up with, as if they were alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.models.interfaces import (
    NBestHypothesis,
    SearchResult,
    State,
    StateSpec,
    StreamingChunk,
    StreamingSearch,
)


class BiasableSearch(Protocol):
    """A search that knows hot words: CtcPrefixBeam and TransducerBeam, made with a boost."""

    def state_specs(self) -> dict[str, StateSpec]: ...
    def step(
        self, hidden: Tensor, chunk: StreamingChunk, state: State, words: StreamingBiasingList | None
    ) -> list[SearchResult]: ...
    def finish(self, row: int, state: State, words: StreamingBiasingList | None) -> list[NBestHypothesis]: ...


class BiasingSearchRouter:
    """See models/interfaces.StreamingSearch.
    A session's search is chosen before its first step, and again where a session
    that was saved goes on: `expect`."""

    def __init__(self, plain: StreamingSearch, biased: BiasableSearch) -> None:
        self.plain_search, self.biased_search = plain, biased
        self._biasing_by_row: dict[int, StreamingBiasingList] = {}

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            **add_prefix("plain", self.plain_search.state_specs()),
            **add_prefix("hot", self.biased_search.state_specs()),
        }

    def set_biasing(self, row: int, words: StreamingBiasingList | None) -> None:
        if words is None:
            self._biasing_by_row.pop(row, None)
        else:
            self._biasing_by_row[row] = words

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        groups = self._group_by_biasing(chunk.rows.tolist()) if self._biasing_by_row else {}
        if not groups:
            return self.plain_search.step(hidden, chunk, select_prefix("plain", state))
        found: list[SearchResult] = [SearchResult([], [])] * len(hidden)
        for words, at in groups.items():
            where = torch.tensor(at, device=hidden.device)
            own = StreamingChunk(*(each[where.to(each.device)] for each in chunk))
            if words is None:
                heard = self.plain_search.step(hidden[where], own, select_prefix("plain", state))
            else:
                heard = self.biased_search.step(hidden[where], own, select_prefix("hot", state), words)
            for index, each in zip(at, heard, strict=True):
                found[index] = each
        return found

    def _group_by_biasing(self, rows: list[int]) -> dict[StreamingBiasingList | None, list[int]]:
        """Places in the step, by hot words; empty where nobody has any."""
        groups: dict[StreamingBiasingList | None, list[int]] = {}
        for at, row in enumerate(rows):
            groups.setdefault(self._biasing_by_row.get(row), []).append(at)
        return groups if groups.keys() != {None} else {}

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        words = self._biasing_by_row.get(row)
        if words is None:
            return self.plain_search.finish(row, select_prefix("plain", state))
        return self.biased_search.finish(row, select_prefix("hot", state), words)


def add_prefix(part: str, specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
    """Of one part of some state, under names that no other part has."""
    return {f"{part}.{name}": spec for name, spec in specs.items()}


def select_prefix(part: str, state: State) -> State:
    """The inverse: its tensors, under the names it gave them."""
    return {name.removeprefix(f"{part}."): each for name, each in state.items() if name.startswith(f"{part}.")}
