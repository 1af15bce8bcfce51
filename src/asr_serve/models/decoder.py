"""What the engine lends a decoder at every step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Paged(NamedTuple):
    """Keys and values of many rows, in pages of 16 positions that the engine owns.

    pool (pages, layers, 2, heads, head_dim * 16); tables (rows, width) int32: row r's pages in order;
    lengths (rows,) int64: positions of row r that hold something.
    """

    pool: Tensor
    tables: Tensor
    lengths: Tensor
