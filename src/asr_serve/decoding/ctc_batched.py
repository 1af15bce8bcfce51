"""CTC prefix beam search of many sessions as tensor operations of fixed shape, for any device.

One frame of all sessions is one sequence of operations whose shapes depend on the batch and the options alone, and
nothing is read back before the chunk ends: a CUDA graph records it. `decoding/ctc.py` has the same search in C++,
which is faster on a CPU and which the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.ctc import CtcBeamOptions
from asr_serve.decoding.language_model.scorer import TokenScorer
from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken

MAX_TAIL_TOKENS = 1 << 10
NONE = -math.inf


class BatchedCtcPrefixBeam:
    """Prefix beam search over a head `ctc`, of all sessions of a step at once.

    Out     As CtcPrefixBeam (decoding/ctc.py): the same hypotheses, scores, frames and ties.
    State   The hypotheses of the beam on the model's device, each with its tokens after the fixed ones: at most
            `tail` of them. Where a hypothesis would have more, those that do not begin as the best one does are
            dropped, so that its oldest token is fixed. `ctc_hash` and `ctc_tail_hashes` identify prefixes by 64 bits:
            hypotheses merge where these are equal.
    Score   CTC log-probability, plus `boost` for hotwords, plus `weight` times the language model's log-probability
            and `token_bonus` for each token.
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
        language_model: TokenScorer | None = None,
        weight: float = 0.5,
        token_bonus: float = 0.0,
    ) -> None:
        """`tail`: most tokens of a hypothesis that are not fixed. The others are fields of the class's description;
        `boost` None: a search without hotwords."""
        options.validate()
        if not 2 <= tail <= MAX_TAIL_TOKENS:
            raise OptionError(f"tail={tail}", f"2 to {MAX_TAIL_TOKENS}", param="tail")
        if not (math.isfinite(weight) and math.isfinite(token_bonus)):
            raise OptionError(f"weight={weight}, token_bonus={token_bonus}", "finite numbers", param="weight")
        self.model, self.options, self.tail, self.boost = model, options, tail, boost
        self.language_model, self.weight, self.token_bonus = language_model, weight, token_bonus
        self._advance = {False: device.capture(self._advance_chunk)}
        self._biased: tuple[StreamingBiasingList, _BatchedBiasing, Callable[..., tuple[Tensor, ...]]] | None = None
        self._device = device
        self._state: State = {}

    def state_specs(self) -> dict[str, StateSpec]:
        beam, tail = self.options.beam, self.tail
        return {
            "ctc_started": StateSpec((), torch.int64),
            "ctc_last": StateSpec((), torch.int64),
            "ctc_fixed_hash": StateSpec((), torch.int64),
            "ctc_scores": StateSpec((beam, 2), torch.float64, None),
            "ctc_gains": StateSpec((beam,), torch.float64, None),
            "ctc_biasing_nodes": StateSpec((beam,), torch.int64, None),
            "ctc_language_states": StateSpec((beam,), torch.int64, None),
            "ctc_lengths": StateSpec((beam,), torch.int64, None),
            "ctc_hash": StateSpec((beam,), torch.int64, None),
            "ctc_tail_hashes": StateSpec((beam, tail), torch.int64, None),
            "ctc_tail_tokens": StateSpec((beam, tail), torch.int64, None),
            "ctc_tail_frames": StateSpec((beam, tail), torch.int64, None),
            "ctc_tail_peaks": StateSpec((beam, tail), torch.float64, None),
            "ctc_tail_logprobs": StateSpec((beam, tail), torch.float32, None),
        }

    def step(
        self, hidden: Tensor, chunk: StreamingChunk, state: State, words: StreamingBiasingList | None = None
    ) -> list[SearchResult]:
        """`words`: hotwords of all these sessions; a session has one list, or none, from its first step on."""
        self._state = state
        logprobs = self.model.ctc_logprobs(hidden)
        numbers, scores = self._advance_for(words)(logprobs, chunk.rows, chunk.start_frames, chunk.frames)
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

    def finish(self, row: int, state: State, words: StreamingBiasingList | None = None) -> list[NBestHypothesis]:
        if not int(state["ctc_started"][row]):
            return [NBestHypothesis([], 0.0, 0.0)]
        saved = {name: state[name][row].cpu() for name in self.state_specs()}
        totals, gains = torch.logaddexp(*saved["ctc_scores"].unbind(-1)), saved["ctc_gains"]
        live = totals > NONE
        if words is not None:
            _, biasing, _ = self._biasing_for(words)
            gains = gains - biasing.partial_bonuses.cpu()[torch.where(live, saved["ctc_biasing_nodes"], 0)]
        if self.language_model is not None:
            states = torch.where(live, saved["ctc_language_states"], 0).to(state["ctc_language_states"].device)
            gains = gains + self.weight * self.language_model.final_logprobs(states).cpu()
        frames = _rising_frames(saved["ctc_tail_frames"][None], saved["ctc_lengths"][None])[0]
        hypotheses = []
        for i in live.nonzero()[:, 0].tolist():
            length = int(saved["ctc_lengths"][i])
            items = (saved["ctc_tail_tokens"][i], frames[i], saved["ctc_tail_logprobs"][i])
            tokens = [SearchToken(*item) for item in zip(*(x[:length].tolist() for x in items), strict=True)]
            hypotheses.append(NBestHypothesis(tokens, float(totals[i]), float(gains[i])))
        return sorted(hypotheses, key=lambda item: -(item.logprob + item.gain))

    # --- one chunk -------------------------------------------------------------------------------------

    def _advance_for(self, words: StreamingBiasingList | None) -> Callable[..., tuple[Tensor, ...]]:
        return self._advance[False] if words is None else self._biasing_for(words)[2]

    def _biasing_for(
        self, words: StreamingBiasingList
    ) -> tuple[StreamingBiasingList, _BatchedBiasing, Callable[..., tuple[Tensor, ...]]]:
        """The list on the device, and the search with it. The last list is cached: sessions come grouped by list."""
        assert self.boost is not None, "hotwords for a search that knows none"
        if self._biased is None or self._biased[0] is not words:
            biasing = _BatchedBiasing.compile(words, self.boost, self._device.torch_device)
            # Not recorded: a recording belongs to one list, and costs more than it saves before it is replayed.
            self._biased = words, biasing, partial(self._advance_chunk, biasing=biasing)
        return self._biased

    def _advance_chunk(
        self,
        logprobs: Tensor,
        rows: Tensor,
        start_frames: Tensor,
        frames: Tensor,
        biasing: _BatchedBiasing | None = None,
    ) -> tuple[Tensor, ...]:
        """Search the frames of a chunk and update the sessions' rows.

        Returns: numbers (n, 2 + 2 * (width + tail) + 2 * tail) int64: count of fixed tokens, length of the best
        tail, fixed tokens, their frames, tail's tokens, its frames; log-probabilities (n, width + 2 * tail) float32
        of fixed and tail tokens.
        """
        n, width, _ = logprobs.shape
        beams = self._load(rows)
        logprobs = torch.where(torch.isfinite(logprobs), logprobs, NONE)
        fixed = _FixedTokens.empty(n, width + self.tail, logprobs.device)
        tokens, token_logprobs = self._likely_tokens(logprobs)
        for frame in range(width):
            candidates = self._candidates(
                beams, logprobs[:, frame], tokens[:, frame], token_logprobs[:, frame], biasing
            )
            beams = self._select(beams, candidates, logprobs[:, frame], start_frames + frame, frame < frames)
            beams = self._fix(beams, fixed)
        for name, tensor in beams.to_state().items():
            self._state[name][rows] = tensor
        best_frames = _rising_frames(beams.tail_frames[:, :1], beams.lengths[:, :1])[:, 0]
        numbers = [
            fixed.counts[:, None],
            beams.lengths[:, :1],
            fixed.tokens,
            fixed.frames,
            beams.tail_tokens[:, 0],
            best_frames,
        ]
        return torch.cat(numbers, 1), torch.cat([fixed.logprobs, beams.tail_logprobs[:, 0]], 1)

    def _load(self, rows: Tensor) -> _Beams:
        state = self._state
        started = (state["ctc_started"][rows] > 0)[:, None]
        first = torch.arange(self.options.beam, device=rows.device) == 0
        empty = torch.where(first, 0.0, NONE).double()
        scores = state["ctc_scores"][rows]
        initial = 0 if self.language_model is None else self.language_model.initial_state

        def begun(name: str, value: float) -> Tensor:
            return torch.where(started, state[name][rows], value)

        return _Beams(
            blank=torch.where(started, scores[..., 0], empty),
            nonblank=torch.where(started, scores[..., 1], NONE),
            gains=begun("ctc_gains", 0.0),
            biasing_nodes=begun("ctc_biasing_nodes", 1),
            language_states=begun("ctc_language_states", initial),
            lengths=begun("ctc_lengths", 0),
            hashes=begun("ctc_hash", 0),
            last_fixed=state["ctc_last"][rows] - 1,
            fixed_hash=state["ctc_fixed_hash"][rows],
            tail_hashes=state["ctc_tail_hashes"][rows],
            tail_tokens=torch.where(started[:, :, None], state["ctc_tail_tokens"][rows], 0),
            tail_frames=state["ctc_tail_frames"][rows],
            tail_peaks=state["ctc_tail_peaks"][rows],
            tail_logprobs=state["ctc_tail_logprobs"][rows],
        )

    def _likely_tokens(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, frames, k) of each frame that may open new hypotheses, the likeliest first and of equals the
        smallest, and their log-probabilities; those that may not have -inf."""
        options = self.options
        count = min(options.tokens + 1, logprobs.shape[-1])  # one may be the blank
        tokens = logprobs.topk(count, -1).indices.sort(-1).values
        chosen = logprobs.gather(-1, tokens)
        barred = (tokens == self.model.blank_id) | (chosen < options.min_logprob)
        chosen, order = torch.where(barred, NONE, chosen).sort(dim=-1, descending=True, stable=True)
        return tokens.gather(-1, order)[..., : options.tokens], chosen[..., : options.tokens]

    def _candidates(
        self, beams: _Beams, logprobs: Tensor, tokens: Tensor, token_logprobs: Tensor, biasing: _BatchedBiasing | None
    ) -> _Candidates:
        """Hypotheses after a frame: those of the beam, then each of them one token further."""
        n, beam, count = len(logprobs), self.options.beam, tokens.shape[1]
        logprobs, token_logprobs = logprobs.double(), token_logprobs.double()
        totals, lasts = torch.logaddexp(beams.blank, beams.nonblank), beams.last_tokens
        is_parent = beams.is_parent(totals > NONE)
        parents, has_parent = is_parent.to(torch.uint8).argmax(-1), is_parent.any(-1)
        last_logprobs = torch.where(lasts >= 0, logprobs.gather(1, lasts.clamp(min=0)), NONE)
        # A repeated token needs a blank between.
        repeats = lasts.gather(1, parents) == lasts
        mass = torch.where(repeats, beams.blank.gather(1, parents), totals.gather(1, parents))
        from_parent = torch.where(has_parent, mass + last_logprobs, NONE)
        stay_blank = totals + logprobs[:, self.model.blank_id, None]
        stay_nonblank = torch.logaddexp(beams.nonblank + last_logprobs, from_parent)

        same_token = tokens[:, None, :] == lasts[:, :, None]  # (n, entry, k)
        mass = torch.where(same_token, beams.blank[:, :, None], totals[:, :, None])
        extended = mass + token_logprobs[:, None, :]
        # An entry that is already there takes this mass itself.
        there = torch.bmm(is_parent.transpose(1, 2).float(), (same_token & (lasts >= 0)[:, :, None]).float()) > 0
        extended = torch.where(there, NONE, extended)

        shape = (n, beam, count)
        gains, nodes, states = (
            each[:, :, None].expand(shape) for each in (beams.gains, beams.biasing_nodes, beams.language_states)
        )
        wide_tokens = tokens[:, None, :].expand(shape)
        if biasing is not None:
            nodes, bonus = biasing.step(nodes, wide_tokens)
            gains = gains + bonus
        if self.language_model is not None:
            language, states = self.language_model.score(states, wide_tokens)
            gains = gains + self.weight * language + self.token_bonus
        return _Candidates(
            blank=torch.cat([stay_blank, torch.full_like(extended, NONE).flatten(1)], 1),
            nonblank=torch.cat([stay_nonblank, extended.flatten(1)], 1),
            gains=torch.cat([beams.gains, gains.flatten(1)], 1),
            biasing_nodes=torch.cat([beams.biasing_nodes, nodes.flatten(1)], 1),
            language_states=torch.cat([beams.language_states, states.flatten(1)], 1),
            tokens=torch.cat([torch.full_like(beams.lengths, -1), wide_tokens.flatten(1)], 1),
        )

    def _select(self, beams: _Beams, found: _Candidates, logprobs: Tensor, frame: Tensor, valid: Tensor) -> _Beams:
        """The best candidates as the next beam. A session whose chunk has ended, or that can go nowhere, stays."""
        beam, tail = self.options.beam, self.tail
        ranks = torch.logaddexp(found.blank, found.nonblank) + found.gains
        ranks = torch.where(ranks.isnan(), NONE, ranks)
        ranks, order = ranks.sort(dim=-1, descending=True, stable=True)
        ranks, order = ranks[:, :beam], order[:, :beam]
        best = ranks[:, :1]
        moves = (valid & (best[:, 0] > NONE))[:, None]
        drops = (ranks < best - self.options.max_gap) | (ranks == NONE)
        places = torch.arange(beam, device=order.device)
        count = found.tokens.shape[1] // beam - 1
        entries = torch.where(order < beam, order, (order - beam) // max(count, 1))
        entries = torch.where(moves, entries, places)
        tokens = torch.where(moves, found.tokens.gather(1, order), -1)
        extends = tokens >= 0

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(moves, new.gather(1, order), old)

        blank, nonblank = chosen(found.blank, beams.blank), chosen(found.nonblank, beams.nonblank)
        drops = drops & moves
        blank, nonblank = (torch.where(drops, NONE, each) for each in (blank, nonblank))
        gains = chosen(found.gains, beams.gains)
        lengths, hashes = beams.lengths.gather(1, entries), beams.hashes.gather(1, entries)
        wide = entries[:, :, None].expand(-1, -1, tail)
        tails = {name: each.gather(1, wide) for name, each in beams.tails.items()}

        # A prefix that an old entry begins with keeps the frame at which it was likeliest.
        hashes = torch.where(extends, _mix(hashes, tokens), hashes)
        at = lengths.clamp(max=tail - 1)[:, None, :].expand(-1, beam, -1)  # (n, old entry, new entry)
        is_old = (beams.tail_hashes.gather(2, at) == hashes[:, None, :]) & (beams.lengths[:, :, None] > at)
        is_old = is_old & (torch.logaddexp(beams.blank, beams.nonblank) > NONE)[:, :, None]
        source, was = is_old.to(torch.uint8).argmax(1), is_old.any(1)  # (n, new entry)

        def inherited(name: str, otherwise: Tensor) -> Tensor:
            old = beams.tails[name].gather(2, at)  # (n, old, new)
            return torch.where(was, old.gather(1, source[:, None, :])[:, 0], otherwise)

        frames = frame[:, None].expand_as(entries)
        added = {
            "tail_hashes": hashes,
            "tail_tokens": tokens,
            "tail_frames": inherited("tail_frames", frames),
            "tail_peaks": inherited("tail_peaks", torch.full_like(nonblank, NONE)),
            "tail_logprobs": inherited("tail_logprobs", torch.full_like(nonblank, NONE, dtype=torch.float32)),
        }
        spot = torch.where(extends, lengths, tail)[:, :, None]  # column `tail` is thrown away
        tails = {name: _put(tails[name], spot, added[name][:, :, None]) for name in _TAILS}
        lengths = lengths + extends

        # The last token's frame is that at which the hypothesis was likeliest; all that begin with it share it.
        last = (lengths - 1).clamp(min=0)
        last_tokens = tails["tail_tokens"].gather(2, last[:, :, None])[..., 0]
        peak = nonblank + gains - best
        better = peak > tails["tail_peaks"].gather(2, last[:, :, None])[..., 0]
        live = torch.logaddexp(blank, nonblank) > NONE
        better = better & live & (lengths > 0) & moves
        at = last[:, None, :].expand(-1, beam, -1)  # (n, entry, entry whose last token it is)
        shares = (tails["tail_hashes"].gather(2, at) == hashes[:, None, :]) & (lengths[:, :, None] > at)
        spot = torch.where(shares & better[:, None, :], at, tail)
        heard = logprobs.gather(1, last_tokens.clamp(min=0))
        for name, value in (("tail_peaks", peak), ("tail_frames", frames), ("tail_logprobs", heard)):
            tails[name] = _put(tails[name], spot, value[:, None, :].expand(-1, beam, -1))
        return beams._replace(
            blank=blank,
            nonblank=nonblank,
            gains=gains,
            biasing_nodes=chosen(found.biasing_nodes, beams.biasing_nodes),
            language_states=chosen(found.language_states, beams.language_states),
            lengths=lengths,
            hashes=hashes,
            **tails,
        )

    def _fix(self, beams: _Beams, fixed: _FixedTokens) -> _Beams:
        """Move the tokens that all hypotheses begin with to `fixed`, and make room where a tail is full."""
        tail = self.tail
        beams = beams.force_first(beams.common_length(), tail)
        common = beams.common_length()
        places = torch.arange(tail, device=common.device)
        # No later than any token after it, or a token fixed afterwards could get an earlier frame.
        rising = _rising_frames(beams.tail_frames, beams.lengths)
        inside = (places < beams.lengths[:, :, None]) & beams.live[:, :, None]
        earliest = torch.where(inside, rising, _LATER).amin(1)
        fixed.append(common, beams.tail_tokens[:, 0], earliest, beams.tail_logprobs[:, 0])
        before = (common - 1).clamp(min=0)[:, None]
        some = common > 0
        index = (places + common[:, None]).clamp(max=tail - 1)[:, None].expand_as(beams.tail_tokens)
        return beams._replace(
            last_fixed=torch.where(some, beams.tail_tokens[:, 0].gather(1, before)[:, 0], beams.last_fixed),
            fixed_hash=torch.where(some, beams.tail_hashes[:, 0].gather(1, before)[:, 0], beams.fixed_hash),
            lengths=(beams.lengths - common[:, None]).clamp(min=0),
            **{name: each.gather(2, index) for name, each in beams.tails.items()},
        )


_TAILS = ("tail_hashes", "tail_tokens", "tail_frames", "tail_peaks", "tail_logprobs")
_LATER = 1 << 62


class _Beams(NamedTuple):
    """Beams of n sessions, best hypothesis first. Fields are (n, beam), those of fixed tokens (n,), and those of
    tails (n, beam, tail). A hypothesis whose scores are both -inf is not there."""

    blank: Tensor
    nonblank: Tensor
    gains: Tensor
    biasing_nodes: Tensor
    language_states: Tensor
    lengths: Tensor
    hashes: Tensor
    last_fixed: Tensor
    fixed_hash: Tensor
    tail_hashes: Tensor
    """Hash of the prefix that ends in each token."""
    tail_tokens: Tensor
    tail_frames: Tensor
    tail_peaks: Tensor
    tail_logprobs: Tensor

    @property
    def tails(self) -> dict[str, Tensor]:
        """Fields of tails by name."""
        return {name: tensor for name, tensor in self._asdict().items() if name in _TAILS}

    @property
    def live(self) -> Tensor:
        return torch.maximum(self.blank, self.nonblank) > NONE

    @property
    def last_tokens(self) -> Tensor:
        """(n, beam): last token of each hypothesis, -1 where it has none."""
        last = self.tail_tokens.gather(2, (self.lengths - 1).clamp(min=0)[:, :, None])[..., 0]
        return torch.where(self.lengths > 0, last, self.last_fixed[:, None])

    def is_parent(self, live: Tensor) -> Tensor:
        """(n, i, j): whether hypothesis j is i without its last token."""
        inner = self.tail_hashes.gather(2, (self.lengths - 2).clamp(min=0)[:, :, None])[..., 0]
        parent = torch.where(self.lengths > 1, inner, self.fixed_hash[:, None])
        equal = (parent[:, :, None] == self.hashes[:, None, :]) & (self.lengths[:, :, None] > 0)
        return equal & (self.lengths[:, :, None] == self.lengths[:, None, :] + 1) & live[:, :, None] & live[:, None, :]

    def common_length(self) -> Tensor:
        """(n,): tokens after the fixed ones with which all hypotheses begin."""
        places = torch.arange(self.tail_hashes.shape[2], device=self.hashes.device)
        same = (self.tail_hashes == self.tail_hashes[:, :1]) & (places < self.lengths[:, :, None])
        return (same | ~self.live[:, :, None]).all(1).long().cumprod(1).sum(1) * self.live.any(1)

    def force_first(self, common: Tensor, tail: int) -> _Beams:
        """Drop the hypotheses that do not begin as the best does, where one would leave no room for its next token;
        where the best has no token, those without room."""
        remains = self.lengths - common[:, None]
        full = (remains >= tail) & self.live
        differs = self.tail_hashes[:, :, 0] != self.tail_hashes[:, :1, 0]
        differs = differs | (self.lengths == 0)
        drops = torch.where((self.lengths[:, :1] > 0), differs, full) & full.any(1, keepdim=True)
        return self._replace(
            blank=torch.where(drops, NONE, self.blank), nonblank=torch.where(drops, NONE, self.nonblank)
        )

    def to_state(self) -> Mapping[str, Tensor]:
        return {
            "ctc_started": torch.ones_like(self.last_fixed),
            "ctc_last": self.last_fixed + 1,
            "ctc_fixed_hash": self.fixed_hash,
            "ctc_scores": torch.stack([self.blank, self.nonblank], -1),
            "ctc_gains": self.gains,
            "ctc_biasing_nodes": self.biasing_nodes,
            "ctc_language_states": self.language_states,
            "ctc_lengths": self.lengths,
            "ctc_hash": self.hashes,
        } | {f"ctc_{name}": tensor for name, tensor in self.tails.items()}


class _Candidates(NamedTuple):
    """Candidates for the next beam, (n, beam + beam * k): each hypothesis as it is, then each with each token."""

    blank: Tensor
    nonblank: Tensor
    gains: Tensor
    biasing_nodes: Tensor
    language_states: Tensor
    tokens: Tensor
    """Token by which a hypothesis is extended; -1: none."""


class _FixedTokens:
    """Tokens fixed during a chunk, (n, capacity), with their count (n,)."""

    def __init__(self, counts: Tensor, tokens: Tensor, frames: Tensor, logprobs: Tensor) -> None:
        self.counts, self.tokens, self.frames, self.logprobs = counts, tokens, frames, logprobs

    @classmethod
    def empty(cls, n: int, capacity: int, device: torch.device) -> _FixedTokens:
        numbers = torch.zeros(2, n, capacity, dtype=torch.int64, device=device)
        counts = torch.zeros(n, dtype=torch.int64, device=device)
        return cls(counts, numbers[0], numbers[1], torch.zeros(n, capacity, device=device))

    def append(self, count: Tensor, tokens: Tensor, frames: Tensor, logprobs: Tensor) -> None:
        """Append the first `count` (n,) of each row (n, tail)."""
        capacity = self.tokens.shape[1]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        spot = torch.where(places < count[:, None], self.counts[:, None] + places, capacity)
        self.tokens, self.frames = _put(self.tokens, spot, tokens), _put(self.frames, spot, frames)
        self.logprobs = _put(self.logprobs, spot, logprobs)
        self.counts = self.counts + count


class _BatchedBiasing(NamedTuple):
    """Hotword list on a device: an Aho-Corasick graph (decoding/biasing.py) whose arcs are found by one search in
    sorted keys."""

    keys: Tensor
    """(arcs,) int64, rising: node * vocab + token."""
    nexts: Tensor
    fails: Tensor
    partial_bonuses: Tensor
    word_bonuses: Tensor
    word_starts: Tensor
    depth: int
    """Most failure links from a node to its root."""

    @classmethod
    def compile(cls, words: StreamingBiasingList, boost: float, device: torch.device) -> _BatchedBiasing:
        arrays = words.arrays
        vocab, nodes = len(arrays.word_starts), len(arrays.fails)
        sources = torch.repeat_interleave(torch.arange(nodes), arrays.firsts.diff())
        depth, reached = 0, arrays.fails.clone()
        while bool((reached != 0).any()):
            reached, depth = arrays.fails[reached], depth + 1
        return cls(
            (sources * vocab + arrays.tokens).to(device),
            arrays.nexts.to(device),
            arrays.fails.to(device),
            (arrays.partial_bonuses * boost).to(device),
            (arrays.word_bonuses * boost).to(device),
            arrays.word_starts.bool().to(device),
            depth,
        )

    def step(self, nodes: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes after `tokens`, and their bonuses; all (n, beam, k)."""
        vocab, before = len(self.word_starts), self.partial_bonuses[nodes]
        target = torch.full_like(nodes, -1)
        for _ in range(self.depth + 2):
            wanted = nodes * vocab + tokens
            at = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
            found = (self.keys[at] == wanted) & (target < 0)
            target = torch.where(found, self.nexts[at], target)
            nodes = self.fails[nodes]
        target = target.clamp(min=0)
        bonus = self.word_bonuses[target] + self.partial_bonuses[target] - before
        return torch.where((target == 0) & self.word_starts[tokens], 1, target), bonus


def _mix(hashes: Tensor, tokens: Tensor) -> Tensor:
    """Hashes of prefixes (int64) one token longer: a multiplication that wraps around, and a shift that lets high
    bits reach low ones."""
    mixed = hashes * 6364136223846793005 + (tokens + 1) * 1442695040888963407
    return mixed ^ (mixed >> 29)


def _put(into: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Copy of `into` (..., size) with `values` at `index` of the last axis; index `size` writes nowhere."""
    room = torch.cat([into, into[..., :1]], -1)
    return room.scatter(-1, index, values.to(into.dtype))[..., :-1]


def _rising_frames(frames: Tensor, lengths: Tensor) -> Tensor:
    """Frames (n, beam, tail) of tokens, each before the next one's; arbitrary past `lengths` (n, beam)."""
    places = torch.arange(frames.shape[-1], device=frames.device)
    slack = torch.where(places < lengths[..., None], frames - places, _LATER)
    return slack.flip(-1).cummin(-1).values.flip(-1) + places
