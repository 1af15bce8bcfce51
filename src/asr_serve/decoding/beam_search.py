"""Beam search for attention decoders: extends the likeliest hypotheses until as many have ended.

Source  openai-whisper: patience 1; the score of a hypothesis is the mean of its tokens' log-probabilities.
        `tests/engine/seq2seq/test_batched_beam_search.py` compares with a plain implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing_graph import OPEN, BiasingGraph
from asr_serve.decoding.hypothesis import Finish
from asr_serve.decoding.language_model.scorer import UNSEEN_LOGPROB, LanguageModelFusion

NEAR = 16
"""Extra candidates that may move into the top ones when bf16 logits are recomputed in float32, or with hotwords or a
language model."""


class LanguageScore(NamedTuple):
    """Part of a language model in a candidate: weighted log-probability, and the state after the token."""

    bonus: float
    state: int


class BeamHypothesis(NamedTuple):
    """Hypothesis of one beam."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token; of an ended hypothesis, of end-of-text too."""
    total: float = 0.0
    """Sum of the log-probabilities, of hotwords' bonuses and of the language model's weighted log-probabilities."""
    node: int = OPEN
    """Node in the biasing graph."""
    language_state: int = 0
    """State of the language model."""

    def extend(
        self,
        token: int,
        logprob: float,
        ended: bool,
        graph: BiasingGraph | None = None,
        boost: float = 0.0,
        language: LanguageScore | None = None,
    ) -> BeamHypothesis:
        tokens = self.tokens if ended else (*self.tokens, token)
        node, gain = self.node, 0.0
        if graph is not None:
            node, gain = (node, graph.final_cost(node)) if ended else graph.step(node, token)
        bonus, state = language or (0.0, 0)
        total = self.total + logprob + boost * gain + bonus
        return BeamHypothesis(tokens, (*self.logprobs, logprob), total, node, state)

    @property
    def score(self) -> float:
        return self.total / max(1, len(self.tokens))


class BeamSearch:
    """Beam search of one answer. Each step takes the candidates of every live hypothesis and returns which one
    each new hypothesis extends."""

    def __init__(
        self,
        width: int,
        eos: int,
        max_tokens: int,
        *,
        graph: BiasingGraph | None = None,
        node: int = OPEN,
        boost: float = 0.0,
        fusion: LanguageModelFusion | None = None,
        language_state: int = 0,
        text_below: int | None = None,
        stop_tokens: Collection[int] = (),
    ) -> None:
        """`graph`: hotwords, at `node` after the tokens that are not searched; `boost`: bonus of a token of a hot
        word of weight 1, natural log. `fusion`: language model, in `language_state` after those tokens; tokens from
        `text_below` on, None: none, are no text, and it ignores them.
        `stop_tokens`: those that end an answer as `eos` does."""
        self.width, self.ends, self.max_tokens = width, frozenset((eos, *stop_tokens)), max_tokens
        self.graph, self.boost, self.fusion, self.text_below = graph, boost, fusion, text_below
        self.live = [BeamHypothesis(node=node, language_state=language_state)]
        self.ended: list[BeamHypothesis] = []

    @property
    def choices(self) -> int:
        """Candidate tokens needed of each hypothesis: some of them may end it."""
        return self.width + len(self.ends) + (0 if self.graph is None and self.fusion is None else NEAR)

    def advance(
        self, leading: Sequence[Sequence[tuple[int, float]]], language: Sequence[Sequence[LanguageScore]] | None = None
    ) -> list[int]:
        """Extends the beam. `leading[i]`: tokens that may follow `live[i]` and their log-probabilities, likeliest
        first. `language`: the language model's part in each of them; with a `fusion` only, see `language_scores`.
        Returns the source index of each new live hypothesis; empty when the search is over."""
        candidates = []
        for source, (hypothesis, tokens) in enumerate(zip(self.live, leading, strict=True)):
            for i, (token, logprob) in enumerate(tokens):
                ended, score = token in self.ends, language[source][i] if language else None
                extended = hypothesis.extend(token, logprob, ended, self.graph, self.boost, score)
                candidates.append((extended, source, ended))
        candidates.sort(key=lambda candidate: -candidate[0].total)
        live, sources = [], []
        for hypothesis, source, ended in candidates:
            if ended:
                again = any(other.tokens == hypothesis.tokens for other in self.ended)  # by a less likely end
                if len(self.ended) < self.width and not again:
                    self.ended.append(hypothesis)
                continue
            live.append(hypothesis)
            sources.append(source)
            if len(live) == self.width:
                break
        self.live = live
        finished = len(self.ended) >= self.width or not live or len(live[0].tokens) >= self.max_tokens
        return [] if finished else sources

    def language_score(self, state: int, token: int, logprob: float, after: int, end: float) -> LanguageScore:
        """Returns the language model's part in a candidate. `logprob`, `after`: of the token in `state`, and the
        state after it; `end`: log-probability that the sentence ends in `state`."""
        assert self.fusion is not None
        if token not in self.ends and self.text_below is not None and token >= self.text_below:
            return LanguageScore(0.0, state)
        logprob, after = (end, state) if token in self.ends else (logprob, after)
        return LanguageScore(self.fusion.weight * max(logprob, UNSEEN_LOGPROB), after)

    def n_best(self) -> tuple[list[BeamHypothesis], Finish]:
        """Returns the ended hypotheses, the best first, and why that finished; with fewer ended than `width`, the
        likeliest live ones compete too."""
        missing = max(0, self.width - len(self.ended))
        rest = sorted(self.live, key=lambda hypothesis: -hypothesis.total)[:missing]
        ranked = sorted([*self.ended, *rest], key=lambda hypothesis: -hypothesis.score)
        return ranked, "stop" if len(ranked[0].logprobs) > len(ranked[0].tokens) else "length"


def language_scores(
    searches: Sequence[BeamSearch], leading: Sequence[Sequence[Sequence[tuple[int, float]]]], device: torch.device
) -> list[list[list[LanguageScore]]]:
    """Returns the language model's part in the candidates of searches that all have one, in the form of
    BeamSearch.advance: one query for each model. `leading`: as there, of each search; `device`: of the models."""
    by_scorer: dict[int, list[int]] = {}
    for index, search in enumerate(searches):
        assert search.fusion is not None
        by_scorer.setdefault(id(search.fusion.scorer), []).append(index)
    found: list[list[list[LanguageScore]]] = [[] for _ in searches]
    for indices in by_scorer.values():
        fusion = searches[indices[0]].fusion
        assert fusion is not None
        rows = [
            (index, hypothesis.language_state, tokens)
            for index in indices
            for hypothesis, tokens in zip(searches[index].live, leading[index], strict=True)
        ]
        states = torch.tensor([state for _, state, tokens in rows for _ in tokens], dtype=torch.int64, device=device)
        wanted = torch.tensor([token for *_, tokens in rows for token, _ in tokens], dtype=torch.int64, device=device)
        logprobs, after = fusion.scorer.score(states, wanted)
        ends = fusion.scorer.final_logprobs(states)
        scores = iter(zip(logprobs.tolist(), after.tolist(), ends.tolist(), strict=True))
        for index, state, tokens in rows:
            search = searches[index]
            found[index].append([search.language_score(state, token, *next(scores)) for token, _ in tokens])
    return found


def language_state_after(fusion: LanguageModelFusion, tokens: Sequence[int], device: torch.device) -> int:
    """Returns the state of the language model after a sentence that begins with `tokens`, all of them text."""
    state = torch.tensor([fusion.scorer.initial_state], device=device)
    for token in tokens:
        _, state = fusion.scorer.score(state, torch.tensor([token], device=device))
    return int(state)


def top_tokens(logits: Tensor, hidden: Tensor, weight: Tensor | None, count: int) -> list[list[tuple[int, float]]]:
    """Returns the likeliest tokens of each row, at most `count`, and their natural-log probabilities, likeliest
    first; tokens of probability 0 are omitted.

    In      logits (rows, vocabulary), hidden (rows, width) they were made from, weight (vocabulary, width), which
            bf16 logits need

    As in greedy choice (kernels/reference.pick), bf16 logits of the candidates are recomputed in float32.
    """
    values = logits.float()
    total = values.logsumexp(dim=-1, keepdim=True)
    fuzzy = logits.dtype == torch.bfloat16
    most = values.topk(min(count + NEAR * fuzzy, values.shape[-1]), dim=-1)
    exact, tokens = most.values, most.indices
    if fuzzy:
        assert weight is not None
        product = (weight[tokens].float() @ hidden.float()[:, :, None])[:, :, 0]
        exact = torch.where(exact.isfinite(), product, exact)
        order = exact.argsort(dim=-1, descending=True)[:, :count]
        exact, tokens = exact.gather(1, order), tokens.gather(1, order)
    logprobs = (exact - total).clamp(max=0.0)
    rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [[(t, score) for t, score in zip(*row, strict=True) if score > float("-inf")] for row in rows]
