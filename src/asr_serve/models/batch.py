"""How batches lie in memory: frames of several clips end to end, keys and values in pages."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Paged(NamedTuple):
    """Keys and values of many rows, in pages of 16 positions that the engine owns and lends for a step.

    pool (pages, layers, 2, heads, head_dim * 16); tables (rows, width) int32: row r's pages in order;
    lengths (rows,) int64: positions of row r that hold something.
    """

    pool: Tensor
    tables: Tensor
    lengths: Tensor


class Packing:
    """Clips of `frames[i]` frames, end to end from `offsets[i]`, filled up to `total`."""

    def __init__(self, frames: list[int], total: int) -> None:
        self.frames, self.total = frames, total
        self.offsets = [0, *accumulate(frames)][:-1]
        self._positions: Tensor | None = None

    def positions(self, device: torch.device) -> Tensor:
        """(total,) int64: every frame's place in its own clip; 0 past the last clip."""
        if self._positions is None:
            within = [torch.arange(n) for n in self.frames]
            filler = torch.zeros(self.total - sum(self.frames), dtype=torch.int64)
            self._positions = torch.cat([*within, filler]).to(device)
        return self._positions


def pack(frames: list[int], block: int) -> Packing:
    """Fill the clips up to a multiple of `block`: the fewer shapes there are, the less is compiled."""
    return Packing(frames, -(-sum(frames) // block) * block)


def tap_matrix(weight: Tensor) -> Tensor:
    """Convolution weight (out, in, taps) as a matrix over windows in time order."""
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)


def buffer(packing: Packing, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(packing.total, width), for what is to be computed with."""
    made = torch.empty(packing.total, width, dtype=dtype, device=device)
    made[sum(packing.frames) :] = 0  # numbers, not whatever lay there
    return made
