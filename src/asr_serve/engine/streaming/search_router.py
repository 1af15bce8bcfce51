"""Streaming search for a batch in which some sessions have hotwords or a language model.

Those run through a beam search that applies both, grouped by list and model; the others run through the configured
search, whose results they do not change. A language model's weight is each session's own, and makes no groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.language_model.scorer import LanguageModelFusion, TokenScorer
from asr_serve.models.interfaces import (
    NBestHypothesis,
    RowValidatingSearch,
    SearchResult,
    State,
    StateSpec,
    StreamingChunk,
    StreamingSearch,
)


class BiasedBeamSearch(Protocol):
    """Beam search with hotwords and a language model: CtcPrefixBeam, BatchedCtcPrefixBeam and TransducerBeam, which
    were built for both."""

    def state_specs(self) -> dict[str, StateSpec]: ...
    def step(
        self,
        hidden: Tensor,
        chunk: StreamingChunk,
        state: State,
        words: StreamingBiasingList | None,
        fusion: LanguageModelFusion | None,
        weights: Tensor | None,
    ) -> list[SearchResult]: ...
    def finish(
        self, row: int, state: State, words: StreamingBiasingList | None, fusion: LanguageModelFusion | None
    ) -> list[NBestHypothesis]: ...
    def validate_row(
        self, row: int, state: State, words: StreamingBiasingList | None, fusion: LanguageModelFusion | None
    ) -> None: ...


class _Biasing(NamedTuple):
    """Hotwords and language model of a session: one of them at least, or neither."""

    words: StreamingBiasingList | None
    fusion: LanguageModelFusion | None


_NEITHER = _Biasing(None, None)


class _Group(NamedTuple):
    """Hotwords and language model of the sessions that one call searches; weights of the model may differ."""

    words: StreamingBiasingList | None
    scorer: TokenScorer | None


_UNBIASED = _Group(None, None)


class BiasingSearchRouter:
    """Router of sessions to the plain or the biased search; see models/interfaces.StreamingSearch. `set_biasing`
    chooses a session's search before its first step, and again when a saved session continues."""

    def __init__(self, plain: StreamingSearch, biased: BiasedBeamSearch) -> None:
        self.plain_search, self.biased_search = plain, biased
        self._biasing_by_row: dict[int, _Biasing] = {}

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            **add_prefix("plain", self.plain_search.state_specs()),
            **add_prefix("hot", self.biased_search.state_specs()),
        }

    def set_biasing(
        self, row: int, words: StreamingBiasingList | None, fusion: LanguageModelFusion | None = None
    ) -> None:
        if words is None and fusion is None:
            self._biasing_by_row.pop(row, None)
        else:
            self._biasing_by_row[row] = _Biasing(words, fusion)

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        # Rows are read from the device only where a session has hotwords or a language model.
        rows: list[int] = chunk.rows.tolist() if self._biasing_by_row else []
        sessions = [self._biasing_by_row.get(row, _NEITHER) for row in rows]
        groups = _group_by_biasing(sessions)
        if groups.keys() <= {_UNBIASED}:
            return self.plain_search.step(hidden, chunk, select_prefix("plain", state))
        results: list[SearchResult] = [SearchResult([], [])] * len(hidden)
        for indices in groups.values():
            selected = torch.tensor(indices, device=hidden.device)
            subset = StreamingChunk(*(tensor[selected.to(tensor.device)] for tensor in chunk))
            words, fusion = sessions[indices[0]]
            if words is None and fusion is None:
                group_results = self.plain_search.step(hidden[selected], subset, select_prefix("plain", state))
            else:
                fusions = [fusion for index in indices if (fusion := sessions[index].fusion) is not None]
                weights = torch.tensor([each.weight for each in fusions], dtype=torch.float64) if fusions else None
                group_results = self.biased_search.step(
                    hidden[selected], subset, select_prefix("hot", state), words, fusion, weights
                )
            for index, result in zip(indices, group_results, strict=True):
                results[index] = result
        return results

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        biasing = self._biasing_by_row.get(row)
        if biasing is None:
            return self.plain_search.finish(row, select_prefix("plain", state))
        return self.biased_search.finish(row, select_prefix("hot", state), *biasing)

    def validate_row(self, row: int, state: State) -> None:
        """Validates a row, see RowValidatingSearch, by the search that the session runs through. `set_biasing` must
        have chosen it."""
        biasing = self._biasing_by_row.get(row)
        if biasing is not None:
            self.biased_search.validate_row(row, select_prefix("hot", state), *biasing)
        elif isinstance(self.plain_search, RowValidatingSearch):
            self.plain_search.validate_row(row, select_prefix("plain", state))


def _group_by_biasing(sessions: Sequence[_Biasing]) -> dict[_Group, list[int]]:
    """Indices of the sessions by hotwords and language model."""
    groups: dict[_Group, list[int]] = {}
    for index, (words, fusion) in enumerate(sessions):
        groups.setdefault(_Group(words, None if fusion is None else fusion.scorer), []).append(index)
    return groups


def add_prefix(part: str, specs: Mapping[str, StateSpec]) -> dict[str, StateSpec]:
    """State specs of one search, under names that no other search has."""
    return {f"{part}.{name}": spec for name, spec in specs.items()}


def select_prefix(part: str, state: State) -> State:
    """State of one search, under the names of its own specs; the inverse of `add_prefix`."""
    return {name.removeprefix(f"{part}."): tensor for name, tensor in state.items() if name.startswith(f"{part}.")}
