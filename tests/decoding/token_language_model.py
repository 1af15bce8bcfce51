"""Language models over a few tokens, for tests of searches: random n-gram models, and searches bound to one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from torch import Tensor

from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.models.interfaces import NBestHypothesis, SearchResult, State, StateSpec, StreamingChunk
from asr_serve.models.ngram import NgramModel


def token_model(seed: int, tokens: list[int], order: int = 3) -> NgramModel:
    """Model of random sentences of tokens, all of which occur."""
    drawn = random.Random(seed)
    text = [[str(drawn.choice(tokens)) for _ in range(drawn.randint(0, 5))] for _ in range(30)]
    return train([*text, [str(token) for token in tokens]], order).to_model().reindexed({str(t): t for t in tokens})


def sentence_logprob(model: NgramModel, tokens: tuple[int, ...], *, ended: bool = True) -> float:
    state, total = model.start_state, 0.0
    for token in tokens:
        logprob, state = model.step(state, token)
        total += logprob
    return total + float(model.final_logprobs[state]) * ended


class FusedSearch(NamedTuple):
    """`StreamingSearch` whose sessions all have one language model."""

    search: Any
    fusion: LanguageModelFusion | None

    @classmethod
    def of(cls, search: Any, model: NgramModel, weight: float) -> FusedSearch:
        return cls(search, LanguageModelFusion(NgramScorer(model), weight))

    def state_specs(self) -> dict[str, StateSpec]:
        return self.search.state_specs()

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        return self.search.step(hidden, chunk, state, None, self.fusion)

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        return self.search.finish(row, state, None, self.fusion)
