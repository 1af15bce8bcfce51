"""Aligner of the tokens of one session. It stores compact posteriors until token times are requested.

For each frame of a CTC head these are the log-probabilities of the blank and of the most likely tokens: every emitted
token was among them, or had almost no probability. A transducer returns the frame of each token itself, and nothing is
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.ctc_alignment import align_columns
from asr_serve.engine.session_snapshot import BytesLike
from asr_serve.types import SearchToken

TOP_K = 8
"""Tokens stored per frame, besides the blank."""
BLANK, REST, IDS = 0, 1, 2
"""Columns: log-probability of the blank; that of each unlisted token; TOP_K ids, which float32 represents exactly; and
their TOP_K log-probabilities."""
COLUMNS = IDS + 2 * TOP_K
MIN_PROBABILITY = 1e-10
"""Minimum probability of all unlisted tokens together, so that any token sequence can be aligned."""
MAX_FRAMES = 1 << 14
"""Maximum stored frames of a session. Pipelines request times long before; tokens in dropped frames get the frames
of the search."""
MAX_ALIGNMENT_CELLS = 1 << 20
"""Maximum frames times tokens of one alignment; longer ones are split at the longest gap between tokens."""

Runs = list[tuple[int, int]]


class SavedAlignment(NamedTuple):
    """Aligner of a saved session, without its frames."""

    tokens: Annotated[list[SearchToken], msgspec.Meta(max_length=1 << 20)]
    runs: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=1 << 20)]
    first_frame: Annotated[int, msgspec.Meta(ge=0)]


def compact_posteriors(logprobs: Tensor, blank: int) -> np.ndarray:
    """Compacts natural log-probabilities (..., vocab) to (..., COLUMNS) float32 in host memory."""
    others = logprobs.index_fill(-1, torch.tensor([blank], device=logprobs.device), -torch.inf)
    top, ids = others.topk(min(TOP_K, logprobs.shape[-1] - 1), -1)
    rest = 1 - top.exp().sum(-1) - logprobs[..., blank].exp()
    unlisted = max(1, logprobs.shape[-1] - 1 - top.shape[-1])
    columns = torch.full((*logprobs.shape[:-1], COLUMNS), -torch.inf, device=logprobs.device)
    columns[..., BLANK] = logprobs[..., blank]
    columns[..., REST] = (rest.clamp(min=MIN_PROBABILITY) / unlisted).log()
    columns[..., IDS : IDS + TOP_K] = -1.0
    columns[..., IDS : IDS + top.shape[-1]] = ids.float()
    columns[..., IDS + TOP_K : IDS + TOP_K + top.shape[-1]] = top
    return columns.cpu().numpy()


class StreamTokenAligner:
    """Aligner of one session. `tokens`: all tokens fixed since its start."""

    def __init__(self, saved: SavedAlignment | None = None, frames: BytesLike = b"", seen: int = 0) -> None:
        """`saved`, `frames`: of a saved session that had processed `seen` frames. Raises ValueError."""
        self._tokens, self._runs, self._first_frame = saved or SavedAlignment([], [], 0)
        count, remainder = divmod(len(frames), 4 * COLUMNS)
        fits = count <= MAX_FRAMES and (not count or self._first_frame + count == seen)
        if remainder or not fits or len(self._runs) > len(self._tokens):
            raise ValueError(f"{len(frames)} bytes of a saved session's frames from {self._first_frame} on, of {seen}")
        self._frames = np.frombuffer(bytes(frames), np.float32).reshape(-1, COLUMNS)
        """Frames from `_first_frame` on."""
        self._pending_frames: list[np.ndarray] = []

    @property
    def saved(self) -> SavedAlignment:
        return SavedAlignment(self._tokens, self._runs, self._first_frame)

    @property
    def frames(self) -> np.ndarray:
        """(n, COLUMNS) float32: all stored frames."""
        if self._pending_frames:
            self._frames = np.concatenate([self._frames, *self._pending_frames])
            self._pending_frames = []
        return self._frames

    def append_step(self, tokens: Sequence[SearchToken], frames: np.ndarray | None) -> None:
        """Adds the tokens that a step fixed, and its frames where the head is CTC."""
        self._tokens += tokens
        if frames is not None and len(frames):
            self._pending_frames.append(frames)
            if len(self._frames) + sum(map(len, self._pending_frames)) > MAX_FRAMES:
                self._drop_before(self._first_frame + len(self.frames) - MAX_FRAMES // 2)

    def token_runs(self, before: int | None = None) -> Runs:
        """Returns the first and the end frame of every token so far, which do not change later. `before`: frame of the
        first token that is not fixed yet."""
        timed = len(self._runs)
        tokens = self._tokens[timed:]
        if tokens:
            self._runs += self._align(tokens, before) if len(self.frames) else [searched_run(t) for t in tokens]
            self._drop_before(self._runs[-1][1])
        return self._runs

    def _align(self, tokens: Sequence[SearchToken], before: int | None) -> Runs:
        dropped = sum(token.frame < self._first_frame for token in tokens)
        latest = self._first_frame + len(self.frames)
        latest = latest if before is None else max(self._first_frame, min(latest, before))
        aligned = self._align_spans(tokens[dropped:], self._first_frame, latest)
        return [searched_run(token) for token in tokens[:dropped]] + aligned

    def _align_spans(self, tokens: Sequence[SearchToken], first: int, behind: int) -> Runs:
        """Aligns tokens within frames `first` to `behind`, in two parts where the alignment would be too large."""
        if len(tokens) > 1 and (behind - first) * len(tokens) > MAX_ALIGNMENT_CELLS:
            gaps = [after.frame - token.frame for token, after in pairwise(tokens)]
            inner = range(len(gaps) // 4, len(gaps) - len(gaps) // 4)
            longest = max(inner, key=gaps.__getitem__)
            cut = tokens[longest].frame + (gaps[longest] + 1) // 2
            before = self._align_spans(tokens[: longest + 1], first, cut)
            return before + self._align_spans(tokens[longest + 1 :], cut, behind)
        frames = self.frames[first - self._first_frame : behind - self._first_frame]
        ids = [token.id for token in tokens]
        try:
            spans = align_columns(frames[:, BLANK], _token_logprobs(frames, ids), ids).spans
        except ValueError:  # a search may report tokens in frames too few to contain them
            return [searched_run(token) for token in tokens]
        return [(first + start, first + end) for start, end in spans]

    def _drop_before(self, frame: int) -> None:
        """Drops the stored frames before `frame`."""
        dropped = min(max(0, frame - self._first_frame), len(self.frames))
        if dropped:
            self._frames, self._first_frame = self.frames[dropped:].copy(), self._first_frame + dropped


def searched_run(token: SearchToken) -> tuple[int, int]:
    """First and end frame of a token as its search found them."""
    return token.frame, token.frame + 1 if token.end_frame is None else max(token.end_frame, token.frame + 1)


def _token_logprobs(posteriors: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Natural log-probability of each token in each frame (n, COLUMNS): (n, tokens)."""
    distinct, inverse = np.unique(np.asarray(ids, np.float32), return_inverse=True)
    labels = np.repeat(posteriors[:, REST : REST + 1], len(distinct), axis=1)
    if len(distinct):
        listed = posteriors[:, IDS : IDS + TOP_K]
        nearest = distinct.searchsorted(listed).clip(max=len(distinct) - 1)
        frames, columns = (distinct[nearest] == listed).nonzero()
        labels[frames, nearest[frames, columns]] = posteriors[frames, IDS + TOP_K + columns]
    return labels[:, inverse]
