"""When each token was said, from where a decoder looked while it said it: the cheapest way through its attention.

Source  dynamic time warping over normalised, smoothed cross-attention of chosen heads: openai-whisper's
        timing, for arXiv:2212.04356; dynamic time warping: Sakoe and Chiba 1978
"""

from __future__ import annotations

import numpy as np

MEDIAN_FRAMES = 7
"""Width of the filter that smooths each token's attention over frames."""
FLOOR = 1e-6
"""Below this attention is as good as the same for every token."""


def looked(scores: np.ndarray) -> np.ndarray:
    """Attention as one picture, higher where a token is likelier to have been said.

    In      scores (heads, tokens, frames) float32: scaled products of queries and keys, before softmax
    Out     (tokens, frames) float32
    """
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    # A frame that every token looks at says nothing about any of them.
    weights -= weights.mean(axis=1, keepdims=True)
    weights /= np.maximum(weights.std(axis=1, keepdims=True), FLOOR)
    mean: np.ndarray = smoothed(weights, MEDIAN_FRAMES).mean(axis=0)
    return mean


def smoothed(x: np.ndarray, width: int) -> np.ndarray:
    """The median of the `width` numbers around each one of the last axis, mirrored at its ends; as it is where it
    is no longer than half of that."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    median: np.ndarray = np.partition(windows, half, axis=-1)[..., half]
    return median


def first_frames(cost: np.ndarray) -> np.ndarray:
    """Where each row of `cost` (rows, frames) begins on the cheapest way from its first corner to its last: (rows,)
    int64, never falling. A step goes one row on, one frame on, or both; of ways that cost the same it takes both
    first, then the row.
    """
    rows, frames = cost.shape
    way = np.empty((rows, frames))
    sums = np.cumsum(cost, axis=1, dtype=np.float64)
    way[0] = sums[0]
    for row in range(1, rows):
        # From the row above straight or across; then along the row, as far as that is cheaper.
        above = way[row - 1].copy()
        np.minimum(above[1:], way[row - 1, :-1], out=above[1:])
        before = sums[row] - cost[row]
        way[row] = np.minimum.accumulate(above - before) + sums[row]
    found = np.zeros(rows, np.int64)
    row, frame = rows - 1, frames - 1
    while row > 0:
        across = way[row - 1, frame - 1] if frame else np.inf
        up, along = way[row - 1, frame], way[row, frame - 1] if frame else np.inf
        if across <= up and across <= along:
            found[row] = frame
            row, frame = row - 1, frame - 1
        elif up <= along:
            found[row] = frame
            row -= 1
        else:
            frame -= 1
    return found
