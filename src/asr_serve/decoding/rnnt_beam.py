"""Beam search of transducers, RNN-T and TDT, over many sessions at once.

All hypotheses of all beams process a frame at the same time, in at most `max_symbols` rounds. In a round every
hypothesis that is not done with the frame emits the blank, which ends the frame for it, or a token, after which it
may emit another; finished hypotheses compete with unfinished ones. Hypotheses with the same tokens are merged and
their probabilities added. With one round this is the modified beam search of k2, one symbol a frame; with a beam
of one it is greedy search; with a wide enough beam it sums over all alignments of all token sequences. TDT: a
hypothesis emits a token and a duration, and is skipped until that has passed.

Source  modified beam search: k2-fsa/icefall; merging: arXiv:1211.3711; TDT: arXiv:2304.06795. Reference numbers: a
        brute-force sum over alignments in tests/decoding/test_rnnt_beam.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing_graph import OPEN
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.language_model.scorer import UNSEEN_LOGPROB, LanguageModelFusion
from asr_serve.decoding.rnnt import (
    BEGUN,
    KEY,
    LENGTH,
    PREDICTED,
    SCORE,
    SKIP,
    TAIL,
    load_rows,
    save_rows,
    start_predictor,
    validate_max_symbols,
)
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

SPOT, GAIN, LANGUAGE_STATE = "spot", "gain", "language_state"
"""State of searches with hotwords or a language model: node of the biasing graph, total bonus of both, which SCORE
includes, and state of the language model."""


class _Candidates(NamedTuple):
    """Candidate expansions, best first: each (n, m)."""

    score: Tensor
    """float64; -inf: not allowed."""
    parent: Tensor
    token: Tensor
    """Emitted token, or blank."""
    logprob: Tensor
    skip: Tensor
    key: Tensor
    fused: dict[str, Tensor]
    """Biasing graph node, state of the language model and total bonus, by name in the state; of what is not there
    none."""


@dataclass
class _BeamStep:
    """Working state of a step: n rows, each with a beam."""

    projected: Tensor
    """(n, frames, joint width)."""
    first: Tensor
    """(n,) int64: absolute frame of the chunk's first, as in StreamingChunk.start_frames."""
    limit: Tensor
    """(n,) int64: frames in the chunk."""
    own: dict[str, Tensor]
    """State tensors by name, (n, *shape): loaded, updated and saved."""
    room: int
    """Tokens that tails can still grow by, at least."""
    words: StreamingBiasingList | None = None
    fusion: LanguageModelFusion | None = None
    weights: Tensor | None = None
    """(n,) float64: of the language model in each session; None without one."""
    fixed: list[Tensor] = field(default_factory=list)
    """Each (n, 3 * tail + 2): tokens, frames and log-probabilities of the best tail, its length, and how many of
    its tokens become fixed."""


class TransducerBeam:
    """Beam `StreamingSearch`: the `beam` likeliest token sequences.

    Tokens that all hypotheses share, at the same frames, are fixed. At most `tail` tokens may be unfixed: then the
    oldest one of the best hypothesis is fixed, and hypotheses that disagree are dropped. Hypotheses less likely
    than the best by more than `margin`, natural log, are dropped too.

    A language model scores each token as it is emitted, and not the blank; at the end of a session it scores the end
    of the sentence.

    State   by hypothesis: the predictor's memory and last output, log-probability, a hash of all tokens emitted,
            frames to skip (TDT), and the tokens that are not fixed
    """

    def __init__(
        self,
        model: Transducer,
        beam: int = 4,
        max_symbols: int = 2,
        device: torch.device | str = "cpu",
        *,
        tail: int = 64,
        margin: float = 10.0,
        boost: float | None = None,
        tokens: int = 0,
        fuses: bool = False,
    ) -> None:
        """`max_symbols`: limit per frame. `device`: device of the state. `boost`: bonus of a token of a hotword
        of weight 1, natural log; None: a search without hotwords. `tokens`: least number of tokens considered for
        each hypothesis. `fuses`: sessions may have a language model. Raises OptionError."""
        validate_max_symbols(max_symbols)
        if beam < 1:
            raise OptionError(f"beam={beam}", "1 or more", param="beam")
        if tail <= max_symbols:
            raise OptionError(f"tail={tail}", f"more than max_symbols, which is {max_symbols}", param="tail")
        if not margin > 0:
            raise OptionError(f"margin={margin}", "more than 0", param="margin")
        self.model, self.beam, self.max_symbols, self.tail, self.margin = model, beam, max_symbols, tail, margin
        self.boost, self._wide = boost, max(2 * beam - 1, tokens)
        device = torch.device(device)
        first = start_predictor(model, device)
        numbers = torch.zeros(1, beam, dtype=torch.int64, device=device)
        alone = torch.full((1, beam), -math.inf, dtype=torch.float64, device=device)
        alone[:, 0] = 0.0
        tails = torch.zeros(1, beam, tail, dtype=torch.int64, device=device)
        self._memory = tuple(first.memory)
        self._fresh = {
            **{name: _repeated(tensor, beam) for name, tensor in first.memory.items()},
            PREDICTED: _repeated(first.predicted, beam),
            SCORE: alone,
            **dict.fromkeys((SKIP, KEY, LENGTH), numbers),
            **dict(zip(TAIL, (tails, tails, tails.float()), strict=True)),
        }
        if boost is not None:
            self._fresh |= {SPOT: numbers + OPEN, GAIN: torch.zeros_like(alone)}
        if fuses:
            self._fresh |= {LANGUAGE_STATE: numbers - 1, GAIN: torch.zeros_like(alone)}  # -1: the initial state
        self._durations = torch.tensor(model.durations, dtype=torch.int64, device=device)
        self._positions = torch.arange(tail, device=device)

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            BEGUN: StateSpec((), torch.int64),
            **{name: StateSpec(tuple(tensor.shape[1:]), tensor.dtype, None) for name, tensor in self._fresh.items()},
        }

    @torch.inference_mode()
    def step(
        self,
        hidden: Tensor,
        chunk: StreamingChunk,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
        weights: Tensor | None = None,
    ) -> list[SearchResult]:
        """`words`, `fusion`: hotwords and language model of all these sessions; a session has the same ones, or
        none, from its first step on. `weights` (n,) float64: of each session's language model, in place of that of
        `fusion`. Rows that were restored must have passed `validate_row`."""
        own = load_rows(state, chunk.rows, self._fresh)
        if fusion is not None:
            assert LANGUAGE_STATE in own, "a language model for a search that fuses none"
            own[LANGUAGE_STATE] = torch.where(own[LANGUAGE_STATE] < 0, fusion.scorer.initial_state, own[LANGUAGE_STATE])
            by_row = hidden.new_full((len(hidden),), fusion.weight, dtype=torch.float64)
            weights = by_row if weights is None else weights.to(hidden.device)
        projected = self.model.project_encoder(hidden)
        work = _BeamStep(projected, chunk.start_frames, chunk.frames, own, 0, words, fusion, weights)
        for frame in range(hidden.shape[1]):
            self._frame(work, frame)
        self._fix_agreed(work)
        save_rows(state, chunk.rows, work.own)
        return self._read(work.fixed)

    def validate_row(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> None:
        """Raises ValueError as RowValidatingSearch.validate_row: for indices out of range, those of hotwords and of a
        language model included."""
        if int(state[BEGUN][row]) != 1:
            return  # as `load_rows`: a session that has not begun
        limits = {LENGTH: (0, self.tail)}
        if words is not None:
            limits[SPOT] = (0, len(words) - 1)
        if fusion is not None:
            limits[LANGUAGE_STATE] = (-1, fusion.scorer.state_count - 1)
        for name, (least, most) in limits.items():
            saved = state[name][row]
            if bool(((saved < least) | (saved > most)).any()):
                raise ValueError("a saved row of the search is corrupt")

    def finish(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> list[NBestHypothesis]:
        if int(state[BEGUN][row]) != 1:
            return [NBestHypothesis([], 0.0)]
        scores, keys, lengths = (state[name][row].tolist() for name in (SCORE, KEY, LENGTH))
        gains = [0.0] * self.beam
        if words is not None or fusion is not None:
            gains = state[GAIN][row].tolist()
            scores = [score - gain if score > -math.inf else score for score, gain in zip(scores, gains, strict=True)]
        if words is not None:
            assert self.boost is not None, "hotwords for a search that knows none"
            # An incomplete word earns no bonus.
            nodes = state[SPOT][row].tolist()
            gains = [gain + self.boost * words.graph.final_cost(node) for gain, node in zip(gains, nodes, strict=True)]
        if fusion is not None:
            ends = fusion.scorer.final_logprobs(state[LANGUAGE_STATE][row].clamp(min=0))
            ends = fusion.weight * ends.clamp(min=UNSEEN_LOGPROB)
            gains = [gain + end for gain, end in zip(gains, ends.tolist(), strict=True)]
        tails = zip(*(state[name][row].tolist() for name in TAIL), strict=True)
        guesses: dict[int, NBestHypothesis] = {}
        entries = zip(scores, keys, lengths, tails, gains, strict=True)
        for score, key, length, tail, gain in sorted(entries, reverse=True):
            if key in guesses:
                # TDT: they differ in the frame they would have continued at.
                guess = guesses[key]
                guesses[key] = guess._replace(logprob=_sum(guess.logprob, score))
            elif score > -math.inf:
                guesses[key] = NBestHypothesis(
                    [SearchToken(*token) for token in zip(*tail, strict=True)][:length], score, gain
                )
        return sorted(guesses.values(), key=lambda guess: -(guess.logprob + guess.gain))

    # --- a frame -----------------------------------------------------------------------------------------

    def _frame(self, work: _BeamStep, frame: int) -> None:
        own, live = work.own, (frame < work.limit)[:, None]
        if work.room < self.max_symbols:
            self._make_room(work, live)
        work.room -= self.max_symbols
        for symbols in range(1, self.max_symbols + 1):
            active = (live & (own[SKIP] == 0) & (own[SCORE] > -math.inf)).flatten().nonzero().squeeze(1)
            if not len(active):
                break
            candidates = self._expand(work, frame, active, last=symbols == self.max_symbols)
            self._take(work, frame, self._merge(candidates))
        own[SKIP] = torch.where(live, (own[SKIP] - 1).clamp(min=0), own[SKIP])

    def _expand(self, work: _BeamStep, frame: int, going: Tensor, last: bool) -> _Candidates:
        """Returns the best candidates of each beam: hypotheses `going`, flat indices, are expanded in all ways,
        the others stay unchanged."""
        own, model, wide = work.own, self.model, self._wide
        logits = model.joint(work.projected[going // self.beam, frame], own[PREDICTED].flatten(0, 1)[going])
        logprob, token = logits[:, : model.vocab_size].log_softmax(-1).topk(min(wide, model.vocab_size))
        gain, advance = logprob, torch.zeros_like(token)
        if model.durations:
            lasts = logits[:, model.vocab_size :].log_softmax(-1)
            gain = (logprob[:, :, None] + lasts[:, None]).flatten(1)
            gain, index = gain.topk(min(wide, gain.shape[1]))
            token, logprob = (tensor.gather(1, index // lasts.shape[1]) for tensor in (token, logprob))
            advance = self._durations[index % lasts.shape[1]]
        ends = torch.ones_like(token, dtype=torch.bool) if last else token == model.blank_id
        advance = torch.where(ends, advance.clamp(min=1), advance)

        def expansions(stay: Tensor, go: Tensor, never: float) -> Tensor:
            """Returns (n, candidates) by beam: for each hypothesis its value unchanged, and that of each
            expansion."""
            values = stay.new_full((stay.numel(), 1 + go.shape[1]), never)
            values[:, 0] = stay.flatten()
            values[going, 1:] = go.to(values.dtype)
            return values.view(len(stay), -1)

        fused, bonus = self._fuse(work, going, token)
        if bonus is not None:
            gain = gain + bonus
        score = own[SCORE].flatten()
        stay = score.index_fill(0, going, -math.inf).view_as(own[SCORE])
        best, index = expansions(stay, score[going, None] + gain, -math.inf).topk(2 * self.beam - 1)
        parent = index // (1 + token.shape[1])
        symbol = expansions(torch.full_like(own[KEY], model.blank_id), token, 0).gather(1, index)
        key = own[KEY].gather(1, parent)
        return _Candidates(
            best,
            parent,
            symbol,
            expansions(torch.zeros_like(own[SCORE]), logprob, 0).gather(1, index).float(),
            own[SKIP].gather(1, parent) + expansions(torch.zeros_like(own[SKIP]), advance, 0).gather(1, index),
            torch.where(symbol == model.blank_id, key, _followed(key, symbol)),
            {name: expansions(own[name], tensor, 0).gather(1, index) for name, tensor in fused.items()},
        )

    def _fuse(self, work: _BeamStep, going: Tensor, token: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Returns for each expansion of the hypotheses `going`, (n, expansions), what hotwords and a language model
        make of it: their states after it and its total bonus, by name in the state; and the new part of the bonus.
        Nothing without either."""
        if work.words is None and work.fusion is None:
            return {}, None
        blank, fused = self.model.blank_id, dict[str, Tensor]()
        bonus = torch.zeros(token.shape, dtype=torch.float64, device=token.device)
        if work.words is not None:
            assert self.boost is not None
            graph, nodes = work.words.graph, work.own[SPOT].flatten()[going]
            expansions = [
                [(node, 0.0) if symbol == blank else graph.step(node, symbol) for symbol in tokens]
                for node, tokens in zip(nodes.tolist(), token.tolist(), strict=True)
            ]
            steps = torch.tensor(expansions, dtype=torch.float64, device=token.device)
            fused[SPOT], bonus = steps[:, :, 0].long(), bonus + steps[:, :, 1] * self.boost
        if work.fusion is not None:
            before = work.own[LANGUAGE_STATE].flatten()[going][:, None].expand_as(token)
            logprobs, after = work.fusion.scorer.score(before, token)
            fused[LANGUAGE_STATE] = torch.where(token == blank, before, after)
            assert work.weights is not None
            weight = work.weights[going // self.beam][:, None]
            scaled = torch.where(logprobs == -math.inf, -math.inf, weight * logprobs)  # 0 * -inf is NaN
            bonus = bonus + torch.where(token == blank, 0.0, scaled)
        fused[GAIN] = work.own[GAIN].flatten()[going][:, None] + bonus
        return fused, bonus

    def _merge(self, candidates: _Candidates) -> _Candidates:
        """Merges candidates with equal tokens and skips, adding their probabilities, and prunes to the beam."""
        score, skip, key = candidates.score, candidates.skip, candidates.key
        alive = score > -math.inf
        same = (key[:, :, None] == key[:, None]) & (skip[:, :, None] == skip[:, None]) & alive[:, None]
        score = score[:, None].masked_fill(~same, -math.inf).logsumexp(-1)
        duplicate = ~alive | same.tril(-1).any(-1)
        score, order = score.masked_fill(duplicate, -math.inf).topk(self.beam)
        score = score.masked_fill(score < score[:, :1] - self.margin, -math.inf)
        parent, token, logprob, skip, key = (
            tensor.gather(1, order) for tensor in (candidates.parent, candidates.token, candidates.logprob, skip, key)
        )
        fused = {name: tensor.gather(1, order) for name, tensor in candidates.fused.items()}
        return _Candidates(score, parent, token, logprob, skip, key, fused)

    def _take(self, work: _BeamStep, frame: int, chosen: _Candidates) -> None:
        """Replaces the beam by `chosen`, and runs the predictor where a token was emitted."""
        own, rows = work.own, _rows(chosen.parent)[:, None]
        for name in (*self._memory, PREDICTED, LENGTH, *TAIL):
            own[name] = own[name][rows, chosen.parent]
        own[SCORE], own[SKIP], own[KEY] = chosen.score, chosen.skip, chosen.key
        own.update(chosen.fused)
        emits = (chosen.token != self.model.blank_id) & (chosen.score > -math.inf)
        emitting = emits.flatten().nonzero().squeeze(1)
        if not len(emitting):
            return
        row, entry = emitting // self.beam, emitting % self.beam
        token = chosen.token[row, entry]
        predicted, memory = self.model.predict(token, {name: own[name][row, entry] for name in self._memory})
        for name, tensor in {**memory, PREDICTED: predicted}.items():
            own[name][row, entry] = tensor
        length = own[LENGTH][row, entry]
        frames = work.first[row] + frame
        for name, tensor in zip(TAIL, (token, frames, chosen.logprob[row, entry]), strict=True):
            own[name][row, entry, length] = tensor
        own[LENGTH][row, entry] = length + 1

    # --- fixed tokens ------------------------------------------------------------------------------------

    def _make_room(self, work: _BeamStep, live: Tensor) -> None:
        """Fixes tokens until the tails of the rows that have a frame, `live` (n, 1), have room for its tokens. The
        same hypotheses are dropped at the same frame for any chunking."""
        most = self.tail - self.max_symbols
        while (longest := self._longest(work, live)) > most:
            self._force(work, live, most)
            self._fix_agreed(work)
        work.room = self.tail - longest

    def _longest(self, work: _BeamStep, live: Tensor) -> int:
        alive = live & (work.own[SCORE] > -math.inf)
        return int(torch.where(alive, work.own[LENGTH], 0).max())

    def _force(self, work: _BeamStep, live: Tensor, most: int) -> None:
        """Fixes the oldest token of the best hypothesis where a tail is longer than `most`."""
        own, rows = work.own, _rows(work.own[SCORE])
        score, length, best = own[SCORE], own[LENGTH], own[SCORE].argmax(1)
        long = length > most
        full = live & (long & (score > -math.inf)).any(1, keepdim=True)
        has_token = (length[rows, best] > 0)[:, None]
        oldest = own["token"][:, :, 0]
        disagrees = torch.where(has_token, (length == 0) | (oldest != oldest[rows, best][:, None]), long)
        own[SCORE] = score.masked_fill(full & disagrees, -math.inf)
        self._fix(work, (full & has_token).long().squeeze(1))

    def _fix_agreed(self, work: _BeamStep) -> None:
        """Fixes the tokens that all hypotheses share, at the same frames."""
        own, rows, best = work.own, _rows(work.own[SCORE]), work.own[SCORE].argmax(1)
        same = self._positions < own[LENGTH][:, :, None]
        for name in ("token", "frame"):
            same &= own[name] == own[name][rows, best][:, None]
        same |= (own[SCORE] == -math.inf)[:, :, None]
        self._fix(work, same.all(1).long().cumprod(1).sum(1))

    def _fix(self, work: _BeamStep, count: Tensor) -> None:
        """Removes `count` (n,) tokens from all tails, and records the best hypothesis's as fixed."""
        own, rows, best = work.own, _rows(work.own[SCORE]), work.own[SCORE].argmax(1)
        counts = torch.stack([own[LENGTH][rows, best], count], 1)
        work.fixed.append(torch.cat([*(own[name][rows, best].double() for name in TAIL), counts.double()], 1))
        moved = (self._positions + count[:, None]).clamp(max=self.tail - 1)[:, None].expand(-1, self.beam, -1)
        for name in TAIL:
            own[name] = own[name].gather(2, moved)
        own[LENGTH] = (own[LENGTH] - count[:, None]).clamp(min=0)

    def _read(self, fixed: list[Tensor]) -> list[SearchResult]:
        """Copies all results to the host at once."""
        results = []
        for steps in torch.stack(fixed, 1).cpu():
            new: list[SearchToken] = []
            for step in steps:
                length, count = map(int, step[-2:].tolist())
                best = step[:-2].view(len(TAIL), -1)[:, :length].T.tolist()
                tokens = [SearchToken(int(token), int(frame), logprob) for token, frame, logprob in best]
                new += tokens[:count]
            results.append(SearchResult(new, tokens[count:]))
        return results


def _sum(likely: float, less: float) -> float:
    """Adds probabilities given as natural logs, the larger one first."""
    return likely + math.log1p(math.exp(less - likely))


def _rows(of: Tensor) -> Tensor:
    return torch.arange(len(of), device=of.device)


def _repeated(first: Tensor, beam: int) -> Tensor:
    """(1, *shape) -> (1, beam, *shape)."""
    return first[:, None].repeat(1, beam, *[1] * (first.dim() - 1))


def _followed(key: Tensor, token: Tensor) -> Tensor:
    """Returns the key of a sequence extended by one token: a 64-bit multiplicative hash that wraps around;
    collisions are negligible."""
    mixed = (key ^ (token + 1) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 31) * 0x14D049BB133111EB
    return mixed ^ mixed >> 29
