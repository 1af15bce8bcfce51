"""Beam search for attention decoders: extends the likeliest hypotheses until as many have ended.

Source  openai-whisper: patience 1; the score of a hypothesis is the mean of its tokens' log-probabilities.
        `tests/engine/seq2seq/test_batched_beam_search.py` compares with a plain implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing_graph import OPEN, BiasingGraph
from asr_serve.decoding.hypothesis import Finish

NEAR = 16
"""Extra candidates that may move into the top ones when bf16 logits are recomputed in float32, or with hot
words."""


class BeamHypothesis(NamedTuple):
    """Hypothesis of one beam."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token; of an ended hypothesis, of end-of-text too."""
    total: float = 0.0
    """Sum of the log-probabilities and of hot words' bonuses."""
    node: int = OPEN
    """Node in the biasing graph."""

    def extend(
        self, token: int, logprob: float, ended: bool, graph: BiasingGraph | None = None, boost: float = 0.0
    ) -> BeamHypothesis:
        tokens = self.tokens if ended else (*self.tokens, token)
        node, gain = self.node, 0.0
        if graph is not None:
            node, gain = (node, graph.final_cost(node)) if ended else graph.step(node, token)
        return BeamHypothesis(tokens, (*self.logprobs, logprob), self.total + logprob + boost * gain, node)

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
    ) -> None:
        """`graph`: hot words, at `node` after the tokens that are not searched; `boost`: bonus of a token of a hot
        word of weight 1, natural log."""
        self.width, self.eos, self.max_tokens = width, eos, max_tokens
        self.graph, self.boost = graph, boost
        self.live = [BeamHypothesis(node=node)]
        self.ended: list[BeamHypothesis] = []

    @property
    def choices(self) -> int:
        """Candidate tokens needed of each hypothesis: one of them may be end-of-text."""
        return self.width + 1 + (0 if self.graph is None else NEAR)

    def advance(self, leading: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Extends the beam. `leading[i]`: tokens that may follow `live[i]` and their log-probabilities, likeliest
        first. Returns the source index of each new live hypothesis; empty when the search is over."""
        candidates = [
            (hypothesis.extend(token, logprob, token == self.eos, self.graph, self.boost), source, token == self.eos)
            for source, (hypothesis, tokens) in enumerate(zip(self.live, leading, strict=True))
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate[0].total)
        live, sources = [], []
        for hypothesis, source, ended in candidates:
            if ended:
                if len(self.ended) < self.width:
                    self.ended.append(hypothesis)
                continue
            live.append(hypothesis)
            sources.append(source)
            if len(live) == self.width:
                break
        self.live = live
        finished = len(self.ended) >= self.width or not live or len(live[0].tokens) >= self.max_tokens
        return [] if finished else sources

    def best(self) -> tuple[BeamHypothesis, Finish]:
        """Returns the best ended hypothesis and why it finished; with fewer ended than `width`, the likeliest live
        ones compete too."""
        missing = max(0, self.width - len(self.ended))
        rest = sorted(self.live, key=lambda hypothesis: -hypothesis.total)[:missing]
        hypothesis = max([*self.ended, *rest], key=lambda hypothesis: hypothesis.score)
        return hypothesis, "stop" if len(hypothesis.logprobs) > len(hypothesis.tokens) else "length"


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
