"""Layout of batches in memory: frames of several clips end to end, keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.kernels import PAGE
from asr_serve.kernels.paging import split_int8_pool, split_pool


class PagedKeyValues(NamedTuple):
    """Keys and values of many rows, in pages of 16 positions that the engine owns and lends for a step.

    pool (pages, layers, 2, heads, head_dim * 16); block_tables (rows, width) int32: pages of row r in order;
    lengths (rows,) int64: filled positions of row r; int8: whether the pages hold 8 bits (kernels/paging), as those of
    cross-attention may.
    """

    pool: Tensor
    block_tables: Tensor
    lengths: Tensor
    int8: bool = False

    def attend(self, kernels: ModuleType, layer: int, q: Tensor, out: Tensor, scale: float) -> None:
        """Attention of each row's query to its positions: q, out (rows, heads * head_dim)."""
        attend = kernels.attend_int8 if self.int8 else kernels.attend
        attend(self.pool, layer, q, out, self.block_tables, self.lengths, scale)

    def expand_rows(self, packing: PackedBatch) -> PagedKeyValues:
        """Repeats each row for every position that it has in `packing`; padding at the end of the batch has the
        first row's pages."""
        counts = torch.tensor(packing.frames)
        index = torch.arange(len(counts)).repeat_interleave(counts)
        index = F.pad(index, (0, packing.total - len(index))).to(self.block_tables.device)
        return self._replace(block_tables=self.block_tables[index], lengths=self.lengths[index])

    def keys(self, layer: int, heads: Sequence[int], row: int, positions: int) -> Tensor:
        """Returns the keys of a row's first `positions` in `heads` of a layer: (heads, head_dim, positions)."""
        pages = self.block_tables[row, : -(-positions // PAGE)].long()
        selected = torch.tensor(heads, dtype=torch.int64, device=self.pool.device)
        if self.int8:
            integers, scales, _, _ = split_int8_pool(self.pool, layer)
            paged = integers[pages[:, None], selected] * scales[pages[:, None], selected][:, :, None]
        else:
            paged = split_pool(self.pool, layer)[0][pages[:, None], selected]
        return paged.permute(1, 2, 0, 3).flatten(2)[..., :positions]

    def attention_scores(
        self,
        layer: int,
        heads: Sequence[int],
        query: Tensor,
        packing: PackedBatch,
        positions: Sequence[int],
        scale: float,
    ) -> list[Tensor]:
        """Returns for each row (heads, packing.frames[row], positions[row]) float32: products of queries (total,
        all heads, head_dim) and keys, times `scale`."""
        scores = []
        rows = zip(packing.offsets, packing.frames, positions, strict=True)
        for row, (offset, count, length) in enumerate(rows):
            query_rows = query[offset : offset + count, list(heads)].transpose(0, 1)
            scores.append((query_rows.float() @ self.keys(layer, heads, row, length).float()) * scale)
        return scores


class PackedBatch:
    """Clips of `frames[i]` frames, end to end from `offsets[i]`, padded to `total`."""

    def __init__(self, frames: list[int], total: int) -> None:
        self.frames, self.total = frames, total
        self.offsets = [0, *accumulate(frames)][:-1]
        self._positions: Tensor | None = None
        self._boundaries: Tensor | None = None

    def positions(self, device: torch.device) -> Tensor:
        """Returns (total,) int64: the position of every frame in its own clip; 0 past the last clip."""
        if self._positions is None:
            within = [torch.arange(n) for n in self.frames]
            filler = torch.zeros(self.total - sum(self.frames), dtype=torch.int64)
            self._positions = torch.cat([*within, filler]).to(device)
        return self._positions

    def boundaries(self, device: torch.device) -> Tensor:
        """Returns int32 offsets at which clips begin, and the end of the last one; padding counts as a clip."""
        if self._boundaries is None:
            ends = [*self.offsets, sum(self.frames)]
            self._boundaries = torch.tensor(ends if ends[-1] == self.total else [*ends, self.total], dtype=torch.int32)
            self._boundaries = self._boundaries.to(device)
        return self._boundaries


def pack_clips(frames: list[int], block: int) -> PackedBatch:
    """Packs clips and pads them to a multiple of `block`: fewer shapes mean fewer compilations."""
    return PackedBatch(frames, -(-sum(frames) // block) * block)


def tap_matrix(weight: Tensor) -> Tensor:
    """Converts a convolution weight (out, in, taps) to a matrix over windows in time order."""
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)


def packed_buffer(packing: PackedBatch, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialized buffer (packing.total, width) whose padding is zero."""
    buffer = torch.empty(packing.total, width, dtype=dtype, device=device)
    buffer[sum(packing.frames) :] = 0  # padding is computed with: it must be finite
    return buffer
