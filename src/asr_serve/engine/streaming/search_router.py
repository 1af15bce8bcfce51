"""Streaming search for a batch in which some sessions have hot words: those run through a beam search with
biasing, grouped by list, the others through the configured search, unaffected by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.models.interfaces import NBestHypothesis, SearchResult, State, StateSpec, StreamingChunk, StreamingSearch


class BiasedBeamSearch(Protocol):
    """A search that applies hot words: CtcPrefixBeam and TransducerBeam, made with a boost."""

    def state_specs(self) -> dict[str, StateSpec]: ...
    def step(
        self, hidden: Tensor, chunk: StreamingChunk, state: State, words: StreamingBiasingList | None
    ) -> list[SearchResult]: ...
    def finish(self, row: int, state: State, words: StreamingBiasingList | None) -> list[NBestHypothesis]: ...


class BiasingSearchRouter:
    """Router of sessions to the plain or the biased search; see models/interfaces.StreamingSearch. `set_biasing`
    chooses a session's search before its first step, and again when a saved session continues."""

    def __init__(self, plain: StreamingSearch, biased: BiasedBeamSearch) -> None:
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
        results: list[SearchResult] = [SearchResult([], [])] * len(hidden)
        for words, indices in groups.items():
            selected = torch.tensor(indices, device=hidden.device)
            subset = StreamingChunk(*(result[selected.to(result.device)] for result in chunk))
            if words is None:
                group_results = self.plain_search.step(hidden[selected], subset, select_prefix("plain", state))
            else:
                group_results = self.biased_search.step(hidden[selected], subset, select_prefix("hot", state), words)
            for index, result in zip(indices, group_results, strict=True):
                results[index] = result
        return results

    def _group_by_biasing(self, rows: list[int]) -> dict[StreamingBiasingList | None, list[int]]:
        """Indices in the step by hot words; empty where no session has any."""
        groups: dict[StreamingBiasingList | None, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(self._biasing_by_row.get(row), []).append(index)
        return groups if groups.keys() != {None} else {}

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        words = self._biasing_by_row.get(row)
        if words is None:
            return self.plain_search.finish(row, select_prefix("plain", state))
        return self.biased_search.finish(row, select_prefix("hot", state), words)


def add_prefix(part: str, specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
    """State specs of one search, under names that no other search has."""
    return {f"{part}.{name}": spec for name, spec in specs.items()}


def select_prefix(part: str, state: State) -> State:
    """Tensors of one search, under the names of its own specs; the inverse of `add_prefix`."""
    return {name.removeprefix(f"{part}."): tensor for name, tensor in state.items() if name.startswith(f"{part}.")}
