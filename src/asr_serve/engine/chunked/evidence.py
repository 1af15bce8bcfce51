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

from asr_serve.decoding.align import align_columns
from asr_serve.engine.saved import Part
from asr_serve.types import Token

TOP = 8
"""Tokens of a frame, besides the blank."""
BLANK, REST, IDS = 0, 1, 2
"""Columns: the blank; every token that is not listed; then TOP ids, whole numbers that float32 holds; and their
log-probabilities."""
COLUMNS = IDS + 2 * TOP
LEAST = 1e-10
"""All that is not listed has at least this probability together: whatever a search said can be aligned."""
MOST_FRAMES = 1 << 14
"""Of a session, that are kept. Pipelines ask for times long before; what was said in frames that had to go has
the frames of the search."""
MOST_CELLS = 1 << 20
"""Frames times tokens that are aligned at once; more are parted where nothing was said for longest."""

Runs = list[tuple[int, int]]


class Kept(NamedTuple):
    """Of a saved session, besides its frames."""

    tokens: Annotated[list[Token], msgspec.Meta(max_length=1 << 20)]
    runs: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=1 << 20)]
    first: Annotated[int, msgspec.Meta(ge=0)]


def columns(logprobs: Tensor, blank: int) -> np.ndarray:
    """Of (..., vocab) natural log-probabilities what is kept: (..., COLUMNS) float32, on the host."""
    others = logprobs.index_fill(-1, torch.tensor([blank], device=logprobs.device), -torch.inf)
    top, ids = others.topk(min(TOP, logprobs.shape[-1] - 1), -1)
    rest = 1 - top.exp().sum(-1) - logprobs[..., blank].exp()
    unlisted = max(1, logprobs.shape[-1] - 1 - top.shape[-1])
    made = torch.full((*logprobs.shape[:-1], COLUMNS), -torch.inf, device=logprobs.device)
    made[..., BLANK] = logprobs[..., blank]
    made[..., REST] = (rest.clamp(min=LEAST) / unlisted).log()
    made[..., IDS : IDS + TOP] = -1.0
    made[..., IDS : IDS + top.shape[-1]] = ids.float()
    made[..., IDS + TOP : IDS + TOP + top.shape[-1]] = top
    return made.cpu().numpy()


class Evidence:
    """Of one session. `tokens` are those that were fixed, from its start."""

    def __init__(self, kept: Kept | None = None, frames: Part = b"", seen: int = 0) -> None:
        """`kept`, `frames`: of a session that was saved and had heard `seen` frames. Raises ValueError."""
        self._tokens, self._runs, self._first = kept or Kept([], [], 0)
        count, odd = divmod(len(frames), 4 * COLUMNS)
        fits = count <= MOST_FRAMES and (not count or self._first + count == seen)
        if odd or not fits or len(self._runs) > len(self._tokens):
            raise ValueError(f"{len(frames)} bytes of a saved session's frames from {self._first} on, of {seen}")
        self._frames = np.frombuffer(bytes(frames), np.float32).reshape(-1, COLUMNS)
        """From frame `_first` on."""
        self._new: list[np.ndarray] = []

    @property
    def kept(self) -> Kept:
        return Kept(self._tokens, self._runs, self._first)

    @property
    def frames(self) -> np.ndarray:
        """(n, COLUMNS) float32."""
        if self._new:
            self._frames = np.concatenate([self._frames, *self._new])
            self._new = []
        return self._frames

    def hear(self, tokens: Sequence[Token], frames: np.ndarray | None) -> None:
        """What a step fixed; and its frames, of a CTC head."""
        self._tokens += tokens
        if frames is not None and len(frames):
            self._new.append(frames)
            if len(self._frames) + sum(map(len, self._new)) > MOST_FRAMES:
                self._drop(self._first + len(self.frames) - MOST_FRAMES // 2)

    def runs(self, before: int | None = None) -> Runs:
        """Of every token so far the first of its frames and the one behind its last. `before`: at that frame
        something is said that is not fixed yet. What was told once does not change."""
        told = len(self._runs)
        tokens = self._tokens[told:]
        if tokens:
            self._runs += (
                self._align(tokens, before) if len(self.frames) else [(t.frame, t.frame + 1) for t in tokens]
            )
            self._drop(self._runs[-1][1])
        return self._runs

    def _align(self, tokens: Sequence[Token], before: int | None) -> Runs:
        gone = sum(token.frame < self._first for token in tokens)
        latest = self._first + len(self.frames)
        latest = latest if before is None else max(self._first, min(latest, before))
        return [(t.frame, t.frame + 1) for t in tokens[:gone]] + self._parted(tokens[gone:], self._first, latest)

    def _parted(self, tokens: Sequence[Token], first: int, behind: int) -> Runs:
        """Of tokens that were said from frame `first` on, before `behind`."""
        if len(tokens) > 1 and (behind - first) * len(tokens) > MOST_CELLS:
            gaps = [after.frame - token.frame for token, after in pairwise(tokens)]
            inner = range(len(gaps) // 4, len(gaps) - len(gaps) // 4)
            at = max(inner, key=gaps.__getitem__)
            cut = tokens[at].frame + (gaps[at] + 1) // 2
            return self._parted(tokens[: at + 1], first, cut) + self._parted(tokens[at + 1 :], cut, behind)
        heard, ids = self.frames[first - self._first : behind - self._first], [token.id for token in tokens]
        try:
            spans = align_columns(heard[:, BLANK], _labels(heard, ids), ids).spans
        except ValueError:  # a search may move what it says to where it could not be said
            return [(token.frame, token.frame + 1) for token in tokens]
        return [(first + start, first + end) for start, end in spans]

    def _drop(self, frame: int) -> None:
        """What lies before it is not needed any more."""
        gone = min(max(0, frame - self._first), len(self.frames))
        if gone:
            self._frames, self._first = self.frames[gone:].copy(), self._first + gone


def _labels(heard: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Of frames (n, COLUMNS) the natural log-probability of each token: (n, tokens)."""
    known, of = np.unique(np.asarray(ids, np.float32), return_inverse=True)
    labels = np.repeat(heard[:, REST : REST + 1], len(known), axis=1)
    if len(known):
        listed = heard[:, IDS : IDS + TOP]
        at = known.searchsorted(listed).clip(max=len(known) - 1)
        frames, places = (known[at] == listed).nonzero()
        labels[frames, at[frames, places]] = heard[frames, IDS + TOP + places]
    return labels[:, of]
