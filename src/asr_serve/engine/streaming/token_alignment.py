"""When the tokens of one session were said: what is kept of its frames until somebody wants to know.

Of each frame of a CTC head that is the blank and the likeliest tokens: what a search said was among these, or as
good as ruled out. A transducer says by itself at which frame it said a token, and nothing is kept.
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
"""Tokens of a frame, besides the blank."""
BLANK, REST, IDS = 0, 1, 2
"""Columns: the blank; every token that is not listed; then TOP ids, whole numbers that float32 holds; and their
log-probabilities."""
COLUMNS = IDS + 2 * TOP_K
MIN_PROBABILITY = 1e-10
"""All that is not listed has at least this probability together: whatever a search said can be aligned."""
MAX_FRAMES = 1 << 14
"""Of a session, that are kept. Pipelines ask for times long before; what was said in frames that had to go has
the frames of the search."""
MAX_ALIGNMENT_CELLS = 1 << 20
"""Frames times tokens that are aligned at once; more are parted where nothing was said for longest."""

Runs = list[tuple[int, int]]


class SavedAlignment(NamedTuple):
    """Of a saved session, besides its frames."""

    tokens: Annotated[list[SearchToken], msgspec.Meta(max_length=1 << 20)]
    runs: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=1 << 20)]
    first_frame: Annotated[int, msgspec.Meta(ge=0)]


def compact_posteriors(logprobs: Tensor, blank: int) -> np.ndarray:
    """Of (..., vocab) natural log-probabilities what is kept: (..., COLUMNS) float32, on the host."""
    others = logprobs.index_fill(-1, torch.tensor([blank], device=logprobs.device), -torch.inf)
    top, ids = others.topk(min(TOP_K, logprobs.shape[-1] - 1), -1)
    rest = 1 - top.exp().sum(-1) - logprobs[..., blank].exp()
    unlisted = max(1, logprobs.shape[-1] - 1 - top.shape[-1])
    made = torch.full((*logprobs.shape[:-1], COLUMNS), -torch.inf, device=logprobs.device)
    made[..., BLANK] = logprobs[..., blank]
    made[..., REST] = (rest.clamp(min=MIN_PROBABILITY) / unlisted).log()
    made[..., IDS : IDS + TOP_K] = -1.0
    made[..., IDS : IDS + top.shape[-1]] = ids.float()
    made[..., IDS + TOP_K : IDS + TOP_K + top.shape[-1]] = top
    return made.cpu().numpy()


class StreamTokenAligner:
    """Of one session. `tokens` are those that were fixed, from its start."""

    def __init__(self, kept: SavedAlignment | None = None, frames: BytesLike = b"", seen: int = 0) -> None:
        """`kept`, `frames`: of a session that was saved and had heard `seen` frames. Raises ValueError."""
        self._tokens, self._runs, self._first_frame = kept or SavedAlignment([], [], 0)
        count, odd = divmod(len(frames), 4 * COLUMNS)
        fits = count <= MAX_FRAMES and (not count or self._first_frame + count == seen)
        if odd or not fits or len(self._runs) > len(self._tokens):
            raise ValueError(
                f"{len(frames)} bytes of a saved session's frames from {self._first_frame} on, of {seen}"
            )
        self._frames = np.frombuffer(bytes(frames), np.float32).reshape(-1, COLUMNS)
        """From frame `_first` on."""
        self._pending_frames: list[np.ndarray] = []

    @property
    def saved(self) -> SavedAlignment:
        return SavedAlignment(self._tokens, self._runs, self._first_frame)

    @property
    def frames(self) -> np.ndarray:
        """(n, COLUMNS) float32."""
        if self._pending_frames:
            self._frames = np.concatenate([self._frames, *self._pending_frames])
            self._pending_frames = []
        return self._frames

    def append_step(self, tokens: Sequence[SearchToken], frames: np.ndarray | None) -> None:
        """What a step fixed; and its frames, of a CTC head."""
        self._tokens += tokens
        if frames is not None and len(frames):
            self._pending_frames.append(frames)
            if len(self._frames) + sum(map(len, self._pending_frames)) > MAX_FRAMES:
                self._drop_before(self._first_frame + len(self.frames) - MAX_FRAMES // 2)

    def token_runs(self, before: int | None = None) -> Runs:
        """Of every token so far the first of its frames and the one behind its last. `before`: at that frame
        something is said that is not fixed yet. What was told once does not change."""
        told = len(self._runs)
        tokens = self._tokens[told:]
        if tokens:
            self._runs += (
                self._align(tokens, before) if len(self.frames) else [(t.frame, t.frame + 1) for t in tokens]
            )
            self._drop_before(self._runs[-1][1])
        return self._runs

    def _align(self, tokens: Sequence[SearchToken], before: int | None) -> Runs:
        gone = sum(token.frame < self._first_frame for token in tokens)
        latest = self._first_frame + len(self.frames)
        latest = latest if before is None else max(self._first_frame, min(latest, before))
        return [(t.frame, t.frame + 1) for t in tokens[:gone]] + self._split_evenly(
            tokens[gone:], self._first_frame, latest
        )

    def _split_evenly(self, tokens: Sequence[SearchToken], first: int, behind: int) -> Runs:
        """Of tokens that were said from frame `first` on, before `behind`."""
        if len(tokens) > 1 and (behind - first) * len(tokens) > MAX_ALIGNMENT_CELLS:
            gaps = [after.frame - token.frame for token, after in pairwise(tokens)]
            inner = range(len(gaps) // 4, len(gaps) - len(gaps) // 4)
            at = max(inner, key=gaps.__getitem__)
            cut = tokens[at].frame + (gaps[at] + 1) // 2
            return self._split_evenly(tokens[: at + 1], first, cut) + self._split_evenly(
                tokens[at + 1 :], cut, behind
            )
        heard, ids = (
            self.frames[first - self._first_frame : behind - self._first_frame],
            [token.id for token in tokens],
        )
        try:
            spans = align_columns(heard[:, BLANK], _token_logprobs(heard, ids), ids).spans
        except ValueError:  # a search may move what it says to where it could not be said
            return [(token.frame, token.frame + 1) for token in tokens]
        return [(first + start, first + end) for start, end in spans]

    def _drop_before(self, frame: int) -> None:
        """What lies before it is not needed any more."""
        gone = min(max(0, frame - self._first_frame), len(self.frames))
        if gone:
            self._frames, self._first_frame = self.frames[gone:].copy(), self._first_frame + gone


def _token_logprobs(heard: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Of frames (n, COLUMNS) the natural log-probability of each token: (n, tokens)."""
    known, of = np.unique(np.asarray(ids, np.float32), return_inverse=True)
    labels = np.repeat(heard[:, REST : REST + 1], len(known), axis=1)
    if len(known):
        listed = heard[:, IDS : IDS + TOP_K]
        at = known.searchsorted(listed).clip(max=len(known) - 1)
        frames, places = (known[at] == listed).nonzero()
        labels[frames, at[frames, places]] = heard[frames, IDS + TOP_K + places]
    return labels[:, of]
