"""Interface between beam searches and language models: shallow fusion.

Source  the score of a hypothesis is the recogniser's log-probability plus a weight times the language model's: Gulcehre
        et al. 2015, arXiv:1503.03535; for transducers and attention decoders as in Kannan et al. 2018, arXiv:1712.01996
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from asr_serve.models.interfaces import StreamingSearch

UNSEEN_LOGPROB = -23.0
"""Least log-probability in a language model of a token that a search cannot do without, or of the end of a sentence,
that of one in ten thousand million: the recogniser may have no other."""


class TokenScorer(Protocol):
    """Language model over the search's tokens, queried for all hypotheses of a step at once. Its states are int64.

    `NgramScorer` is one for n-gram models.
    """

    initial_state: int
    state_count: int
    """States are 0 to one less than this."""

    def score(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Natural-log probabilities (float64) of tokens (int64) in states (int64), all of one shape, and the states
        after them. Fixed shapes, no transfer to the host."""

    def final_logprobs(self, states: Tensor) -> Tensor:
        """Natural-log probabilities (float64) that the sentence ends in these states (int64)."""


class LanguageModelFusion(NamedTuple):
    """Language model of a search, or of some of its sessions. Compared by identity of the model and by weight."""

    scorer: TokenScorer
    weight: float
    """Factor of the language model's log-probabilities beside the recogniser's."""


@runtime_checkable
class RescoringSearch(StreamingSearch, Protocol):
    """Search that rescores what it has found at the end of a session, by a language model of its tokens."""

    def set_language_model(self, row: int, fusion: LanguageModelFusion | None) -> None:
        """Sets the language model of the session at `row`, before its first step or before its state is restored;
        None: it has none."""
