"""Scores of whole sentences, for the rescoring of n-best lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asr_serve.decoding.language_model.ngram_tables import WordNgrams

UNKNOWN_LOGPROB = -16.0
"""Natural-log probability of a word that a model without <unk> lacks."""


class SentenceScorer(Protocol):
    """Language model that scores sentences."""

    def score(self, sentences: Sequence[str]) -> list[float]:
        """Natural-log probability of each sentence. Sentences without words are allowed."""


class NgramSentenceScorer:
    """SentenceScorer over an n-gram model of words that spaces separate. The end of the sentence counts.

    Words are looked up as written, and in lower case where the model lacks them so.
    """

    def __init__(self, ngrams: WordNgrams) -> None:
        self._model, self._unknown = ngrams.model, ngrams.unknown
        self._ids = {word: index for index, word in enumerate(ngrams.words)}

    def score(self, sentences: Sequence[str]) -> list[float]:
        return [self._score(sentence) for sentence in sentences]

    def _score(self, sentence: str) -> float:
        state, total = self._model.start_state, 0.0
        for word in sentence.split():
            index = self._ids.get(word, self._ids.get(word.lower(), self._unknown))
            if index is None:
                total, state = total + UNKNOWN_LOGPROB, 0
            else:
                logprob, state = self._model.step(state, index)
                total += max(logprob, UNKNOWN_LOGPROB)
        return total + max(float(self._model.final_logprobs[state]), UNKNOWN_LOGPROB)
