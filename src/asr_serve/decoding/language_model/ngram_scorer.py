"""Queries of an n-gram model for all hypotheses of a search at once, on any device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr_serve.models.ngram import NgramModel


class NgramScorer:
    """TokenScorer over an n-gram model.

    A query looks a token up in all contexts at once, from the longest to none, by one binary search among all arcs:
    shapes do not depend on the words, nothing is read back, and a CUDA graph records it.
    """

    def __init__(self, model: NgramModel, device: torch.device | str = "cpu") -> None:
        self.model = model

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.initial_state, self.state_count = model.start_state, model.states
        self._most = int(model.arc_words.max(initial=-1)) + 1
        """A word beyond all: -1 and this stand for any that the model lacks."""
        sources = np.repeat(np.arange(model.states), np.diff(model.arc_offsets))
        self._keys = self._key(on_device(sources), on_device(model.arc_words.astype(np.int64)))
        """(arcs,) int64, rising: state and word of each arc."""
        self._states, self._logprobs = on_device(model.arc_states), on_device(model.arc_logprobs)
        self._backoff_states = on_device(model.backoff_states.clip(min=0))
        self._backoff_logprobs = on_device(model.backoff_logprobs)
        self._final_logprobs = on_device(model.final_logprobs)
        self._contexts = longest_backoff(model) + 1
        if not len(self._keys):  # a model of no words is still searched
            self._keys, self._states = self._keys.new_full((1,), -1), self._states.new_zeros(1)
            self._logprobs = self._logprobs.new_zeros(1)

    def score(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Natural-log probabilities (float64) of `tokens` (int64) in `states` (int64), all of one shape, and the
        states after them. A token that the model lacks has -inf and leads to state 0."""
        contexts, weights = [states], [torch.zeros_like(states, dtype=torch.float64)]
        for _ in range(self._contexts - 1):
            weights.append(weights[-1] + self._backoff_logprobs[contexts[-1]])
            contexts.append(self._backoff_states[contexts[-1]].long())
        wanted = self._key(torch.stack(contexts), tokens)
        arcs = torch.searchsorted(self._keys, wanted).clamp(max=len(self._keys) - 1)
        found = (self._keys[arcs] == wanted).to(torch.uint8)
        seen, longest = found.max(0, keepdim=True)
        arc, weight = arcs.gather(0, longest)[0], torch.stack(weights).gather(0, longest)[0]
        known = seen[0] > 0
        logprobs = torch.where(known, weight + self._logprobs[arc], -math.inf)
        return logprobs, torch.where(known, self._states[arc], 0).long()

    def final_logprobs(self, states: Tensor) -> Tensor:
        """Natural-log probabilities (float64) that the sentence ends in `states` (int64)."""
        return self._final_logprobs[states].double()

    def _key(self, states: Tensor, words: Tensor) -> Tensor:
        return states * (self._most + 2) + words.clamp(-1, self._most) + 1


def longest_backoff(model: NgramModel) -> int:
    """Back-offs from the longest context to the empty one: the order of the model less one."""
    reached, count = torch.from_numpy(model.backoff_states).long(), 0
    while bool((reached >= 0).any()):
        count += 1
        reached = torch.where(reached > 0, torch.from_numpy(model.backoff_states).long()[reached.clamp(min=0)], -1)
    return count
