"""Search for attention decoders: greedy first, sampled again when the greedy answer is no speech.

Source  temperature fall-back and its thresholds: Whisper, arXiv:2212.04356, section 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal

import msgspec

from asr_serve.errors import OptionError
from asr_serve.types import Phases

Finish = Literal["stop", "length", "repetition"]


class Draft(msgspec.Struct, frozen=True):
    """What an utterance was heard as before, when less of it was known. It is verified many tokens at a time, as
    far as it holds; the answer is what decoding without it would have been, but for the first `fixed` tokens:
    they are taken as they are.

    Source: speculative decoding, arXiv:2211.17192, with greedy choice.
    """

    tokens: tuple[int, ...] = ()
    fixed: int = 0

    def up_to(self, limit: int) -> Draft:
        """No longer than `limit` tokens."""
        tokens = self.tokens[:limit]
        return Draft(tokens, min(self.fixed, len(tokens)))


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How hard to try. Raises OptionError for values out of range."""

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    """Tried in order until an answer passes; 0 is greedy."""
    min_avg_logprob: float = -1.0
    max_compression_ratio: float = 2.4
    """Text that zlib shrinks more than this repeats itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 <= t <= 2 for t in self.temperatures):
            raise OptionError(f"temperatures={self.temperatures}", "one or more numbers from 0 to 2")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed={self.seed}", "a whole number from 0 to 2**63 - 1")


NO_DRAFT = Draft()


class Recognition(msgspec.Struct, frozen=True):
    """What one utterance was heard as."""

    tokens: tuple[int, ...]
    avg_logprob: float
    temperature: float
    finish: Finish
    compression_ratio: float
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token; end-of-text is not among them."""
    phases: Phases | None = None
    """When the engine worked on it; the loop fills it in."""


class Hypothesis:
    """The growing answer of one decoding row."""

    def __init__(
        self,
        options: SearchOptions,
        eos: int,
        max_tokens: int,
        text: Callable[[list[int]], str],
        draft: Draft = NO_DRAFT,
    ) -> None:
        self.options, self.eos, self.max_tokens, self.text = options, eos, max_tokens, text
        # A row that samples from the start has nothing to compare a draft with.
        self.draft = draft.up_to(
            min(max_tokens - 1, len(draft.tokens) if options.temperatures[0] == 0 else draft.fixed)
        )
        self.fixed = self.draft.fixed
        self.attempt = 0
        self.rejected: list[Recognition] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    @property
    def temperature(self) -> float:
        return self.options.temperatures[self.attempt]

    def add(self, token: int, logprob: float) -> Finish | None:
        """Take the next token; tells when the row is finished, and why. The first `fixed` must be the draft's."""
        self.logprobs.append(logprob)
        if token == self.eos:
            return "stop"
        self.tokens.append(token)
        if (loop := min(looping(self.tokens), len(self.tokens) - self.fixed)) > 0:
            # What is kept says the phrase once; the rest was never spoken.
            del self.tokens[-loop:], self.logprobs[-loop:]
            return "repetition"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def settle(self, finish: Finish) -> Recognition | None:
        """The answer, or None when the row must be decoded again at the next temperature."""
        answer = Recognition(
            tuple(self.tokens),
            sum(self.logprobs) / max(1, len(self.logprobs)),
            self.temperature,
            finish,
            compression_ratio(self.text(self.tokens)),
            tuple(self.logprobs[: len(self.tokens)]),
        )
        if self._accepts(answer):
            return answer
        self.rejected.append(answer)
        if self.attempt + 1 < len(self.options.temperatures):
            self.attempt += 1
            del self.tokens[self.fixed :], self.logprobs[self.fixed :]
            return None
        whole = [r for r in self.rejected if r.finish == "stop"]
        return max(whole or self.rejected, key=lambda r: r.avg_logprob)

    def _accepts(self, answer: Recognition) -> bool:
        return (
            answer.finish != "repetition"
            and answer.avg_logprob >= self.options.min_avg_logprob
            and answer.compression_ratio <= self.options.max_compression_ratio
        )


def looping(tokens: list[int]) -> int:
    """How many tokens at the end are needless repeats of a phrase; 0 when it is not looping.

    A phrase of up to 24 tokens said at least four times over at least 16 tokens in a row is a decoder that
    lost its place: people do say "no, no, no, no", so shorter runs pass.
    """
    for width in range(1, 25):
        enough = max(16, 4 * width)
        if len(tokens) < enough:
            break
        repeats, last = 0, len(tokens) - 1
        while repeats + width <= last and tokens[last - repeats] == tokens[last - repeats - width]:
            repeats += 1
        if repeats + width >= enough:
            return repeats
    return 0


def compression_ratio(text: str) -> float:
    """Bytes of the text over bytes zlib needs for it; short texts are not judged."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if len(data) >= 32 else 1.0
