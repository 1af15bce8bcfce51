"""Choice among the n-best list of a segment by a language model."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer


def rescore(
    answer: Recognition, text: Callable[[list[int]], str], scorer: SentenceScorer, weight: float, word_bonus: float
) -> Recognition:
    """Returns the answer with the best of its hypotheses: that with the highest sum of the search's log-probability,
    `weight` times that of the language model, and `word_bonus` for each word."""
    hypotheses = answer.hypotheses
    if len(hypotheses) < 2:
        return answer
    texts = [text(list(hypothesis.tokens)) for hypothesis in hypotheses]
    totals = [
        hypothesis.logprob + weight * score + word_bonus * len(written.split())
        for hypothesis, written, score in zip(hypotheses, texts, scorer.score(texts), strict=True)
    ]
    best = hypotheses[max(range(len(totals)), key=totals.__getitem__)]
    if best is hypotheses[0]:
        return answer
    return msgspec.structs.replace(
        answer,
        tokens=best.tokens,
        logprobs=best.logprobs,
        times=best.times,
        avg_logprob=sum(best.logprobs) / max(1, len(best.logprobs)),
    )
