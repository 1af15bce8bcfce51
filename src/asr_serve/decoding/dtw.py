"""Token times from cross-attention: the cheapest monotonic path of the tokens through the frames they attend to.

Source  dynamic time warping over smoothed cross-attention of chosen heads: openai-whisper's timing, for
        arXiv:2212.04356
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from asr_serve import kernels

LEAST = 1e-3
"""Attention far below this counts as none."""


def first_frames(cost: np.ndarray) -> np.ndarray:
    """Returns (rows,) int64: the frame at which each row of `cost` (rows, frames) float32 begins on the cheapest
    path, see kernels/dtw_reference. Raises ValueError for an empty `cost`."""
    frames: np.ndarray = kernels.dtw().first_frames(np.ascontiguousarray(cost, np.float32))
    return frames


def costs(scores: Tensor) -> Tensor:
    """Returns the cost of each token in each frame: low where many heads attend, never negative.

    On development speech this found the starts of words better than Whisper's normalization of each frame over
    tokens: where no head attends, that amplifies values near zero.

    In      scores (heads, tokens, frames) float32: scaled products of queries and keys, before softmax
    Out     (tokens, frames) float32
    """
    mean = torch.zeros_like(scores[0])
    for heads in torch.chunk(scores, len(scores) if scores.is_cpu else 1):  # one head fits into cache, many do not
        mean += smoothed(torch.softmax(heads, dim=2)).sum(dim=0)
    mean /= len(scores)
    return math.log1p(LEAST) - torch.log(mean + LEAST)


def smoothed(x: Tensor) -> Tensor:
    """Median of each number of the last axis and its two neighbours; the first and the last count their only
    neighbour twice."""
    if x.shape[-1] < 2:
        return x
    low, high = torch.minimum(x[..., :-1], x[..., 1:]), torch.maximum(x[..., :-1], x[..., 1:])
    median = torch.empty_like(x)
    median[..., 0], median[..., -1] = x[..., 1], x[..., -2]
    median[..., 1:-1] = torch.maximum(low[..., :-1], torch.minimum(high[..., :-1], x[..., 2:]))
    return median
