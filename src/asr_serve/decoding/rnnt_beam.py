"""Beam search of transducers, RNN-T and TDT, over many sessions at once.

All entries of all beams take a frame at the same time, in at most `max_symbols` rounds. In a round every entry
that is not done with the frame says the blank, which ends the frame for it, or a token, after which it may say
another; entries that are done compete with those that are not. What says the same tokens is one entry, its
probability the sum. With one round this is the modified beam search of k2, one symbol a frame; with beams of one
entry it is greedy search; with beams wide enough it sums over all alignments of all that may be said. TDT: an
entry says a token and for how many frames, and takes no part until they are over.

Source  modified beam search: k2-fsa/icefall; merging: arXiv:1211.3711; TDT: arXiv:2304.06795. A brute-force sum
        over alignments holds the reference numbers, tests/decoding/test_rnnt_beam.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing import OPEN
from asr_serve.decoding.biasing_list import StreamingBiasingList
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

SPOT, GAIN = "spot", "gain"
"""Where hot words are known: the node of their graph, and what they are worth, which is in SCORE too."""


class _Candidates(NamedTuple):
    """How entries may go on, best first: each (n, m)."""

    score: Tensor
    """float64; -inf: it may not."""
    parent: Tensor
    token: Tensor
    """Or blank: nothing new is said."""
    logprob: Tensor
    skip: Tensor
    key: Tensor
    hot: tuple[Tensor, ...]
    """Where in the graph of hot words, and what they are worth; or nothing."""


@dataclass
class _BeamStep:
    """A step's rows while it runs: n of them, with a beam each."""

    projected: Tensor
    """(n, frames, joint width)."""
    first: Tensor
    """(n,) int64: absolute frame of the chunk's first, as in Chunk.seen."""
    limit: Tensor
    """(n,) int64: frames in the chunk."""
    own: dict[str, Tensor]
    """By name of the state (n, *shape): read, written and written back."""
    room: int
    """What tails may still grow by, at least."""
    words: StreamingBiasingList | None = None
    fixed: list[Tensor] = field(default_factory=list)
    """Each (n, 3 tails and 2): the best entry's tail, how much of it is there, how much is fixed from now on."""


class TransducerBeam:
    """`Search`: the `beam` likeliest ways to say what was heard.

    What all entries say, at the same frames, is fixed. Until then at most `tail` tokens wait: when they are as
    many, the oldest one of the best entry is fixed, and entries that say something else are given up. Entries
    less likely than the best by `margin`, natural log, are given up too.

    State   by entry: the predictor's memory and last output, log-probability, a number that stands for all tokens
            said, frames to skip (TDT), and the tokens that are not fixed
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
    ) -> None:
        """`max_symbols`: at one frame. `device`: where the state lies. `boost`: this search knows hot words, and a
        token of one of weight 1 is worth so much, natural log; None: it knows none. `tokens`: of an entry, so many
        likeliest are looked at, at least. Raises OptionError."""
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
            **{name: _repeated(each, beam) for name, each in first.memory.items()},
            PREDICTED: _repeated(first.predicted, beam),
            SCORE: alone,
            **dict.fromkeys((SKIP, KEY, LENGTH), numbers),
            **dict(zip(TAIL, (tails, tails, tails.float()), strict=True)),
        }
        if boost is not None:
            self._fresh |= {SPOT: numbers + OPEN, GAIN: torch.zeros_like(alone)}
        self._durations = torch.tensor(model.durations, dtype=torch.int64, device=device)
        self._positions = torch.arange(tail, device=device)

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            BEGUN: StateSpec((), torch.int64),
            **{name: StateSpec(tuple(each.shape[1:]), each.dtype, None) for name, each in self._fresh.items()},
        }

    @torch.inference_mode()
    def step(
        self, hidden: Tensor, chunk: StreamingChunk, state: State, words: StreamingBiasingList | None = None
    ) -> list[SearchResult]:
        """`words`: hot words of all these sessions; of each the same ones, or none, from its first step on."""
        own = load_rows(state, chunk.rows, self._fresh)
        if words is not None and bool((own[SPOT] >= len(words)).any() or (own[SPOT] < 0).any()):
            raise ValueError("a row of the state is corrupt")
        work = _BeamStep(self.model.project_encoder(hidden), chunk.start_frames, chunk.frames, own, 0, words)
        for frame in range(hidden.shape[1]):
            self._frame(work, frame)
        self._fix_agreed(work)
        save_rows(state, chunk.rows, work.own)
        return self._read(work.fixed)

    def finish(self, row: int, state: State, words: StreamingBiasingList | None = None) -> list[NBestHypothesis]:
        if int(state[BEGUN][row]) != 1:
            return [NBestHypothesis([], 0.0)]
        scores, keys, lengths = (state[name][row].tolist() for name in (SCORE, KEY, LENGTH))
        gains = [0.0] * self.beam
        if words is not None:
            assert self.boost is not None, "hot words for a search that knows none"
            # A part that has not become a word is worth nothing.
            spots = state[SPOT][row].tolist()
            gains = [
                gain + self.boost * words.graph.final_cost(spot)
                for gain, spot in zip(state[GAIN][row].tolist(), spots, strict=True)
            ]
            scores = [score - gain for score, gain in zip(scores, state[GAIN][row].tolist(), strict=True)]
        tails = zip(*(state[name][row].tolist() for name in TAIL), strict=True)
        guesses: dict[int, NBestHypothesis] = {}
        entries = zip(scores, keys, lengths, tails, gains, strict=True)
        for score, key, length, tail, gain in sorted(entries, reverse=True):
            if key in guesses:
                # TDT: they differ in where they would have gone on.
                guess = guesses[key]
                guesses[key] = guess._replace(logprob=_sum(guess.logprob, score))
            elif score > -math.inf:
                guesses[key] = NBestHypothesis(
                    [SearchToken(*each) for each in zip(*tail, strict=True)][:length], score, gain
                )
        return sorted(guesses.values(), key=lambda guess: -(guess.logprob + guess.gain))

    # --- a frame -----------------------------------------------------------------------------------------

    def _frame(self, work: _BeamStep, frame: int) -> None:
        own, live = work.own, (frame < work.limit)[:, None]
        if work.room < self.max_symbols:
            self._make_room(work, live)
        work.room -= self.max_symbols
        for symbols in range(1, self.max_symbols + 1):
            going = (live & (own[SKIP] == 0) & (own[SCORE] > -math.inf)).flatten().nonzero().squeeze(1)
            if not len(going):
                break
            candidates = self._expand(work, frame, going, last=symbols == self.max_symbols)
            self._take(work, frame, self._merge(candidates))
        own[SKIP] = torch.where(live, (own[SKIP] - 1).clamp(min=0), own[SKIP])

    def _expand(self, work: _BeamStep, frame: int, going: Tensor, last: bool) -> _Candidates:
        """The best that may come of each beam: the entries `going`, flat indices, go on in all ways, the others
        stay as they are."""
        own, model, wide = work.own, self.model, self._wide
        logits = model.joint(work.projected[going // self.beam, frame], own[PREDICTED].flatten(0, 1)[going])
        logprob, token = logits[:, : model.vocab_size].log_softmax(-1).topk(min(wide, model.vocab_size))
        gain, advance = logprob, torch.zeros_like(token)
        if model.durations:
            lasts = logits[:, model.vocab_size :].log_softmax(-1)
            gain = (logprob[:, :, None] + lasts[:, None]).flatten(1)
            gain, which = gain.topk(min(wide, gain.shape[1]))
            token, logprob = (each.gather(1, which // lasts.shape[1]) for each in (token, logprob))
            advance = self._durations[which % lasts.shape[1]]
        ends = torch.ones_like(token, dtype=torch.bool) if last else token == model.blank_id
        advance = torch.where(ends, advance.clamp(min=1), advance)

        def ways(stay: Tensor, go: Tensor, never: float) -> Tensor:
            """By beam: of each entry, that it stays as it is, and how it may go on."""
            made = stay.new_full((stay.numel(), 1 + go.shape[1]), never)
            made[:, 0] = stay.flatten()
            made[going, 1:] = go.to(made.dtype)
            return made.view(len(stay), -1)

        worth = self._worth(work, going, token)
        if worth is not None:
            gain = gain + worth[2]
        score = own[SCORE].flatten()
        stay = score.index_fill(0, going, -math.inf).view_as(own[SCORE])
        best, which = ways(stay, score[going, None] + gain, -math.inf).topk(2 * self.beam - 1)
        parent = which // (1 + token.shape[1])
        said = ways(torch.full_like(own[KEY], model.blank_id), token, 0).gather(1, which)
        key = own[KEY].gather(1, parent)
        return _Candidates(
            best,
            parent,
            said,
            ways(torch.zeros_like(own[SCORE]), logprob, 0).gather(1, which).float(),
            own[SKIP].gather(1, parent) + ways(torch.zeros_like(own[SKIP]), advance, 0).gather(1, which),
            torch.where(said == model.blank_id, key, _followed(key, said)),
            tuple(
                ways(own[name], each, 0).gather(1, which).to(own[name].dtype)
                for name, each in zip((SPOT, GAIN), worth or (), strict=False)
            ),
        )

    def _worth(self, work: _BeamStep, going: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of each way that the entries `going` may go on, (n, ways): where in the hot words' graph it is then,
        what all its hot words are worth, and what of that is new. None: there are no hot words."""
        if work.words is None:
            return None
        assert self.boost is not None
        blank, graph = self.model.blank_id, work.words.graph
        spots, gains = (work.own[name].flatten()[going] for name in (SPOT, GAIN))
        ways = [
            [(spot, 0.0) if each == blank else graph.step(spot, each) for each in tokens]
            for spot, tokens in zip(spots.tolist(), token.tolist(), strict=True)
        ]
        found = torch.tensor(ways, dtype=torch.float64, device=token.device)
        more = found[:, :, 1] * self.boost
        return found[:, :, 0].long(), gains[:, None] + more, more

    def _merge(self, candidates: _Candidates) -> _Candidates:
        """One of each, the best one, with the probability of all; as many as fit the beam."""
        score, skip, key = candidates.score, candidates.skip, candidates.key
        alive = score > -math.inf
        same = (key[:, :, None] == key[:, None]) & (skip[:, :, None] == skip[:, None]) & alive[:, None]
        score = score[:, None].masked_fill(~same, -math.inf).logsumexp(-1)
        again = ~alive | same.tril(-1).any(-1)
        score, order = score.masked_fill(again, -math.inf).topk(self.beam)
        score = score.masked_fill(score < score[:, :1] - self.margin, -math.inf)
        parent, token, logprob, skip, key = (
            each.gather(1, order) for each in (candidates.parent, candidates.token, candidates.logprob, skip, key)
        )
        hot = tuple(each.gather(1, order) for each in candidates.hot)
        return _Candidates(score, parent, token, logprob, skip, key, hot)

    def _take(self, work: _BeamStep, frame: int, chosen: _Candidates) -> None:
        """The entries become those."""
        own, rows = work.own, _rows(chosen.parent)[:, None]
        for name in (*self._memory, PREDICTED, LENGTH, *TAIL):
            own[name] = own[name][rows, chosen.parent]
        own[SCORE], own[SKIP], own[KEY] = chosen.score, chosen.skip, chosen.key
        own.update(zip((SPOT, GAIN), chosen.hot, strict=False))
        says = (chosen.token != self.model.blank_id) & (chosen.score > -math.inf)
        at = says.flatten().nonzero().squeeze(1)
        if not len(at):
            return
        row, entry = at // self.beam, at % self.beam
        token = chosen.token[row, entry]
        predicted, memory = self.model.predict(token, {name: own[name][row, entry] for name in self._memory})
        for name, each in {**memory, PREDICTED: predicted}.items():
            own[name][row, entry] = each
        length = own[LENGTH][row, entry]
        frames = work.first[row] + frame
        for name, each in zip(TAIL, (token, frames, chosen.logprob[row, entry]), strict=True):
            own[name][row, entry, length] = each
        own[LENGTH][row, entry] = length + 1

    # --- what is fixed -----------------------------------------------------------------------------------

    def _make_room(self, work: _BeamStep, live: Tensor) -> None:
        """For the tokens of a frame in the tails of the rows that have one, `live` (n, 1). Whatever the chunks
        are, the same entries are given up at the same frame."""
        most = self.tail - self.max_symbols
        while (longest := self._longest(work, live)) > most:
            self._force(work, live, most)
            self._fix_agreed(work)
        work.room = self.tail - longest

    def _longest(self, work: _BeamStep, live: Tensor) -> int:
        alive = live & (work.own[SCORE] > -math.inf)
        return int(torch.where(alive, work.own[LENGTH], 0).max())

    def _force(self, work: _BeamStep, live: Tensor, most: int) -> None:
        """Fixes the oldest token of the best entry where a tail is longer than `most`."""
        own, rows = work.own, _rows(work.own[SCORE])
        score, length, best = own[SCORE], own[LENGTH], own[SCORE].argmax(1)
        long = length > most
        full = live & (long & (score > -math.inf)).any(1, keepdim=True)
        says = (length[rows, best] > 0)[:, None]
        oldest = own["token"][:, :, 0]
        other = torch.where(says, (length == 0) | (oldest != oldest[rows, best][:, None]), long)
        own[SCORE] = score.masked_fill(full & other, -math.inf)
        self._fix(work, (full & says).long().squeeze(1))

    def _fix_agreed(self, work: _BeamStep) -> None:
        """Fixes what all entries say, at the same frames."""
        own, rows, best = work.own, _rows(work.own[SCORE]), work.own[SCORE].argmax(1)
        same = self._positions < own[LENGTH][:, :, None]
        for name in ("token", "frame"):
            same &= own[name] == own[name][rows, best][:, None]
        same |= (own[SCORE] == -math.inf)[:, :, None]
        self._fix(work, same.all(1).long().cumprod(1).sum(1))

    def _fix(self, work: _BeamStep, count: Tensor) -> None:
        """Takes so many tokens, (n,), off all tails; what they are, the best entry says."""
        own, rows, best = work.own, _rows(work.own[SCORE]), work.own[SCORE].argmax(1)
        counts = torch.stack([own[LENGTH][rows, best], count], 1)
        work.fixed.append(torch.cat([*(own[name][rows, best].double() for name in TAIL), counts.double()], 1))
        moved = (self._positions + count[:, None]).clamp(max=self.tail - 1)[:, None].expand(-1, self.beam, -1)
        for name in TAIL:
            own[name] = own[name].gather(2, moved)
        own[LENGTH] = (own[LENGTH] - count[:, None]).clamp(min=0)

    def _read(self, fixed: list[Tensor]) -> list[SearchResult]:
        """To the host, all at once."""
        found = []
        for steps in torch.stack(fixed, 1).cpu():
            new: list[SearchToken] = []
            for step in steps:
                length, count = map(int, step[-2:].tolist())
                best = step[:-2].view(len(TAIL), -1)[:, :length].T.tolist()
                said = [SearchToken(int(token), int(frame), logprob) for token, frame, logprob in best]
                new += said[:count]
            found.append(SearchResult(new, said[count:]))
        return found


def _sum(likely: float, less: float) -> float:
    """Of probabilities, by their natural log."""
    return likely + math.log1p(math.exp(less - likely))


def _rows(of: Tensor) -> Tensor:
    return torch.arange(len(of), device=of.device)


def _repeated(first: Tensor, beam: int) -> Tensor:
    """(1, *shape) -> (1, beam, *shape)."""
    return first[:, None].repeat(1, beam, *[1] * (first.dim() - 1))


def _followed(key: Tensor, token: Tensor) -> Tensor:
    """The key of what `key` stands for, with one token more: 64 bits of a multiplicative hash that wraps around,
    so that two keys are equal by chance as good as never."""
    mixed = (key ^ (token + 1) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 31) * 0x14D049BB133111EB
    return mixed ^ mixed >> 29
