"""Hypothesis of one decoding row and its result, with temperature fall-back: greedy or beam search first, and sampling
at higher temperatures when that answer is implausible.

Source  temperature fall-back, its thresholds and that of silence: Whisper, arXiv:2212.04356, section 4.5.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.types import EngineTimestamps

if TYPE_CHECKING:
    from asr_serve.decoding.biasing_list import CompiledBiasingList
    from asr_serve.decoding.language_model.scorer import LanguageModelFusion

Reused = Literal["", "audio", "answer"]
Finish = Literal["stop", "length", "repetition"]


class RecognitionHypothesis(msgspec.Struct, frozen=True):
    """Entry of the n-best list of one utterance."""

    tokens: tuple[int, ...]
    logprob: float
    """Natural-log probability of the whole utterance, by the search: comparable within the list only."""
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token."""
    times: tuple[tuple[int, int], ...] = ()
    """Start and end of each token, see Recognition."""


class Recognition(msgspec.Struct, frozen=True):
    """Recognition result of one utterance."""

    tokens: tuple[int, ...]
    avg_logprob: float
    """Mean over the tokens after the prefix and end-of-text."""
    temperature: float
    finish: Finish
    compression_ratio: float
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token; end-of-text is not among them."""
    phases: EngineTimestamps | None = None
    """Engine timestamps; filled in by the loop."""
    language: str = ""
    """Language of the speech, as requested or as detected."""
    language_prob: float = 0.0
    """Probability of the detected language among all that the model knows; 0 where it was requested."""
    no_speech_prob: float = 0.0
    """Probability that there is no speech; 0 from models without such an estimate."""
    reused: Reused = ""
    """Result reused from an earlier request with the same audio: nothing, the encoder output, or the whole answer
    to the same options."""
    times: tuple[tuple[int, int], ...] = ()
    """Start and end of each token, in samples from the start of the utterance's audio, never running backwards;
    empty unless SearchOptions.words requested it."""
    hypotheses: tuple[RecognitionHypothesis, ...] = ()
    """N-best list, the best first, up to SearchOptions.hypotheses entries; empty unless more than one was requested,
    and where the answer was sampled."""
    model: str = ""
    """Model that recognized it, where a pipeline has several; empty where there is one."""


class Hypothesis:
    """Growing answer of one decoding row."""

    def __init__(
        self,
        options: SearchOptions,
        eos: int,
        max_tokens: int,
        text: Callable[[list[int]], str],
        draft: DraftTokens = NO_DRAFT,
    ) -> None:
        self.options, self.eos, self.max_tokens, self.text = options, eos, max_tokens, text
        self.stop_tokens: Collection[int] = ()
        """Tokens beside `eos` that end the answer."""
        self.end_token = eos
        """Token that ended the answer, where it has ended."""
        self.attempt = 0
        self.draft = self._first_try(draft)
        self.fixed = self.draft.accepted_tokens
        self.words_below: int | None = None
        """Tokens from this id on are not text; None: all are."""
        self.language, self.language_prob, self.no_speech_prob = options.language, 0.0, 0.0
        self.rejected: list[Recognition] = []
        self.spent = 0
        """Tokens generated in tries that did not pass."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.n_best: list[RecognitionHypothesis] = []
        """N-best list of this try's beam search."""
        self.hotwords: CompiledBiasingList | None = None
        """Compiled list of `options.bias`."""
        self.language_model: LanguageModelFusion | None = None
        """Language model of beam search, and its weight."""

    def _first_try(self, draft: DraftTokens) -> DraftTokens:
        """Returns the draft of the first try: with the prefix, and no longer than can be verified. A row that
        samples from the start has nothing to verify it with, and one of several beams does not decode it alone."""
        prefix, tokens, fixed = self.options.prefix, draft.tokens, draft.accepted_tokens
        if prefix and tokens[: len(prefix)] != prefix:
            tokens, fixed = prefix, 0
        draft = DraftTokens(tokens, max(fixed, len(prefix))).up_to(len(tokens))
        compared = self.temperature == 0 and self.beam == 1
        return draft.up_to(min(self.max_tokens - 1, len(tokens) if compared else draft.accepted_tokens))

    def limit_tokens(self, max_tokens: int) -> None:
        """Lowers the limit of tokens, before the first token."""
        assert not self.tokens
        if max_tokens < self.max_tokens:
            self.max_tokens, self.draft = max_tokens, self.draft.up_to(max_tokens - 1)
            self.fixed = self.draft.accepted_tokens

    @property
    def first_free_position(self) -> int:
        """Number of prefix tokens: the rules for an answer's start apply after them."""
        return min(len(self.options.prefix), self.fixed)

    @property
    def beam(self) -> int:
        """Beam width of this try."""
        return self.options.beam if self.attempt == 0 and self.temperature == 0 else 1

    @property
    def temperature(self) -> float:
        return self.options.temperatures[self.attempt]

    def append_token(self, token: int, logprob: float) -> Finish | None:
        """Appends a token; returns why the row is finished, or None. The first `fixed` must be the draft's."""
        self.logprobs.append(logprob)
        if token == self.eos or token in self.stop_tokens:
            self.end_token = token
            return "stop"
        self.tokens.append(token)
        if (loop := min(repeated_tokens(self.tokens), len(self.tokens) - self.fixed)) > 0:
            # One occurrence of the phrase stays; the repeats were never spoken.
            self.spent += loop
            del self.tokens[-loop:], self.logprobs[-loop:]
            return "repetition"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def append_rest(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Appends all remaining tokens; `logprobs` has one more than `tokens` where end-of-text followed."""
        self.tokens += tokens
        self.logprobs += logprobs

    def append_n_best(self, ranked: Sequence[RecognitionHypothesis]) -> None:
        """Appends all remaining tokens, those of the first of `ranked`, the n-best list of what follows the tokens so
        far."""
        begun, scored = tuple(self.tokens), tuple(self.logprobs)
        self.n_best = [
            RecognitionHypothesis((*begun, *each.tokens), each.logprob, (*scored, *each.logprobs[: len(each.tokens)]))
            for each in ranked
        ]
        self.append_rest(ranked[0].tokens, ranked[0].logprobs)

    def finalize(self, finish: Finish) -> Recognition | None:
        """Returns the answer, or None when the row must be decoded again at the next temperature."""
        text_tokens = self.tokens if self.words_below is None else [t for t in self.tokens if t < self.words_below]
        answer = Recognition(
            tuple(self.tokens),
            sum(self.logprobs[self.first_free_position :]) / max(1, len(self.logprobs) - self.first_free_position),
            self.temperature,
            finish,
            compression_ratio(self.text(text_tokens)),
            tuple(self.logprobs[: len(self.tokens)]),
            language=self.language,
            language_prob=self.language_prob,
            no_speech_prob=self.no_speech_prob,
            hypotheses=tuple(self.n_best[: self.options.hypotheses]) if self.options.hypotheses > 1 else (),
        )
        if self._silent(answer):
            return msgspec.structs.replace(answer, tokens=(), logprobs=(), compression_ratio=1.0, hypotheses=())
        if is_acceptable(answer, self.options):
            return answer
        self.rejected.append(answer)
        self.spent += len(self.tokens) - self.fixed
        if self.attempt + 1 < len(self.options.temperatures) and not self._late:
            self.attempt += 1
            self.n_best.clear()
            del self.tokens[self.fixed :], self.logprobs[self.fixed :]
            return None
        finished = [r for r in self.rejected if r.finish == "stop"]
        plausible = [r for r in finished if r.compression_ratio <= self.options.max_compression_ratio]
        return max(plausible or finished or self.rejected, key=lambda r: r.avg_logprob)

    def _silent(self, answer: Recognition) -> bool:
        options = self.options
        spoken = self.fixed > self.first_free_position  # fixed draft tokens were recognized as speech
        silent = answer.no_speech_prob > options.max_no_speech and answer.avg_logprob < options.min_avg_logprob
        return silent and not spoken

    @property
    def _late(self) -> bool:
        return self.options.hurried and self.spent >= self.max_tokens


def is_acceptable(answer: Recognition, options: SearchOptions | None = None) -> bool:
    """Returns whether the answer passes without another try. `options`: those of the search; None: the defaults.

    A sampled try without an end has lost its place in the audio, like one that repeats itself.
    """
    options = options or SearchOptions()
    lost = answer.finish == "repetition" or (answer.finish == "length" and answer.temperature > 0)
    return (
        not lost
        and answer.avg_logprob >= options.min_avg_logprob
        and answer.compression_ratio <= options.max_compression_ratio
    )


def repeated_tokens(tokens: list[int]) -> int:
    """Number of tokens at the end that are needless repeats of a phrase; 0 when there is no loop.

    A phrase of up to 24 tokens repeated at least four times over at least 16 tokens in a row is a decoder that
    lost its place. People do say "no, no, no, no", so shorter runs pass.
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
    """Bytes of the text over bytes zlib needs for it; 1 for texts under 32 bytes, which are too short to judge."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if len(data) >= 32 else 1.0
