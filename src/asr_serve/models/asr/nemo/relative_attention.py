"""Relative position scores of attention: a term for the distance between query and key, beside the content term.

Source  Dai et al. 2019, Transformer-XL (arXiv:1901.02860), appendix B.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def distances(width: int, left: int, steps: int) -> Tensor:
    """Returns sines and cosines of the distances from a frame to its visible keys, (left + 2 * steps - 1, width):
    from the last of `steps` frames back to `left` frames before the first, down to the first frame that attends to
    the last."""
    offsets = torch.arange(left + steps - 1, -steps, -1, dtype=torch.float64)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = offsets[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


class RelativePositionKeys(NamedTuple):
    """Projected position encodings of one layer, by distance in the order of `distances`."""

    keys: Tensor
    """(heads, head_dim, distances)."""
    constant: Tensor
    """(heads, 1, distances): the part of the score that is the same for every query."""

    def steps(self, left: int) -> int:
        return (self.keys.shape[2] - left + 1) // 2

    def cut(self, steps: int, left: int) -> RelativePositionKeys:
        """Returns the part for fewer steps."""
        begin = self.steps(left) - steps
        end = begin + left + 2 * steps - 1
        return RelativePositionKeys(self.keys[:, :, begin:end], self.constant[:, :, begin:end])

    def bias(self, q: Tensor, left: int) -> Tensor:
        """Computes position scores of queries (n, steps, heads, head_dim) at each key: (n, heads, steps, left +
        steps), whose first `left` keys are those before the first query."""
        n, steps, heads, head_dim = q.shape
        by_distance = torch.baddbmm(self.constant, q.permute(2, 0, 1, 3).reshape(heads, -1, head_dim), self.keys)
        # For the next query every key is one step further away: its row begins one column further left.
        row = by_distance.shape[2]
        return by_distance.as_strided(
            (n, heads, steps, left + steps), (steps * row, n * steps * row, row - 1, 1), steps - 1
        )
