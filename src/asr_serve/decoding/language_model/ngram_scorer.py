"""Queries of an n-gram model for all hypotheses of a search at once, on any device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr_serve.models.ngram import NgramModel


class NgramScorer:
    """TokenScorer over an n-gram model.

    A query is a binary search of fixed depth among a state's arcs, once for each length of context from the longest
    to none: shapes do not depend on the words, nothing is read back, and a CUDA graph records it.
    """

    def __init__(self, model: NgramModel, device: torch.device | str = "cpu") -> None:
        self.model = model

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.initial_state, self.state_count = model.start_state, model.states
        self._offsets = on_device(model.arc_offsets)
        self._words, self._states = on_device(model.arc_words), on_device(model.arc_states)
        self._logprobs = on_device(model.arc_logprobs)
        self._backoff_states, self._backoff_logprobs = (
            on_device(model.backoff_states),
            on_device(model.backoff_logprobs),
        )
        self._final_logprobs = on_device(model.final_logprobs)
        widest = int(self._offsets.diff().max()) if model.states else 0
        self._halvings = max(1, math.ceil(math.log2(widest + 1)))
        self._contexts = longest_backoff(model) + 1
        if not len(self._words):  # a model of no words is still searched
            self._words, self._states = self._words.new_full((1,), -1), self._states.new_zeros(1)
            self._logprobs = self._logprobs.new_zeros(1)

    def score(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Natural-log probabilities (float64) of `tokens` (int64) in `states` (int64), all of one shape, and the
        states after them. A token that the model lacks has -inf and leads to state 0."""
        logprobs = torch.zeros(states.shape, dtype=torch.float64, device=states.device)
        after, known = torch.zeros_like(states), torch.zeros_like(states, dtype=torch.bool)
        for _ in range(self._contexts):
            arc, found = self._find(states, tokens)
            new = found & ~known
            logprobs = torch.where(new, logprobs + self._logprobs[arc], logprobs)
            after = torch.where(new, self._states[arc].long(), after)
            known = known | found
            backed_off = torch.where(known, logprobs, logprobs + self._backoff_logprobs[states])
            logprobs = torch.where(states == 0, logprobs, backed_off)
            states = self._backoff_states[states].long().clamp(min=0)
        return torch.where(known, logprobs, -math.inf), after

    def final_logprobs(self, states: Tensor) -> Tensor:
        """Natural-log probabilities (float64) that the sentence ends in `states` (int64)."""
        return self._final_logprobs[states].double()

    def _find(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each token's arc in its state, and whether there is one."""
        low, end = self._offsets[states], self._offsets[states + 1]
        high = end
        for _ in range(self._halvings):
            middle = (low + high) >> 1
            below = (low < high) & (self._words[middle.clamp(max=len(self._words) - 1)] < tokens)
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        arc = low.clamp(max=len(self._words) - 1)
        return arc, (low < end) & (self._words[arc] == tokens)


def longest_backoff(model: NgramModel) -> int:
    """Back-offs from the longest context to the empty one: the order of the model less one."""
    reached, count = torch.from_numpy(model.backoff_states).long(), 0
    while bool((reached >= 0).any()):
        count += 1
        reached = torch.where(reached > 0, torch.from_numpy(model.backoff_states).long()[reached.clamp(min=0)], -1)
    return count
