"""Dynamic time warping in numpy: the oracle of `native/src/dtw.cpp`, and its stand-in where that was not built."""

from __future__ import annotations

import numpy as np


def first_frames(cost: np.ndarray) -> np.ndarray:
    """Where each row of `cost` (rows, frames) float32 begins on the cheapest way from its first corner to its
    last: (rows,) int64, never falling. A step goes one row on, one frame on, or both; where either costs the same
    both are taken, or else the row. Raises ValueError where there is nothing to go through.

    Source: Sakoe and Chiba 1978.
    """
    if cost.ndim != 2 or not cost.size:
        raise ValueError(f"cost {cost.shape}: (rows, frames), one of each at least")
    rows, frames = cost.shape
    way = np.full((rows + 1, frames + 1), np.inf)
    way[0, 0] = 0.0
    for row in range(1, rows + 1):
        for frame in range(1, frames + 1):
            before = min(way[row - 1, frame - 1], way[row - 1, frame], way[row, frame - 1])
            way[row, frame] = before + float(cost[row - 1, frame - 1])
    found = np.zeros(rows, np.int64)
    row, frame = rows, frames
    while row > 0:
        both, up, along = way[row - 1, frame - 1], way[row - 1, frame], way[row, frame - 1]
        found[row - 1] = frame - 1
        if both <= up and both <= along:
            row, frame = row - 1, frame - 1
        elif up <= along:
            row -= 1
        else:
            frame -= 1
    return found
