"""Beam search for attention decoders: the likeliest few ways to go on, until as many have ended.

Source  openai-whisper's: patience 1, an answer's score is the mean of its tokens' log-probabilities.
        `tests/engine/seq2seq/test_batched_beam_search.py` compares with all of it written out plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.biasing import OPEN, BiasingGraph
from asr_serve.decoding.seq2seq import Finish

NEAR = 16
"""Tokens beside the wanted ones that may be among the likeliest when their logits are known better."""


class BeamHypothesis(NamedTuple):
    """What one beam has said."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of the tokens; of one that has ended, of end-of-text too."""
    total: float = 0.0
    """With what its hot words are worth."""
    node: int = OPEN
    """Where it is in the graph of hot words."""

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
    """Of one answer. It is told what each way may go on with, and tells from which each new one came."""

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
        """`graph`: of hot words, at `node` after what is not searched; `boost`: what a token of theirs is given,
        in natural-log probability, where it weighs 1."""
        self.width, self.eos, self.max_tokens = width, eos, max_tokens
        self.graph, self.boost = graph, boost
        self.live = [BeamHypothesis(node=node)]
        self.ended: list[BeamHypothesis] = []

    @property
    def choices(self) -> int:
        """How many tokens of each way must be known: one of them may be end-of-text."""
        return self.width + 1 + (0 if self.graph is None else NEAR)

    def advance(self, leading: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """`leading[i]`: tokens that may follow `live[i]` and their log-probabilities, likeliest first. Which way
        each of the new ones goes on from; empty when the search is over."""
        found = [
            (way.extend(token, logprob, token == self.eos, self.graph, self.boost), source, token == self.eos)
            for source, (way, tokens) in enumerate(zip(self.live, leading, strict=True))
            for token, logprob in tokens
        ]
        found.sort(key=lambda each: -each[0].total)
        live, sources = [], []
        for way, source, ended in found:
            if ended:
                if len(self.ended) < self.width:
                    self.ended.append(way)
                continue
            live.append(way)
            sources.append(source)
            if len(live) == self.width:
                break
        self.live = live
        over = len(self.ended) >= self.width or not live or len(live[0].tokens) >= self.max_tokens
        return [] if over else sources

    def best(self) -> tuple[BeamHypothesis, Finish]:
        """Of what has ended; and of the rest, likeliest first, if that is too few to choose from."""
        short = max(0, self.width - len(self.ended))
        rest = sorted(self.live, key=lambda way: -way.total)[:short]
        way = max([*self.ended, *rest], key=lambda way: way.score)
        return way, "stop" if len(way.logprobs) > len(way.tokens) else "length"


def top_tokens(logits: Tensor, hidden: Tensor, weight: Tensor | None, count: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row, at most `count`, and their natural-log probabilities, likeliest first;
    what cannot be said is left out.

    In      logits (rows, vocabulary), hidden (rows, width) they were made from, weight (vocabulary, width), which
            bf16 logits need

    As where the likeliest one is picked (kernels/reference.pick), bf16 logits are computed again in float32.
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
