"""CTC prefix beam search of many sessions as tensor operations of fixed shape, for any device.

One frame of all sessions is one sequence of operations whose shapes depend on the batch and the options alone, and
nothing is read back before the chunk ends: a CUDA graph records it. `decoding/ctc.py` has the same search in C++,
which is faster on a CPU and which the tests compare with. Fields of hypotheses are planes of few tensors, so that one
operation moves them all: on a GPU the number of operations is what a frame costs (decision 0031).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.decoding.biasing_graph import OPEN, WITHIN
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.captured_chunks import CapturedChunks
from asr_serve.decoding.ctc import CtcBeamOptions
from asr_serve.decoding.language_model.scorer import LanguageModelFusion, TokenScorer
from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken

MAX_TAIL_TOKENS = 1 << 10
MAX_CAPTURED_CONTEXTS = 8
"""Most contexts in which a hotword list looks a token up, where its search is captured; a list with more is rare."""
NONE = -math.inf

BLANK, NONBLANK, TOTAL, GAIN = range(4)
"""Planes of `ctc_scores`: log-probability of a hypothesis that ends in a blank, in its last token, and in either; bonus
of hotwords and language model. All are -inf where no hypothesis is."""
HASH, PARENT, LAST, LENGTH, BIASING_NODE, LANGUAGE_STATE = range(6)
"""Planes of `ctc_numbers`: hash of all tokens of a hypothesis, of all but the last, its last token (the vocabulary's
size where it has none), number of tokens after the fixed ones, node of the hotword graph, state of the language
model."""
TAIL_HASH, TOKEN, FRAME, PEAK, LOGPROB = range(5)
"""Planes of `ctc_tails`: hash of the prefix that ends in each token, the token, its frame, and bits of two float64: how
likely the hypothesis was then, and the token's log-probability."""

EMPTY_HASH, DROPPED_HASH, NO_PARENT_HASH = 1, 2, 3
MULTIPLIER = 6364136223846793005
_LATER = 1 << 62
_LEAST = -(1 << 63)
_NONE_BITS = int(np.float64(NONE).view(np.int64))


class BatchedCtcPrefixBeam:
    """Prefix beam search over a head `ctc`, of all sessions of a step at once.

    Out     As CtcPrefixBeam (decoding/ctc.py): the same hypotheses, scores, frames and ties.
    State   ctc_scores, ctc_numbers, ctc_tails on the model's device: the hypotheses, best first, each with its tokens
            after the fixed ones, at most `tail` of them. Where a hypothesis would have more, those that do not begin
            as the best one does are dropped, so that its oldest token is fixed. Prefixes are identified by hashes of
            64 bits: hypotheses merge where these are equal.
    Score   CTC log-probability, plus `boost` for hotwords, plus the language model's log-probabilities times their
            weight and `token_bonus` for each token of a session with a language model
    Raises  OptionError for options out of range
    Source  Hannun et al. 2014, arXiv:1408.2873; fusion of a language model as in its algorithm 1, added in logs
    """

    def __init__(
        self,
        model: StreamingModel,
        device: Device,
        options: CtcBeamOptions,
        *,
        tail: int = 64,
        boost: float | None = None,
        fuses: bool = False,
        token_bonus: float = 0.0,
    ) -> None:
        """`tail`: most tokens of a hypothesis that are not fixed. `boost` None: a search without hotwords. `fuses`:
        sessions may have a language model."""
        options.validate()
        if not 2 <= tail <= MAX_TAIL_TOKENS:
            raise OptionError(f"tail={tail}", f"2 to {MAX_TAIL_TOKENS}", param="tail")
        if not math.isfinite(token_bonus):
            raise OptionError(f"token_bonus={token_bonus}", "a finite number", param="token_bonus")
        self.model, self.options, self.tail = model, options, tail
        self.boost, self.fuses, self.token_bonus = boost, fuses, token_bonus
        self._device = device
        self._tables = _Tables.build(options, model.vocab_size, tail, device.torch_device)
        self._captured: dict[tuple[TokenScorer | None, int], CapturedChunks] = {}
        """Captured searches by language model and contexts of the hotwords."""
        self._biasing: WeakKeyDictionary[StreamingBiasingList, _BatchedBiasing] = WeakKeyDictionary()

    def state_specs(self) -> dict[str, StateSpec]:
        beam = self.options.beam
        return {
            "ctc_started": StateSpec((), torch.int64),
            "ctc_scores": StateSpec((GAIN + 1, beam), torch.float64, None),
            "ctc_numbers": StateSpec((LANGUAGE_STATE + 1, beam), torch.int64, None),
            "ctc_tails": StateSpec((LOGPROB + 1, beam, self.tail), torch.int64, None),
        }

    def step(
        self,
        hidden: Tensor,
        chunk: StreamingChunk,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
        weights: Tensor | None = None,
    ) -> list[SearchResult]:
        """`words`, `fusion`: hotwords and language model of all these sessions; a session has the same ones, or none,
        from its first step on. `weights` (n,) float64: of each session's language model, in place of that of
        `fusion`. Rows that were restored must have passed `validate_row`."""
        logprobs = self.model.ctc_logprobs(hidden)
        numbers, scores = self._advance(state, logprobs, chunk, words, fusion, weights)
        # One transfer of each: counts, tokens and frames of what was fixed and of the best hypothesis's tail.
        width = logprobs.shape[1] + self.tail
        results = []
        for row, logs in zip(numbers.tolist(), scores.tolist(), strict=True):
            fixed, length = row[:2]
            tokens, frames = row[2 : 2 + width], row[2 + width : 2 + 2 * width]
            tail_tokens, tail_frames = row[2 + 2 * width :][: self.tail], row[2 + 2 * width + self.tail :]
            results.append(
                SearchResult(
                    [SearchToken(*item) for item in zip(tokens[:fixed], frames, logs, strict=False)],
                    [SearchToken(*item) for item in zip(tail_tokens[:length], tail_frames, logs[width:], strict=False)],
                )
            )
        return results

    def finish(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> list[NBestHypothesis]:
        """N-best list, as StreamingSearch.finish."""
        if not int(state["ctc_started"][row]):
            return [NBestHypothesis([], 0.0, 0.0)]
        scores, saved, tails = (state[name][row].cpu() for name in ("ctc_scores", "ctc_numbers", "ctc_tails"))
        biasing = None if words is None else self._biasing_for(words)
        gains, live = scores[GAIN], scores[TOTAL] > NONE
        if biasing is not None:
            gains = gains - biasing.arrays.partial_bonuses.cpu()[saved[BIASING_NODE]]
        if fusion is not None:
            states = saved[LANGUAGE_STATE].to(self._device.torch_device)
            gains = gains + fusion.weight * fusion.scorer.final_logprobs(states).cpu()
        frames = _rising_frames(tails[FRAME], saved[LENGTH])
        logprobs = tails[LOGPROB].view(torch.float64)
        hypotheses = []
        for i in live.nonzero()[:, 0].tolist():
            length = int(saved[LENGTH, i])
            items = (each[:length].tolist() for each in (tails[TOKEN, i], frames[i], logprobs[i]))
            tokens = [SearchToken(*item) for item in zip(*items, strict=True)]
            hypotheses.append(NBestHypothesis(tokens, float(scores[TOTAL, i]), float(gains[i])))
        return sorted(hypotheses, key=lambda item: -(item.logprob + item.gain))

    def validate_row(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> None:
        """Raises ValueError as RowValidatingSearch.validate_row: for indices out of range, hotwords' and language
        model's included, and where no hypothesis is left."""
        started = int(state["ctc_started"][row])
        if not started:
            return
        scores, saved, tails = (state[name][row].cpu() for name in ("ctc_scores", "ctc_numbers", "ctc_tails"))
        vocab = self.model.vocab_size
        limits = {LAST: vocab + 1, LENGTH: self.tail}
        if words is not None:
            limits[BIASING_NODE] = len(words.arrays.fails)
        if fusion is not None:
            limits[LANGUAGE_STATE] = fusion.scorer.state_count
        within = [bool(((saved[plane] >= 0) & (saved[plane] < most)).all()) for plane, most in limits.items()]
        inside = torch.arange(self.tail) < saved[LENGTH, :, None]
        tokens = tails[TOKEN][inside]
        within.append(bool(((tokens >= 0) & (tokens < vocab)).all()))
        if started != 1 or not all(within) or not bool((scores[TOTAL] > NONE).any()):
            raise ValueError("a saved row of the search is corrupt")

    # --- one chunk -------------------------------------------------------------------------------------

    def _advance(
        self,
        state: State,
        logprobs: Tensor,
        chunk: StreamingChunk,
        words: StreamingBiasingList | None,
        fusion: LanguageModelFusion | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        assert fusion is None or self.fuses, "a language model for a search that fuses none"
        biasing = None if words is None else self._biasing_for(words)
        scorer, contexts = (None if fusion is None else fusion.scorer), (0 if biasing is None else biasing.contexts)
        more = [] if biasing is None else [*biasing.arrays]
        if fusion is not None:
            by_row = torch.zeros(len(state["ctc_started"]), dtype=torch.float64, device=logprobs.device)
            by_row[chunk.rows] = fusion.weight if weights is None else weights.to(by_row.device)
            more.append(by_row)
        function = partial(self._advance_chunk, scorer, contexts)
        if contexts > MAX_CAPTURED_CONTEXTS:
            return function(state, logprobs, chunk.rows, chunk.start_frames, chunk.frames, *more)
        if (scorer, contexts) not in self._captured:
            self._captured[scorer, contexts] = CapturedChunks(self._device, function)
        return self._captured[scorer, contexts](state, logprobs, chunk, *more)

    def _biasing_for(self, words: StreamingBiasingList) -> _BatchedBiasing:
        assert self.boost is not None, "hotwords for a search that knows none"
        if words not in self._biasing:
            self._biasing[words] = _BatchedBiasing.compile(words, self.boost, self._device.torch_device)
        return self._biasing[words]

    def _advance_chunk(
        self,
        scorer: TokenScorer | None,
        contexts: int,
        state: State,
        logprobs: Tensor,
        rows: Tensor,
        start_frames: Tensor,
        frames: Tensor,
        *more: Tensor,
    ) -> tuple[Tensor, ...]:
        """Search the frames of a chunk and update the sessions' rows. A ChunkFunction after its first two arguments.

        `contexts`: of the hotwords, 0 without any. `more`: _BiasingArrays, then the language model's weight by
        row of the state (slots + 1,); of what is not there nothing.

        Returns: numbers (n, 2 + 2 * (width + tail) + 2 * tail) int64: count of fixed tokens, length of the best tail,
        fixed tokens, their frames, tail's tokens, its frames; log-probabilities (n, width + 2 * tail) float64 of fixed
        and tail tokens.
        """
        biasing = _BiasingArrays(*more[: len(_BiasingArrays._fields)]) if contexts else None
        fusion = None if scorer is None else (scorer, more[-1][rows][:, None, None])
        beams = self._load(state, rows, scorer)
        logprobs = torch.where(torch.isfinite(logprobs), logprobs, NONE).double()
        choices = self._choices(logprobs)
        # A hypothesis without a token reads the log-probability of a column that no token has.
        logprobs = F.pad(logprobs, (0, 1), value=NONE)
        nothing = torch.zeros_like(beams.tails[:, TOKEN : PEAK + 1, 0])
        fixed = [(torch.zeros_like(rows), nothing)]  # so that a chunk may have no frames
        for frame in range(logprobs.shape[1]):
            candidates = self._candidates(
                beams, logprobs[:, frame], choices.at(frame), biasing and (biasing, contexts), fusion
            )
            beams = self._select(
                beams, candidates, choices.at(frame), logprobs[:, frame], start_frames + frame, frame < frames
            )
            beams, common, tokens = self._fix(beams)
            fixed.append((common, tokens))
        state["ctc_started"][rows] = torch.ones_like(rows)
        state["ctc_scores"][rows] = beams.scores
        state["ctc_numbers"][rows] = beams.numbers
        state["ctc_tails"][rows] = beams.tails[..., : self.tail]
        counts, tokens = self._join(torch.stack([each for each, _ in fixed]), torch.stack([each for _, each in fixed]))
        best, length = beams.tails[:, :, 0, : self.tail], beams.numbers[:, LENGTH, :1]
        numbers = [
            counts[:, None],
            length,
            tokens[:, 0],
            tokens[:, 1],
            best[:, TOKEN],
            _rising_frames(best[:, FRAME], length[:, 0]),
        ]
        return torch.cat(numbers, 1), torch.cat([tokens[:, 2], best[:, LOGPROB]], 1).view(torch.float64)

    def _load(self, state: State, rows: Tensor, scorer: TokenScorer | None) -> _Beams:
        """Beams of the sessions."""
        started = (state["ctc_started"][rows] > 0)[:, None, None]
        scores = torch.where(started, state["ctc_scores"][rows], self._tables.new_scores)
        numbers = torch.where(started, state["ctc_numbers"][rows], self._tables.new_numbers)
        if scorer is not None:
            initial = torch.where(started[:, 0], numbers[:, LANGUAGE_STATE], scorer.initial_state)
            numbers[:, LANGUAGE_STATE] = initial
        return _Beams(scores, numbers, F.pad(state["ctc_tails"][rows], (0, 1)))

    def _choices(self, logprobs: Tensor) -> _Choices:
        """Tokens that may open new hypotheses in each frame of (n, frames, vocab), the likeliest first and of equals
        the smallest. Those that may not have log-probability -inf."""
        options = self.options
        count = min(options.tokens + 1, logprobs.shape[-1])  # one may be the blank
        tokens = logprobs.topk(count, -1).indices.sort(-1).values
        chosen = logprobs.gather(-1, tokens)
        barred = (tokens == self.model.blank_id) | (chosen < options.min_logprob)
        chosen, order = torch.where(barred, NONE, chosen).sort(dim=-1, descending=True, stable=True)
        tokens, chosen = tokens.gather(-1, order)[..., : options.tokens], chosen[..., : options.tokens]
        n, width, count = tokens.shape
        stays = tokens.new_full((n, width, options.beam), -1)
        extends = torch.cat([stays, tokens.repeat(1, 1, options.beam)], 2)
        return _Choices(tokens, chosen, torch.stack([extends, self._tables.token_hashes[extends]], 2))

    def _candidates(
        self,
        beams: _Beams,
        logprobs: Tensor,
        choices: _Choices,
        biasing: tuple[_BiasingArrays, int] | None,
        fusion: tuple[TokenScorer, Tensor] | None,
    ) -> _Candidates:
        """Hypotheses after a frame: those of the beam, then each of them one token further."""
        blank, nonblank, total, gain = beams.scores.unbind(1)
        hashes, parents, lasts, _, nodes, states = beams.numbers.unbind(1)
        tokens, none = choices.tokens, self._tables.none
        heard = logprobs.gather(1, lasts)
        is_parent = parents[:, :, None] == hashes[:, None, :]  # (n, hypothesis, its parent)
        # A repeated token needs a blank between.
        mass = torch.where(lasts[:, :, None] == lasts[:, None, :], blank[:, None, :], total[:, None, :])
        from_parent = torch.where(is_parent, mass, none).amax(2)
        stay_blank = total + logprobs[:, self.model.blank_id, None]
        stay_nonblank = torch.logaddexp(nonblank + heard, from_parent + heard)

        same_token = tokens[:, None, :] == lasts[:, :, None]  # (n, hypothesis, k)
        extended = torch.where(same_token, blank[:, :, None], total[:, :, None]) + choices.logprobs[:, None, :]
        # One that is already there takes this mass itself.
        there = (is_parent[:, :, :, None] & same_token[:, :, None, :]).any(1)
        extended = torch.where(there, none, extended)

        gains = gain[:, :, None].expand_as(extended)
        new_nodes = new_states = None
        if biasing is not None:
            arrays, contexts = biasing
            new_nodes, bonus = arrays.step(nodes, tokens, contexts)
            gains = gains + bonus
            new_nodes = torch.cat([nodes, new_nodes.flatten(1)], 1)
        if fusion is not None:
            scorer, weight = fusion
            language, new_states = scorer.score(
                states[:, :, None].expand_as(extended), tokens[:, None].expand_as(gains)
            )
            unknown = language == NONE
            extended = torch.where(unknown, none, extended)
            gains = gains + weight * torch.where(unknown, 0.0, language) + self.token_bonus
            new_states = torch.cat([states, new_states.flatten(1)], 1)
        extended = extended.flatten(1)
        none = none.expand_as(extended)
        scores = [stay_blank, none, stay_nonblank, extended, torch.logaddexp(stay_blank, stay_nonblank), extended]
        joined = torch.cat([*scores, gain, gains.flatten(1)], 1)
        return _Candidates(joined.view(len(joined), GAIN + 1, len(self._tables.entries)), new_nodes, new_states)

    def _select(
        self, beams: _Beams, found: _Candidates, choices: _Choices, logprobs: Tensor, frame: Tensor, valid: Tensor
    ) -> _Beams:
        """The best candidates as the next beam. A session whose chunk has ended, or that can go nowhere, stays."""
        beam, tail, tables = self.options.beam, self.tail, self._tables
        ranks, order = (found.scores[:, TOTAL] + found.scores[:, GAIN]).sort(dim=-1, descending=True, stable=True)
        ranks, order = ranks[:, :beam], order[:, :beam]
        best = ranks[:, :1]
        moves = valid[:, None] & (best > NONE)
        order = torch.where(moves, order, tables.entries[:beam])
        drops = (ranks < best - self.options.max_gap) & moves
        scores = found.scores.gather(2, _planes(order, GAIN + 1))
        scores = torch.where(drops[:, None], tables.none, torch.where(moves[:, None], scores, beams.scores))

        token, token_hash = choices.extends.gather(2, _planes(order, 2)).unbind(1)
        extends, entries = token >= 0, tables.entries[order]
        kept = beams.numbers.gather(2, _planes(entries, LANGUAGE_STATE + 1))
        at = kept[:, LENGTH]
        hashes = (kept[:, HASH] ^ token_hash) * MULTIPLIER
        numbers = torch.stack([hashes, kept[:, HASH], token, at + 1, kept[:, BIASING_NODE], kept[:, LANGUAGE_STATE]], 1)
        numbers = torch.where(extends[:, None], numbers, kept)
        for plane, new in ((BIASING_NODE, found.biasing_nodes), (LANGUAGE_STATE, found.language_states)):
            if new is not None:
                numbers[:, plane] = new.gather(1, order)
        numbers = torch.where(scores[:, TOTAL, None] == NONE, tables.dropped, numbers)

        # A prefix that an old hypothesis begins with keeps the frame at which it was likeliest: all agree on it.
        old = beams.tails.gather(3, at[:, None, None].expand(-1, LOGPROB + 1, beam, -1))  # (n, planes, old, new)
        begins = (old[:, TAIL_HASH] == hashes[:, None]) & (beams.numbers[:, LENGTH, :, None] > at[:, None])
        known = torch.where(begins[:, None], old, tables.least).amax(2)
        none = tables.none_bits.expand_as(token)
        added = torch.stack([hashes, token, frame[:, None].expand_as(token), none, none], 1)
        added = torch.where(known[:, :1] != _LEAST, known, added)
        tails = beams.tails.gather(2, _planes(entries, LOGPROB + 1)[..., None].expand(-1, -1, -1, tail + 1))
        spot = torch.where(extends, at, tables.places[tail:])  # the last column is never read
        tails.scatter_(3, _planes(spot, LOGPROB + 1)[..., None], added[..., None])

        # The last token's frame is that at which the hypothesis was likeliest; all that begin with it share it.
        hashes, lengths = numbers[:, HASH], numbers[:, LENGTH]
        last = (lengths - 1).clamp(min=0)
        peak = scores[:, NONBLANK] + scores[:, GAIN] - best
        better = (peak > tails[:, PEAK].view(torch.float64).gather(2, last[:, :, None])[..., 0]) & moves
        at = last[:, None, :].expand(-1, beam, -1)  # (n, hypothesis, that whose last token it is)
        shares = (tails[:, TAIL_HASH].gather(2, at) == hashes[:, None]) & (lengths[:, :, None] > at) & better[:, None]
        spot = torch.where(shares, at, tables.places[tail:])
        heard = logprobs.gather(1, numbers[:, LAST])
        marks = torch.stack([frame[:, None].expand_as(token), peak.view(torch.int64), heard.view(torch.int64)], 1)
        tails[:, FRAME:].scatter_(3, _planes(spot, 3), marks[:, :, None].expand(-1, -1, beam, -1))
        return _Beams(scores, numbers, tails)

    def _fix(self, beams: _Beams) -> tuple[_Beams, Tensor, Tensor]:
        """Take the tokens that all hypotheses begin with from the beams, and make room where a tail is full.

        Returns: the beams, how many tokens were taken (n,), and tokens, frames and bits of log-probabilities
        (n, 3, tail + 1) of which those are the first.
        """
        tables, tail, tails = self._tables, self.tail, beams.tails
        hashes, lengths = tails[:, TAIL_HASH], beams.numbers[:, LENGTH]
        # Where a tail is full, those that do not begin as the best does are dropped; where the best has no token,
        # those that are full.
        empty, full = lengths == 0, lengths >= tail
        differs = (hashes[:, :, 0] != hashes[:, :1, 0]) | empty
        drops = (torch.where(empty[:, :1], full, differs) & full.any(1, keepdim=True))[:, None]
        scores = torch.where(drops, tables.none, beams.scores)
        numbers = torch.where(drops, tables.dropped, beams.numbers)
        lengths = numbers[:, LENGTH]

        inside = tables.places < lengths[:, :, None]
        shared = ((hashes == hashes[:, :1]) & inside) | (scores[:, TOTAL] == NONE)[:, :, None]
        common = shared.all(1).sum(1)
        # No later than any token after it, or a token fixed afterwards could get an earlier frame.
        slack = torch.where(inside, tails[:, FRAME] - tables.places, tables.latest).amin(1)
        earliest = torch.where(tables.later, slack[:, None], tables.latest).amin(2) + tables.places
        fixed = torch.stack([tails[:, TOKEN, 0], earliest, tails[:, LOGPROB, 0]], 1)
        index = (tables.places + common[:, None]).clamp(max=tail)
        tails = tails.gather(3, index[:, None, None].expand_as(tails))
        lengths.sub_(common[:, None]).clamp_(min=0)
        return _Beams(scores, numbers, tails), common, fixed

    def _join(self, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens fixed in all frames one after another, from counts (1 + frames, n), none at first, and tokens
        (1 + frames, n, 3, tail + 1): how many (n,), and (n, 3, frames + tail)."""
        width, n, planes, places = tokens.shape
        capacity = width - 1 + self.tail
        ends = counts.cumsum(0)
        spots = (ends - counts)[:, :, None] + self._tables.places
        spots = torch.where(self._tables.places < counts[:, :, None], spots, capacity).transpose(0, 1)
        spots = spots.reshape(n, 1, width * places).expand(-1, planes, -1)
        joined = torch.zeros(n, planes, capacity + 1, dtype=torch.int64, device=tokens.device)
        joined.scatter_(2, spots, tokens.permute(1, 2, 0, 3).reshape(n, planes, width * places))
        return ends[-1], joined[..., :capacity]


class _Beams(NamedTuple):
    """Beams of n sessions, best hypothesis first. A hypothesis whose scores are -inf is not there: it has length 0, and
    hashes that no other has."""

    scores: Tensor
    """(n, planes, beam)."""
    numbers: Tensor
    """(n, planes, beam)."""
    tails: Tensor
    """(n, planes, beam, tail + 1): what lies past a hypothesis's length is arbitrary, and so is the last column."""


class _Choices(NamedTuple):
    """Tokens that may open new hypotheses, of all frames (n, frames, ...) or of one (n, ...)."""

    tokens: Tensor
    """(..., k)."""
    logprobs: Tensor
    """(..., k) float64."""
    extends: Tensor
    """(..., 2, beam + beam * k): token by which each candidate is extended, -1 for none, and its hash."""

    def at(self, frame: int) -> _Choices:
        return _Choices(*(each[:, frame] for each in self))


class _Candidates(NamedTuple):
    """Candidates for the next beam: each hypothesis as it is, then each with each token."""

    scores: Tensor
    """(n, planes, beam + beam * k)."""
    biasing_nodes: Tensor | None
    """(n, beam + beam * k); None without hotwords."""
    language_states: Tensor | None
    """(n, beam + beam * k); None without a language model."""


class _Tables(NamedTuple):
    """Constants of a search on its device."""

    places: Tensor
    """(tail + 1,): 0, 1, ..."""
    later: Tensor
    """(tail + 1, tail + 1) bool: whether the second place is not before the first."""
    entries: Tensor
    """(beam + beam * k,): hypothesis of each candidate."""
    token_hashes: Tensor
    """(vocab + 1,) int64: hash of each token, and one of no token."""
    new_scores: Tensor
    """(planes, beam): scores of a new session."""
    new_numbers: Tensor
    """(planes, beam)."""
    dropped: Tensor
    """(planes, 1): numbers of a hypothesis that is not there."""
    none: Tensor
    """(1, 1) float64: -inf."""
    none_bits: Tensor
    """(1, 1) int64: its bits."""
    least: Tensor
    """(1, 1) int64: less than all hashes, tokens, frames and bits that occur. A tensor, as the other constants of a
    frame are: a number would be filled into one on the device each time."""
    latest: Tensor
    """(1, 1) int64: later than all frames."""

    @classmethod
    def build(cls, options: CtcBeamOptions, vocab: int, tail: int, device: torch.device) -> _Tables:
        beam, count = options.beam, min(options.tokens, vocab)
        places, entries = torch.arange(tail + 1), torch.arange(beam)
        scores = torch.full((GAIN + 1, beam), NONE, dtype=torch.float64)
        scores[:, 0] = torch.tensor([0.0, NONE, 0.0, 0.0], dtype=torch.float64)
        new = torch.tensor([EMPTY_HASH, NO_PARENT_HASH, vocab, 0, OPEN, 0])
        dropped = torch.tensor([DROPPED_HASH, NO_PARENT_HASH, vocab, 0, OPEN, 0])[:, None]
        numbers = dropped.repeat(1, beam)
        numbers[:, 0] = new
        hashes = np.random.default_rng(vocab).integers(-(1 << 63), (1 << 63) - 1, vocab + 1, np.int64)
        tables = cls(
            places,
            places >= places[:, None],
            torch.cat([entries, entries.repeat_interleave(count)]),
            torch.from_numpy(hashes),
            scores,
            numbers,
            dropped,
            torch.full((1, 1), NONE, dtype=torch.float64),
            *(torch.full((1, 1), number) for number in (_NONE_BITS, _LEAST, _LATER)),
        )
        return cls(*(each.to(device) for each in tables))


class _BiasingArrays(NamedTuple):
    """Hotword list on a device: an Aho-Corasick graph (decoding/biasing_graph.py) whose arcs are found by one search
    in sorted keys. Padded, so that few shapes occur."""

    keys: Tensor
    """(arcs,) int64, rising: node * vocab + token; the largest integer where no arc is."""
    nexts: Tensor
    fails: Tensor
    partial_bonuses: Tensor
    word_bonuses: Tensor
    word_starts: Tensor
    """(vocab,) bool."""

    def step(self, nodes: Tensor, tokens: Tensor, contexts: int) -> tuple[Tensor, Tensor]:
        """Nodes (n, beam, k) after tokens (n, k) in nodes (n, beam), and their bonuses. `contexts`: nodes on the way
        from any to its root by failure links."""
        vocab, chain = len(self.word_starts), [nodes]
        for _ in range(contexts - 1):
            chain.append(self.fails[chain[-1]])
        wanted = torch.stack(chain)[..., None] * vocab + tokens[:, None]
        arcs = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        found, longest = (self.keys[arcs] == wanted).to(torch.uint8).max(0, keepdim=True)
        target = torch.where(found > 0, self.nexts[arcs.gather(0, longest)], WITHIN)[0]
        bonus = self.word_bonuses[target] + self.partial_bonuses[target] - self.partial_bonuses[nodes][:, :, None]
        return torch.where((target == WITHIN) & self.word_starts[tokens][:, None], OPEN, target), bonus


class _BatchedBiasing(NamedTuple):
    """Compiled hotword list."""

    arrays: _BiasingArrays
    contexts: int
    """Nodes on the longest way from a node to its root, rounded up."""

    @classmethod
    def compile(cls, words: StreamingBiasingList, boost: float, device: torch.device) -> _BatchedBiasing:
        given = words.arrays
        vocab, nodes = len(given.word_starts), len(given.fails)
        sources = torch.repeat_interleave(torch.arange(nodes), given.firsts.diff())
        contexts, reached = 1, torch.arange(nodes)
        while bool((reached != WITHIN).any()):
            reached, contexts = given.fails[reached], contexts + 1
        arcs, places = _padded_size(len(sources)), _padded_size(nodes)

        def padded(values: Tensor, size: int, fill: int = 0) -> Tensor:
            return torch.cat([values, values.new_full((size - len(values),), fill)]).to(device)

        arrays = _BiasingArrays(
            padded(sources * vocab + given.tokens, arcs, (1 << 63) - 1),
            padded(given.nexts, arcs),
            padded(given.fails, places),
            padded(given.partial_bonuses * boost, places),
            padded(given.word_bonuses * boost, places),
            given.word_starts.bool().to(device),
        )
        return cls(arrays, 1 << (contexts - 1).bit_length())


def _padded_size(count: int) -> int:
    """The least power of four, and 64 at least, that is not less."""
    size = 64
    while size < count:
        size *= 4
    return size


def _planes(index: Tensor, planes: int) -> Tensor:
    """An index (n, ...) for each of the planes, (n, planes, ...)."""
    return index[:, None].expand(-1, planes, *index.shape[1:])


def _rising_frames(frames: Tensor, lengths: Tensor) -> Tensor:
    """Frames (..., tail) of tokens, each before the next one's; arbitrary past `lengths` (...)."""
    places = torch.arange(frames.shape[-1], device=frames.device)
    slack = torch.where(places < lengths[..., None], frames - places, _LATER)
    return slack.flip(-1).cummin(-1).values.flip(-1) + places
