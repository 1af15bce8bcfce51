"""Repetition penalty: tokens that an answer already has become less likely, in the rows of a batch that ask for it.

Source: CTRL, arXiv:1909.05858, section 4.1; tests/models/test_fun_asr.py compares with transformers' generate, which
counts tokens of the answer alone where a prompt is embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PenalizedPosition(NamedTuple):
    """Logit position of a pass: tokens of the answer before it, and the penalty."""

    tokens: Sequence[int]
    penalty: float


class PenalizedLogits:
    """Logits of the penalized positions of one pass, in float32: a penalty moves them further than the rounding that
    near ties are decided by. Those of the pass stay as they are."""

    def __init__(self, logits: Tensor, positions: Mapping[int, PenalizedPosition]) -> None:
        """`logits`: (positions, vocabulary) of the pass."""
        self._rows = {position: row for row, position in enumerate(positions)}
        self._logits = logits[:0].float()
        if not positions:
            return
        device = logits.device
        self._logits = logits[torch.tensor(list(positions), device=device)].float()
        seen = [
            (row, token, each.penalty)
            for row, each in enumerate(positions.values())
            for token in dict.fromkeys(each.tokens)
        ]
        if not seen:
            return
        rows, tokens, penalties = zip(*seen, strict=True)
        index = torch.tensor(rows, device=device), torch.tensor(tokens, device=device)
        values, factors = self._logits[index], torch.tensor(penalties, device=device)
        self._logits[index] = torch.where(values > 0, values / factors, values * factors)

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def row(self, position: int, logits: Tensor) -> Tensor:
        """Logits (vocabulary,) at a position: penalized, or as in `logits`, those of the pass."""
        row = self._rows.get(position)
        return logits[position] if row is None else self._logits[row]

    def rows(self, positions: Sequence[int]) -> Tensor:
        """Logits (n, vocabulary) float32 of penalized positions."""
        return self._logits[[self._rows[position] for position in positions]]

    def choose(self, tokens: list[int], logprobs: list[float]) -> None:
        """Replaces the likeliest token of each penalized position, and its natural-log probability."""
        if not self._rows:
            return
        best = self._logits.max(dim=1)
        found = (best.values - self._logits.logsumexp(dim=1)).tolist()
        for (position, _), token, logprob in zip(self._rows.items(), best.indices.tolist(), found, strict=True):
            tokens[position], logprobs[position] = token, logprob
