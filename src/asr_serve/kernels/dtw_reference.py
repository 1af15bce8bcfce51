"""Dynamic time warping in numpy: the oracle of `src/dtw.cpp`, and its fallback."""

from __future__ import annotations

import numpy as np


def first_frames(cost: np.ndarray) -> np.ndarray:
    """Returns the frame at which each row of `cost` (rows, frames) float32 begins on the cheapest path from its
    first corner to its last: (rows,) int64, non-decreasing. A step advances by one row, one frame, or both; ties
    prefer both, then the row. Raises ValueError for an empty `cost`.

    Source: Sakoe and Chiba 1978.
    """
    if cost.ndim != 2 or not cost.size:
        raise ValueError(f"cost {cost.shape}: (rows, frames), one of each at least")
    rows, frames = cost.shape
    total = np.full((rows + 1, frames + 1), np.inf)
    total[0, 0] = 0.0
    for row in range(1, rows + 1):
        for frame in range(1, frames + 1):
            previous = min(total[row - 1, frame - 1], total[row - 1, frame], total[row, frame - 1])
            total[row, frame] = previous + float(cost[row - 1, frame - 1])
    starts = np.zeros(rows, np.int64)
    row, frame = rows, frames
    while row > 0:
        both, up, along = total[row - 1, frame - 1], total[row - 1, frame], total[row, frame - 1]
        starts[row - 1] = frame - 1
        if both <= up and both <= along:
            row, frame = row - 1, frame - 1
        elif up <= along:
            row -= 1
        else:
            frame -= 1
    return starts
