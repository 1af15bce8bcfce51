"""CTC searches over a streaming model's head `ctc`, chunk by chunk: greedy best path and prefix beam search.

Both work on natural-log probabilities; the state rows of a session are described with each class.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr_serve import kernels
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.errors import OptionError
from asr_serve.kernels import ctc_search_reference
from asr_serve.models.interfaces import State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken

BEAM = ("ctc_counts", "ctc_heads", "ctc_scores", "ctc_nodes", "ctc_peaks")
MAX_BEAM = 256
MAX_NODES = 1 << 16


class CtcGreedy:
    """Greedy CTC: the likeliest symbol of every frame, repeats and blanks removed.

    Out     every token fixed at once, at the first frame of its run, with its log-probability there
    State   ctc_last (): the last frame's symbol; ctc_score (): log-probability of the path so far
    Source  Graves et al. 2006, best path decoding
    """

    def __init__(self, model: StreamingModel) -> None:
        self.model = model

    def state_specs(self) -> dict[str, StateSpec]:
        return {
            "ctc_last": StateSpec((), torch.int64, initial_value=float(self.model.blank_id)),
            "ctc_score": StateSpec((), torch.float64),
        }

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        best, ids = self.model.ctc_logprobs(hidden).max(-1)
        n, width = ids.shape
        last, score = state["ctc_last"], state["ctc_score"]
        previous = torch.cat([last[chunk.rows, None], ids], 1)
        valid = torch.arange(width, device=ids.device) < chunk.frames[:, None]
        emitted = (ids != self.model.blank_id) & (ids != previous[:, :-1]) & valid
        # Summed frame by frame: the score is bit-identical for any chunking.
        scores = torch.cat([score[chunk.rows, None], best.double()], 1).cumsum(1)
        last[chunk.rows] = previous.gather(1, chunk.frames[:, None])[:, 0]
        score[chunk.rows] = scores.gather(1, chunk.frames[:, None])[:, 0]
        results: list[SearchResult] = [SearchResult([], []) for _ in range(n)]
        rows, frames = emitted.nonzero(as_tuple=True)
        emissions = (ids[rows, frames], chunk.start_frames[rows] + frames, best[rows, frames])
        for row, *token in zip(rows.tolist(), *(x.tolist() for x in emissions), strict=True):
            results[row].fixed_tokens.append(SearchToken(*token))
        return results

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return [NBestHypothesis([], float(state["ctc_score"][row]))]


class CtcBeamOptions(NamedTuple):
    """Pruning limits of a prefix beam search. Existing hypotheses are always extended exactly."""

    beam: int = 16
    """Hypotheses."""
    tokens: int = 16
    """Most tokens of a frame that open new hypotheses."""
    min_logprob: float = -8.0
    """Natural-log probability below which a token opens none."""
    max_gap: float = 12.0
    """Hypotheses this much less likely than the best are dropped, natural log."""

    def validate(self) -> None:
        """Raises OptionError for options out of range."""
        for name, value, most in (("beam", self.beam, MAX_BEAM), ("tokens", self.tokens, None)):
            if value < 1 or (most and value > most):
                raise OptionError(f"{name}={value}", f"1 to {most}" if most else "1 or more", param=name)
        if math.isnan(self.min_logprob):
            raise OptionError(f"min_logprob={self.min_logprob}", "a log-probability, -inf for all", param="min_logprob")
        if not self.max_gap >= 0:
            raise OptionError(f"max_gap={self.max_gap}", "0 or more, inf for all", param="max_gap")


class CtcPrefixBeam:
    """Prefix beam search: the likeliest token sequences, each summed over all its alignments.

    Out     A token's frame is the one at which the hypothesis ending in it was likeliest relative to the best one
            of that frame: the first emission is often an early flank of the peak, and far too early when little is
            pruned. Its logprob is that frame's. Frames of a hypothesis rise from token to token: where two peaks
            are in the wrong order, the earlier token is moved before the later. The prefix shared by all
            hypotheses is fixed; the tail is the rest of the best one. The result does not depend on chunk
            boundaries or on other rows. Ties: existing hypotheses come before new ones, in their order; new ones
            are ordered by the hypothesis they extend, then by token.
    Score   CTC log-probability, plus `boost` for hotwords, plus the language model's log-probabilities times their
            weight and `token_bonus` for each token
    State   ctc_counts, ctc_heads, ctc_scores, ctc_nodes, ctc_peaks (with hotwords ctc_spots, with a language model
            ctc_contexts, with either ctc_gains), on the host: the beam, and the tree of tokens after the fixed
            prefix; layout in `kernels/ctc_search_reference.py`. When the tree outgrows `nodes`, the best hypothesis's
            oldest token is fixed and hypotheses that do not begin with it are dropped.
    Raises  OptionError for options out of range
    Source  Hannun et al. 2014, arXiv:1408.2873; tests/decoding/test_ctc.py compares with other searches
    """

    def __init__(
        self,
        model: StreamingModel,
        beam: int = 16,
        *,
        tokens: int = 16,
        min_logprob: float = -8.0,
        max_gap: float = 12.0,
        nodes: int | None = None,
        boost: float | None = None,
        fuses: bool = False,
        token_bonus: float = 0.0,
    ) -> None:
        """Sets the pruning limits. Existing hypotheses are always extended exactly.

        Args:
            tokens: most tokens of a frame that open new hypotheses
            min_logprob: tokens below it open none
            max_gap: hypotheses this much less likely than the best are dropped, natural log
            nodes: nodes of the tree; None: 16 for each hypothesis
            boost: bonus of each token of a hotword of weight 1, natural log; None: a search without hotwords
            fuses: sessions may have an n-gram model
            token_bonus: bonus of each token of a session with an n-gram model, natural log
        """
        CtcBeamOptions(beam, tokens, min_logprob, max_gap).validate()
        nodes = 16 * beam if nodes is None else nodes
        if not 1 <= nodes <= MAX_NODES:
            raise OptionError(f"nodes={nodes}", f"1 to {MAX_NODES}", param="nodes")
        self.model, self.beam, self.nodes = model, beam, nodes
        self.tokens, self.min_logprob, self.max_gap = tokens, min_logprob, max_gap
        if not math.isfinite(token_bonus):
            raise OptionError(f"token_bonus={token_bonus}", "a finite number", param="token_bonus")
        self.boost, self.fuses, self.token_bonus = boost, fuses, token_bonus
        self._native = kernels.search()

    def state_specs(self) -> dict[str, StateSpec]:
        specs = {
            "ctc_counts": StateSpec((3,), torch.int64, on_host=True),
            "ctc_heads": StateSpec((self.beam,), torch.int64, None, on_host=True),
            "ctc_scores": StateSpec((self.beam, 2), torch.float64, None, on_host=True),
            "ctc_nodes": StateSpec((self.nodes, 3), torch.int64, None, on_host=True),
            "ctc_peaks": StateSpec((self.nodes, 2), torch.float64, None, on_host=True),
        }
        if self.boost is not None:
            specs["ctc_spots"] = StateSpec((self.beam,), torch.int64, None, on_host=True)
        if self.fuses:
            specs["ctc_contexts"] = StateSpec((self.beam,), torch.int64, None, on_host=True)
        if self.boost is not None or self.fuses:
            specs["ctc_gains"] = StateSpec((self.beam,), torch.float64, None, on_host=True)
        return specs

    def step(
        self,
        hidden: Tensor,
        chunk: StreamingChunk,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
        weights: Tensor | None = None,
    ) -> list[SearchResult]:
        """`words`, `fusion`: hotwords and n-gram model of all these sessions; a session has the same ones, or none,
        from its first step on. `weights` (n,) float64: of each session's language model, in place of that of `fusion`;
        the kernel takes one, so that the sessions of each weight are searched by a call of their own."""
        if fusion is not None and weights is not None:
            return self._step_by_weight(hidden, chunk, state, words, fusion, weights)
        results = self._native.step(
            self.model.ctc_logprobs(hidden).cpu(),
            chunk.rows.cpu(),
            chunk.start_frames.cpu(),
            chunk.frames.cpu(),
            *(state[name] for name in BEAM),
            self.model.blank_id,
            self.tokens,
            self.min_logprob,
            self.max_gap,
            torch.get_num_threads(),
            self._bias(state, words),
            self._language(state, fusion),
        )
        return [
            SearchResult([SearchToken(*t) for t in fixed], [SearchToken(*t) for t in tail]) for fixed, tail in results
        ]

    def _step_by_weight(
        self,
        hidden: Tensor,
        chunk: StreamingChunk,
        state: State,
        words: StreamingBiasingList | None,
        fusion: LanguageModelFusion,
        weights: Tensor,
    ) -> list[SearchResult]:
        results: list[SearchResult] = [SearchResult([], [])] * len(hidden)
        for weight in sorted(set(weights.tolist())):
            at = (weights == weight).nonzero()[:, 0]
            part = StreamingChunk(*(each[at.to(each.device)] for each in chunk))
            found = self.step(hidden[at.to(hidden.device)], part, state, words, fusion._replace(weight=weight))
            for index, result in zip(at.tolist(), found, strict=True):
                results[index] = result
        return results

    def finish(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> list[NBestHypothesis]:
        best = ctc_search_reference.nbest(
            row, tuple(state[name] for name in BEAM), self._bias(state, words), self._language(state, fusion)
        )
        return [NBestHypothesis([SearchToken(*t) for t in tokens], logprob, gain) for tokens, logprob, gain in best]

    def validate_row(
        self,
        row: int,
        state: State,
        words: StreamingBiasingList | None = None,
        fusion: LanguageModelFusion | None = None,
    ) -> None:
        """Raises ValueError as RowValidatingSearch.validate_row: what a step refuses, `finish` refuses of one row."""
        self.finish(row, state, words, fusion)

    def _bias(self, state: State, words: StreamingBiasingList | None) -> tuple[Any, ...] | None:
        if words is None:
            return None
        assert self.boost is not None, "hotwords for a search that knows none"
        return words.bias(state["ctc_spots"], state["ctc_gains"], self.boost)

    def _language(self, state: State, fusion: LanguageModelFusion | None) -> tuple[Any, ...] | None:
        if fusion is None:
            return None
        assert self.fuses, "a language model for a search that fuses none"
        assert isinstance(fusion.scorer, NgramScorer), "the native search reads the arrays of n-gram models alone"
        return (state["ctc_contexts"], state["ctc_gains"], *fusion.scorer.model, fusion.weight, self.token_bonus)
