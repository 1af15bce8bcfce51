"""CTC forced alignment in numpy: the oracle of `align.cpp`, and its fallback.

Both add the same doubles in the same order and break ties in the same way, so that their results are equal.
"""

from __future__ import annotations

import math

import numpy as np

NONE = -math.inf
STAY, ONE, TWO = 0, 1, 2
"""Transitions into a state: from itself, from the one before, past a blank."""


def align(blank: np.ndarray, labels: np.ndarray, repeats: np.ndarray) -> tuple[list[tuple[int, int]], float]:
    """Returns the likeliest path through blanks and tokens: the first frame of each token and the one behind its
    last, and the path's log-probability.

    blank (frames,) and labels (frames, tokens) float32: natural log-probabilities of the blank, and of each token
    in turn. repeats (tokens,) bool: the token is the same as the one before, and needs a blank between. Ties are
    resolved for the path that stays longest in its state, read from the end. Raises ValueError for shapes that do
    not fit, and where there are too few frames for all tokens.
    """
    if blank.ndim != 1 or labels.ndim != 2 or len(labels) != len(blank) or labels.shape[1:] != repeats.shape:
        raise ValueError("blank (frames,), labels (frames, tokens) and repeats (tokens,)")
    frames, tokens = labels.shape
    states = 2 * tokens + 1
    emissions = np.empty((frames, states))
    emissions[:, ::2], emissions[:, 1::2] = blank[:, None], labels
    emissions[~np.isfinite(emissions)] = NONE
    skips = np.zeros(states, bool)
    skips[3::2] = ~repeats[1:].astype(bool)
    best = np.full(states, NONE)
    if frames:
        best[:2] = emissions[0, :2]
    back = np.zeros((frames, states), np.uint8)
    for frame in range(1, frames):
        from_one = np.concatenate([[NONE], best])[:states]
        from_two = np.where(skips, np.concatenate([[NONE, NONE], best])[:states], NONE)
        back[frame] = np.where(from_one > best, ONE, STAY)
        best = np.maximum(best, from_one)
        back[frame] = np.where(from_two > best, TWO, back[frame])
        best = np.maximum(best, from_two) + emissions[frame]
    state = states - 1
    if tokens and frames and best[-2] > best[-1]:
        state -= 1
    score = float(best[state]) if frames else 0.0
    if score == NONE or (tokens and not frames):
        raise ValueError(f"{tokens} tokens cannot be said in {frames} frames")
    first, behind = [0] * tokens, [0] * tokens
    for frame in reversed(range(frames)):
        if state % 2:
            token = state // 2
            behind[token] = behind[token] or frame + 1
            first[token] = frame
        state -= int(back[frame, state])
    return list(zip(first, behind, strict=True)), score
