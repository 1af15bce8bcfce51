"""How batches lie in memory: frames of several clips end to end, keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.kernels import PAGE


class PagedKeyValues(NamedTuple):
    """Keys and values of many rows, in pages of 16 positions that the engine owns and lends for a step.

    pool (pages, layers, 2, heads, head_dim * 16); tables (rows, width) int32: row r's pages in order;
    lengths (rows,) int64: positions of row r that hold something.
    """

    pool: Tensor
    block_tables: Tensor
    lengths: Tensor

    def expand_rows(self, packing: PackedBatch) -> PagedKeyValues:
        """Of rows that have as many positions as `packing` says, the same for each position; what fills a batch up
        has the first row's."""
        counts = torch.tensor(packing.frames)
        index = torch.arange(len(counts)).repeat_interleave(counts)
        index = F.pad(index, (0, packing.total - len(index))).to(self.block_tables.device)
        return PagedKeyValues(self.pool, self.block_tables[index], self.lengths[index])

    def keys(self, layer: int, heads: Sequence[int], row: int, positions: int) -> Tensor:
        """Of a row's first `positions`, as `heads` of that layer have them: (heads, head_dim, positions)."""
        held, slots = self.pool[:, layer, 0], self.pool.shape[-1] // PAGE
        pages = self.block_tables[row, : -(-positions // PAGE)].long()
        wanted = torch.tensor(heads, device=held.device)
        found = held[pages[:, None], wanted].view(len(pages), len(heads), slots, PAGE)
        return found.permute(1, 2, 0, 3).reshape(len(heads), slots, -1)[..., :positions]

    def attention_scores(
        self,
        layer: int,
        heads: Sequence[int],
        query: Tensor,
        packing: PackedBatch,
        positions: Sequence[int],
        scale: float,
    ) -> list[Tensor]:
        """Of each row (heads, packing.frames[row], positions[row]) float32: products of queries (total, all heads,
        head_dim) and keys, times `scale`."""
        found = []
        rows = zip(packing.offsets, packing.frames, positions, strict=True)
        for row, (offset, count, held) in enumerate(rows):
            asked = query[offset : offset + count, list(heads)].transpose(0, 1)
            found.append((asked.float() @ self.keys(layer, heads, row, held).float()) * scale)
        return found


class PackedBatch:
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


def pack_clips(frames: list[int], block: int) -> PackedBatch:
    """Fill the clips up to a multiple of `block`: the fewer shapes there are, the less is compiled."""
    return PackedBatch(frames, -(-sum(frames) // block) * block)


def tap_matrix(weight: Tensor) -> Tensor:
    """Convolution weight (out, in, taps) as a matrix over windows in time order."""
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)


def packed_buffer(packing: PackedBatch, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(packing.total, width), for what is to be computed with."""
    made = torch.empty(packing.total, width, dtype=dtype, device=device)
    made[sum(packing.frames) :] = 0  # numbers, not whatever lay there
    return made
