"""CTC forced alignment: the frames of each token, given the token sequence.

Viterbi through the tokens and the blanks between them. Only the columns of the blank and of the tokens themselves
are read.

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
    """First frame of each token's run, and the one behind its last."""
    logprob: float
    """Natural-log probability of the whole path."""


def repeats(tokens: Sequence[int]) -> np.ndarray:
    """(tokens,) bool: whether each is the same as the one before."""
    ids = np.asarray(tokens, np.int64)
    return np.concatenate([[False], ids[1:] == ids[:-1]])[: len(ids)]


def align_columns(blank: np.ndarray, labels: np.ndarray, tokens: Sequence[int]) -> CtcAlignment:
    """Aligns on the host, from columns: `blank` (frames,) and `labels` (frames, tokens) natural log-probabilities.
    Raises ValueError where there are too few frames for the tokens."""
    columns = (np.ascontiguousarray(column, np.float32) for column in (blank, labels))
    return CtcAlignment(*kernels.align().align(*columns, repeats(tokens)))


def align(logprobs: Tensor, frames: Sequence[int], tokens: Sequence[Sequence[int]], blank: int) -> list[CtcAlignment]:
    """Aligns `tokens[i]` to the first `frames[i]` frames of row i of `logprobs` (n, frames, vocab), natural
    log-probabilities. On a GPU all rows are aligned together. Raises ValueError as `align_columns` does."""
    if not logprobs.is_cpu:
        return _align_batch(logprobs, frames, tokens, blank)
    alignments = []
    for row, count, sequence in zip(logprobs, frames, tokens, strict=True):
        valid = row[:count]
        alignments.append(align_columns(valid[:, blank].numpy(), valid[:, list(sequence)].numpy(), sequence))
    return alignments


@torch.inference_mode()
def _align_batch(
    logprobs: Tensor, frames: Sequence[int], tokens: Sequence[Sequence[int]], blank: int
) -> list[CtcAlignment]:
    """Same results as kernels/ctc_alignment_reference, frame after frame, for all rows and states at once."""
    n, most, _ = logprobs.shape
    device, longest = logprobs.device, max((len(sequence) for sequence in tokens), default=0)
    states = 2 * longest + 1
    ids = torch.full((n, states), blank)
    skips = torch.zeros(n, states, dtype=torch.bool)
    for row, sequence in enumerate(tokens):
        ids[row, 1 : 2 * len(sequence) : 2] = torch.tensor(sequence, dtype=torch.int64)
        skips[row, 3 : 2 * len(sequence) : 2] = torch.from_numpy(~repeats(sequence)[1:])
    ids, skips = ids.to(device), skips.to(device)
    counts, ends = (
        torch.tensor(frames, device=device),
        torch.tensor([2 * len(sequence) for sequence in tokens], device=device),
    )
    best = torch.full((n, states), NONE, dtype=torch.float64, device=device)
    back = torch.zeros(most, n, states, dtype=torch.uint8, device=device)
    for frame in range(most):
        emissions = logprobs[:, frame].gather(1, ids).double()
        emissions = torch.where(emissions.isfinite(), emissions, NONE)
        if frame == 0:
            best[:, :2] = emissions[:, :2]
            continue
        from_one = torch.nn.functional.pad(best, (1, 0), value=NONE)[:, :states]
        from_two = torch.nn.functional.pad(best, (2, 0), value=NONE)[:, :states].masked_fill(~skips, NONE)
        move = torch.where(from_one > best, ONE, STAY)
        reached = torch.maximum(best, from_one)
        move = torch.where(from_two > reached, TWO, move)
        running = (frame < counts)[:, None]
        best = torch.where(running, torch.maximum(reached, from_two) + emissions, best)
        back[frame] = torch.where(running, move, STAY)
    last = best.gather(1, ends[:, None])[:, 0]
    before = best.gather(1, (ends - 1).clamp(min=0)[:, None])[:, 0]
    state = torch.where((ends > 0) & (before > last), ends - 1, ends)
    path = torch.empty(most, n, dtype=torch.int64, device=device)
    for frame in reversed(range(most)):
        path[frame] = state
        state = state - back[frame].gather(1, state[:, None])[:, 0].long()
    scores, paths = torch.maximum(last, before).tolist(), path.T.cpu().numpy()
    alignments = []
    for row, (count, sequence) in enumerate(zip(frames, tokens, strict=True)):
        score = scores[row] if sequence else float(last[row])
        if not count:
            score = NONE if sequence else 0.0
        if score == NONE:
            raise ValueError(f"{len(sequence)} tokens cannot be said in {count} frames")
        alignments.append(CtcAlignment(_runs(paths[row, :count], len(sequence)), score))
    return alignments


def _runs(path: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Returns the first frame and the end of each token in a path of states."""
    own = 2 * np.arange(tokens) + 1
    first, behind = path.searchsorted(own, "left"), path.searchsorted(own, "right")
    return list(zip(first.tolist(), behind.tolist(), strict=True))
