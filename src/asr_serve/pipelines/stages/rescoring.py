"""Choice among the n-best lists of segments by a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer
from asr_serve.pipelines.stages.pipeline_file import RescoreStage


def rescore(
    answers: Sequence[Recognition],
    texts: Sequence[Callable[[list[int]], str]],
    scorer: SentenceScorer,
    stage: RescoreStage,
) -> list[Recognition]:
    """Returns the answers of several segments, each with the best of its hypotheses: that with the highest sum of its
    log-probability, `weight` times that of the language model, and `word_bonus` for each word. The sums are the
    log-probabilities of the new n-best list, the best first. The language model scores all hypotheses in one call.
    `texts`: for each answer, the text of its model's tokens."""
    lists = [answer.hypotheses[: stage.hypotheses] for answer in answers]
    sentences = [
        [text(list(hypothesis.tokens)) for hypothesis in each] for text, each in zip(texts, lists, strict=True)
    ]
    scores = iter(scorer.score([sentence for each in sentences for sentence in each]))
    rescored = []
    for answer, hypotheses, written in zip(answers, lists, sentences, strict=True):
        totals = [
            hypothesis.logprob + stage.weight * next(scores) + stage.word_bonus * len(sentence.split())
            for hypothesis, sentence in zip(hypotheses, written, strict=True)
        ]
        order = sorted(range(len(totals)), key=lambda index: -totals[index])
        rescored.append(
            _with_hypotheses(
                answer, [msgspec.structs.replace(hypotheses[index], logprob=totals[index]) for index in order]
            )
        )
    return rescored


def _with_hypotheses(answer: Recognition, hypotheses: Sequence[RecognitionHypothesis]) -> Recognition:
    if not hypotheses:
        return answer
    best = hypotheses[0]
    return msgspec.structs.replace(
        answer,
        tokens=best.tokens,
        logprobs=best.logprobs,
        times=best.times,
        avg_logprob=sum(best.logprobs) / max(1, len(best.logprobs)),
        hypotheses=tuple(hypotheses),
    )
