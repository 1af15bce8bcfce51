"""When each token was said, from where a decoder looked while it said it: the cheapest way through its attention.

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
"""Attention far below this is as good as none."""


def first_frames(cost: np.ndarray) -> np.ndarray:
    """Where each row of `cost` (rows, frames) float32 begins on the cheapest way through it: (rows,) int64, see
    kernels/dtw_reference. Raises ValueError where there is nothing to go through."""
    found: np.ndarray = kernels.dtw().first_frames(np.ascontiguousarray(cost, np.float32))
    return found


def costs(scores: Tensor) -> Tensor:
    """What it costs that a token was said in a frame: little where many heads look there, and never less than
    nothing.

    On development speech this found words' starts better than what Whisper does, to normalise each frame over
    tokens: where nobody looks, that makes much of what is next to nothing.

    In      scores (heads, tokens, frames) float32: scaled products of queries and keys, before softmax
    Out     (tokens, frames) float32
    """
    mean = torch.zeros_like(scores[0])
    for some in torch.chunk(scores, len(scores) if scores.is_cpu else 1):  # one head fits into cache, many do not
        mean += smoothed(torch.softmax(some, dim=2)).sum(dim=0)
    mean /= len(scores)
    return math.log1p(LEAST) - torch.log(mean + LEAST)


def smoothed(x: Tensor) -> Tensor:
    """The median of each number of the last axis and its two neighbours; the first and the last have the only one
    they have twice."""
    if x.shape[-1] < 2:
        return x
    low, high = torch.minimum(x[..., :-1], x[..., 1:]), torch.maximum(x[..., :-1], x[..., 1:])
    found = torch.empty_like(x)
    found[..., 0], found[..., -1] = x[..., 1], x[..., -2]
    found[..., 1:-1] = torch.maximum(low[..., :-1], torch.minimum(high[..., :-1], x[..., 2:]))
    return found
