"""CTC forced alignment: at which frames were these tokens said, if they were?

Viterbi through the tokens and the blanks between them. Only the columns of the blank and of the tokens themselves
are looked at.

Source  CTC: Graves et al. 2006; alignment of known text with it: ctc-segmentation, arXiv:2007.09127;
        tests/decoding/generate_align.py compares with that package
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve import kernels
from asr_serve.kernels.ctc_alignment_reference import NONE, ONE, STAY, TWO


class CtcAlignment(NamedTuple):
    spans: list[tuple[int, int]]
    """Of each token the first frame of its run, and the one behind its last."""
    logprob: float
    """Of the whole path; natural log."""


def repeats(tokens: Sequence[int]) -> np.ndarray:
    """(tokens,) bool: which are the same as the one before."""
    ids = np.asarray(tokens, np.int64)
    return np.concatenate([[False], ids[1:] == ids[:-1]])[: len(ids)]


def align_columns(blank: np.ndarray, labels: np.ndarray, tokens: Sequence[int]) -> CtcAlignment:
    """On the host, from columns: `blank` (frames,) and `labels` (frames, tokens) natural log-probabilities. Raises
    ValueError where there are too few frames to say all tokens."""
    heard = (np.ascontiguousarray(each, np.float32) for each in (blank, labels))
    return CtcAlignment(*kernels.align().align(*heard, repeats(tokens)))


def align(
    logprobs: Tensor, frames: Sequence[int], tokens: Sequence[Sequence[int]], blank: int
) -> list[CtcAlignment]:
    """`logprobs` (n, frames, vocab) natural log-probabilities; of row i the first `frames[i]` say `tokens[i]`. On
    a GPU all rows go through it together. Raises ValueError as `align_columns` does."""
    if not logprobs.is_cpu:
        return _align_batch(logprobs, frames, tokens, blank)
    found = []
    for row, count, said in zip(logprobs, frames, tokens, strict=True):
        heard = row[:count]
        found.append(align_columns(heard[:, blank].numpy(), heard[:, list(said)].numpy(), said))
    return found


@torch.inference_mode()
def _align_batch(
    logprobs: Tensor, frames: Sequence[int], tokens: Sequence[Sequence[int]], blank: int
) -> list[CtcAlignment]:
    """The answers of kernels/ctc_alignment_reference, frame after frame, all rows and states at once."""
    n, most, _ = logprobs.shape
    where, longest = logprobs.device, max((len(said) for said in tokens), default=0)
    states = 2 * longest + 1
    ids = torch.full((n, states), blank)
    skips = torch.zeros(n, states, dtype=torch.bool)
    for row, said in enumerate(tokens):
        ids[row, 1 : 2 * len(said) : 2] = torch.tensor(said, dtype=torch.int64)
        skips[row, 3 : 2 * len(said) : 2] = torch.from_numpy(~repeats(said)[1:])
    ids, skips = ids.to(where), skips.to(where)
    counts, ends = torch.tensor(frames, device=where), torch.tensor([2 * len(s) for s in tokens], device=where)
    best = torch.full((n, states), NONE, dtype=torch.float64, device=where)
    back = torch.zeros(most, n, states, dtype=torch.uint8, device=where)
    for frame in range(most):
        heard = logprobs[:, frame].gather(1, ids).double()
        heard = torch.where(heard.isfinite(), heard, NONE)
        if frame == 0:
            best[:, :2] = heard[:, :2]
            continue
        one = torch.nn.functional.pad(best, (1, 0), value=NONE)[:, :states]
        two = torch.nn.functional.pad(best, (2, 0), value=NONE)[:, :states].masked_fill(~skips, NONE)
        how = torch.where(one > best, ONE, STAY)
        reached = torch.maximum(best, one)
        how = torch.where(two > reached, TWO, how)
        going = (frame < counts)[:, None]
        best = torch.where(going, torch.maximum(reached, two) + heard, best)
        back[frame] = torch.where(going, how, STAY)
    last = best.gather(1, ends[:, None])[:, 0]
    before = best.gather(1, (ends - 1).clamp(min=0)[:, None])[:, 0]
    state = torch.where((ends > 0) & (before > last), ends - 1, ends)
    path = torch.empty(most, n, dtype=torch.int64, device=where)
    for frame in reversed(range(most)):
        path[frame] = state
        state = state - back[frame].gather(1, state[:, None])[:, 0].long()
    scores, paths = torch.maximum(last, before).tolist(), path.T.cpu().numpy()
    found = []
    for row, (count, said) in enumerate(zip(frames, tokens, strict=True)):
        score = scores[row] if said else float(last[row])
        if not count:
            score = NONE if said else 0.0
        if score == NONE:
            raise ValueError(f"{len(said)} tokens cannot be said in {count} frames")
        found.append(CtcAlignment(_runs(paths[row, :count], len(said)), score))
    return found


def _runs(path: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Where each token begins and ends in a path of states."""
    own = 2 * np.arange(tokens) + 1
    first, behind = path.searchsorted(own, "left"), path.searchsorted(own, "right")
    return list(zip(first.tolist(), behind.tolist(), strict=True))
