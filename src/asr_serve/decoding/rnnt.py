"""Greedy search of transducers, RNN-T and TDT, over many sessions at once.

Label looping: the outer loop goes from one token of every session to the next, at whatever frame of the chunk each
session is; the inner loop skips blanks. The predictor, which costs most, thus runs once for each token, batched
over the sessions that still have one in this chunk. The joint network evaluates several frames ahead where few
sessions run, since most frames are blank.

Source  label looping: arXiv:2406.06220; TDT: arXiv:2304.06795; tokens and frames are those of NeMo's greedy
        batched search, tests/decoding/generate_rnnt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.errors import OptionError
from asr_serve.models.interfaces import (
    NBestHypothesis,
    SearchResult,
    SearchToken,
    State,
    StateSpec,
    StreamingChunk,
    Transducer,
)

AHEAD = 64
"""Frames, of all sessions together, that one call of the joint network evaluates speculatively: with few rows,
reading its weights costs more than the arithmetic."""
BEGUN = "begun"
PREDICTED = "predicted"
SCORE = "score"
SKIP = "skip"
KEY = "key"
LENGTH = "length"
TAIL = ("token", "frame", "logprob")
RESERVED = {BEGUN, PREDICTED, SCORE, SKIP, KEY, LENGTH, *TAIL, "spot", "gain", "language_state"}
"""State names reserved for searches; all others are the predictor's."""


class PredictorStart(NamedTuple):
    """Initial predictor state of every session: its output and memory after the blank."""

    predicted: Tensor
    """(1, width)."""
    memory: dict[str, Tensor]
    """(1, *shape) by name."""


@torch.inference_mode()
def start_predictor(model: Transducer, device: torch.device) -> PredictorStart:
    fresh = {
        name: torch.full((1, *spec.shape), spec.initial_value or 0.0, dtype=spec.dtype, device=device)
        for name, spec in model.predictor_state_specs().items()
    }
    assert not fresh.keys() & RESERVED, "a predictor's memory has a name that a search has"
    return PredictorStart(*model.predict(torch.tensor([model.blank_id], device=device), fresh))


def load_rows(state: State, rows: Tensor, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a step's rows, (n, *shape) by name; `fresh` (1, *shape) for a session that has not begun."""
    begun = state[BEGUN][rows] == 1
    return {
        name: torch.where(begun.view(-1, *[1] * (first.dim() - 1)), state[name][rows], first)
        for name, first in fresh.items()
    }


def save_rows(state: State, rows: Tensor, own: Mapping[str, Tensor]) -> None:
    """Inverse of `load_rows`; marks these sessions as begun."""
    for name, values in own.items():
        state[name].index_copy_(0, rows, values)
    state[BEGUN].index_fill_(0, rows, 1)


def validate_max_symbols(max_symbols: int) -> None:
    if max_symbols < 1:
        raise OptionError(f"max_symbols={max_symbols}", "1 or more", param="max_symbols")


class _Best(NamedTuple):
    """Likeliest token or blank at some frames, and its duration. Each (m,)."""

    token: Tensor
    logprob: Tensor
    """Log-probability of the token among all tokens, float32."""
    frames: Tensor
    """Frames to advance by: at least 1 after a blank."""
    score: Tensor
    """Log-probability of token and duration."""


@dataclass
class _GreedyStep:
    """Working state of a step: n rows."""

    projected: Tensor
    """(n, frames, joint width)."""
    first: Tensor
    """(n,) int64: absolute frame of the chunk's first, as in StreamingChunk.start_frames."""
    limit: Tensor
    """(n,) int64: frames in the chunk."""
    at: Tensor
    """(n,) int64: next frame of the chunk to evaluate."""
    symbols: Tensor
    """(n,) int64: tokens emitted at that frame."""
    score: Tensor
    """(n,) float64."""
    predicted: Tensor
    memory: dict[str, Tensor]
    token: Tensor
    """(n,) int64: found at frame `at`, not emitted yet."""
    logprob: Tensor
    lasts: Tensor
    """(n,) int64: frames to advance by once it is emitted."""
    said: list[Tensor] = field(default_factory=list)
    """Each (4, k) float64: row, token, absolute frame, log-probability."""


class TransducerGreedy:
    """Greedy `StreamingSearch`: the likeliest token or blank of each frame in turn, fixed at once.

    At most `max_symbols` tokens are emitted at one frame; then the search advances to the next. TDT: the likeliest
    token and the likeliest duration, independently; a blank of duration 0 counts as 1 frame.

    State   the predictor's memory and its last output; frames to skip that lie past the chunk's end (TDT);
            log-probability of the path so far. A chunk ends between two frames, so that the number of tokens
            emitted at a frame need not be saved.
    """

    def __init__(self, model: Transducer, max_symbols: int = 10, device: torch.device | str = "cpu") -> None:
        """`device`: device of the state. Raises OptionError."""
        validate_max_symbols(max_symbols)
        self.model, self.max_symbols = model, max_symbols
        device = torch.device(device)
        first = start_predictor(model, device)
        self._fresh = {
            **first.memory,
            PREDICTED: first.predicted,
            SCORE: torch.zeros(1, dtype=torch.float64, device=device),
            SKIP: torch.zeros(1, dtype=torch.int64, device=device),
        }
        self._memory = tuple(first.memory)
        self._durations = torch.tensor(model.durations, dtype=torch.int64, device=device)
        self._longest = max(1, *model.durations) if model.durations else 1

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            BEGUN: StateSpec((), torch.int64),
            **{name: StateSpec(tuple(tensor.shape[1:]), tensor.dtype, None) for name, tensor in self._fresh.items()},
        }

    @torch.inference_mode()
    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        own = load_rows(state, chunk.rows, self._fresh)
        nothing = torch.zeros_like(chunk.rows)
        work = _GreedyStep(
            projected=self.model.project_encoder(hidden),
            first=chunk.start_frames,
            limit=chunk.frames,
            at=own[SKIP],
            symbols=nothing.clone(),
            score=own[SCORE],
            predicted=own[PREDICTED],
            memory={name: own[name] for name in self._memory},
            token=nothing.clone(),
            logprob=torch.zeros_like(own[SCORE]),
            lasts=nothing.clone(),
        )
        running = (work.at < work.limit).nonzero().squeeze(1)
        while len(running):
            self._seek(work, running)
            running = running[work.at[running] < work.limit[running]]
            if len(running):
                self._say(work, running)
                if self.model.durations:
                    running = running[work.at[running] < work.limit[running]]
        own[SKIP] = (work.at - work.limit).clamp(min=0)
        save_rows(state, chunk.rows, own)
        return _read(work.said, len(chunk.rows))

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        begun = int(state[BEGUN][row]) == 1
        return [NBestHypothesis([], float(state[SCORE][row]) if begun else 0.0)]

    def _seek(self, work: _GreedyStep, rows: Tensor) -> None:
        """Advances `rows` to the frame of their next token, or past the chunk's end."""
        while len(rows):
            ahead = max(1, min(work.projected.shape[1], AHEAD // len(rows)))
            steps = torch.arange(ahead + self._longest, device=rows.device)
            at = work.at[rows, None] + steps[:ahead]
            inside = at < work.limit[rows, None]
            projected = work.projected[rows[:, None], at.clamp(max=work.projected.shape[1] - 1)].flatten(0, 1)
            best = _Best(
                *(
                    tensor.view(-1, ahead)
                    for tensor in self._best(projected, work.predicted[rows].repeat_interleave(ahead, 0))
                )
            )
            # Pointer jumping along blanks: each iteration doubles the distance covered.
            blank = inside & (best.token == self.model.blank_id)
            to = steps.repeat(len(rows), 1)
            to[:, :ahead] += torch.where(blank, best.frames, 0)
            score = work.score.new_zeros(to.shape)
            score[:, :ahead] = torch.where(blank, best.score.double(), 0.0)
            for _ in range((ahead - 1).bit_length()):
                score = score + score.gather(1, to)
                to = to.gather(1, to)
            moved = to[:, 0]
            work.at[rows] += moved
            work.symbols[rows] = torch.where(moved > 0, 0, work.symbols[rows])
            last = moved.clamp(max=ahead - 1)[:, None]
            token, logprob, frames, total = (tensor.gather(1, last).squeeze(1) for tensor in best)
            work.token[rows], work.lasts[rows] = token, frames
            work.logprob[rows] = logprob.double()
            has_token = (moved < ahead) & (work.at[rows] < work.limit[rows])
            work.score[rows] += score[:, 0] + torch.where(has_token, total.double(), 0.0)
            rows = rows[~has_token & (work.at[rows] < work.limit[rows])]

    def _say(self, work: _GreedyStep, rows: Tensor) -> None:
        """Emits the token found in each of `rows`, and advances by its duration."""
        token = work.token[rows]
        work.said.append(
            torch.stack([rows.double(), token.double(), (work.first + work.at)[rows].double(), work.logprob[rows]])
        )
        predicted, memory = self.model.predict(token, {name: tensor[rows] for name, tensor in work.memory.items()})
        work.predicted[rows] = predicted
        for name, tensor in memory.items():
            work.memory[name][rows] = tensor
        symbols = work.symbols[rows] + 1
        lasts = torch.where(symbols < self.max_symbols, work.lasts[rows], work.lasts[rows].clamp(min=1))
        work.at[rows] += lasts
        work.symbols[rows] = torch.where(lasts > 0, 0, symbols)

    def _best(self, projected: Tensor, predicted: Tensor) -> _Best:
        logits = self.model.joint(projected, predicted)
        tokens, durations = logits[:, : self.model.vocab_size], logits[:, self.model.vocab_size :]
        top, token = tokens.max(-1)
        logprob = top - tokens.logsumexp(-1)
        blank = token == self.model.blank_id
        if not self.model.durations:
            return _Best(token, logprob, blank.long(), logprob)
        top, index = durations.max(-1)
        frames = self._durations[index]
        frames = torch.where(blank, frames.clamp(min=1), frames)
        return _Best(token, logprob, frames, logprob + (top - durations.logsumexp(-1)))


def _read(said: list[Tensor], sessions: int) -> list[SearchResult]:
    """Copies all results to the host at once."""
    results = [SearchResult([], []) for _ in range(sessions)]
    if said:
        for row, token, frame, logprob in torch.cat(said, 1).T.tolist():
            results[int(row)].fixed_tokens.append(SearchToken(int(token), int(frame), logprob))
    return results
