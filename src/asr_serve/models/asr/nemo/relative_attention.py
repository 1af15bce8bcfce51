"""Attention that knows how far it looks: what a query finds at each distance, beside what it finds in each frame.

Source  Dai et al. 2019, Transformer-XL (arXiv:1901.02860), appendix B.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def distances(width: int, left: int, steps: int) -> Tensor:
    """Sines and cosines of the distances from a frame to those it may see, (left + 2 * steps - 1, width): from the
    last of `steps` frames back to `left` frames before the first, on to the first that looks at the last."""
    far = torch.arange(left + steps - 1, -steps, -1, dtype=torch.float64)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = far[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


class RelativePositionKeys(NamedTuple):
    """Of one layer, by distance as `distances` has them."""

    keys: Tensor
    """(heads, head_dim, distances)."""
    constant: Tensor
    """(heads, 1, distances): what every query finds there."""

    def steps(self, left: int) -> int:
        return (self.keys.shape[2] - left + 1) // 2

    def cut(self, steps: int, left: int) -> RelativePositionKeys:
        """For fewer steps."""
        begin = self.steps(left) - steps
        end = begin + left + 2 * steps - 1
        return RelativePositionKeys(self.keys[:, :, begin:end], self.constant[:, :, begin:end])

    def bias(self, q: Tensor, left: int) -> Tensor:
        """What queries (n, steps, heads, head_dim) find at the place of each key: (n, heads, steps, left + steps),
        whose first `left` keys are those before the first query."""
        n, steps, heads, head_dim = q.shape
        by_distance = torch.baddbmm(self.constant, q.permute(2, 0, 1, 3).reshape(heads, -1, head_dim), self.keys)
        # A query that is one later has every key one further away: a row begins one column further left.
        row = by_distance.shape[2]
        return by_distance.as_strided(
            (n, heads, steps, left + steps), (steps * row, n * steps * row, row - 1, 1), steps - 1
        )
