"""Search options of one recognition, and the draft that its decoding may start from."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from asr_serve.errors import OptionError
from asr_serve.types import LanguageModelChoice

Task = Literal["transcribe", "translate"]
MAX_BEAMS = 64
MAX_HYPOTHESES = 128
MAX_PREFIX_TOKENS = 4_096
"""Limit of a prompt and of a prefix; models keep the end of a prompt, and as much of a prefix as fits."""

REPETITION_PENALTIES = (1.0, 2.0)
"""Least and most."""


class DraftTokens(msgspec.Struct, frozen=True):
    """Earlier transcript of the same utterance, from when less of its audio was known. It is verified many tokens
    at a time, up to the first mismatch; the answer is that of decoding without it, except that the first
    `accepted_tokens` are taken unverified.

    Source: speculative decoding, arXiv:2211.17192, with greedy choice.
    """

    tokens: tuple[int, ...] = ()
    accepted_tokens: int = 0

    def up_to(self, limit: int) -> DraftTokens:
        """Returns the draft cut to `limit` tokens."""
        tokens = self.tokens[:limit]
        return DraftTokens(tokens, min(self.accepted_tokens, len(tokens)))


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 2


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one recognition. Raises OptionError for values out of range; whether the model supports the
    language, the task and the tokens is checked elsewhere."""

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    """Tried in order until an answer passes; 0 is greedy."""
    min_avg_logprob: float = -1.0
    max_compression_ratio: float = 2.4
    """Text that zlib compresses more than this is repetitive."""
    seed: int = 0
    task: Task = "transcribe"
    """Transcription, or translation into English."""
    language: str = ""
    """Code of the spoken language. Empty: the model's only language, or the detected one."""
    prompt: tuple[int, ...] = ()
    """Tokens of earlier text, or of words that may come. The answer continues them."""
    prefix: tuple[int, ...] = ()
    """Tokens that the answer begins with."""
    timestamps: bool = False
    """Whether the answer includes timestamp tokens."""
    beam: int = 1
    """Beam width of the first try, where its temperature is 0; 1 is greedy."""
    max_no_speech: float = 0.6
    """No-speech probability above which an answer below `min_avg_logprob` is discarded as silence."""
    words: bool = False
    """Whether the time of each token is requested."""
    hypotheses: int = 1
    """Most entries of the n-best list that is requested; 1: none. Of an attention decoder at most `beam`; a streaming
    model's search has as many as its own beam."""
    bias: str = ""
    """Hotwords, as decoding/biasing_graph.pack_phrases writes them."""
    language_model: LanguageModelChoice | None = None
    """Language model of beam search; None: none."""
    hotwords: tuple[str, ...] = ()
    """Words that the prompt names, for a model whose card has hotwords among its `prompt_options`."""
    itn: bool = True
    """Whether the prompt asks for numbers and dates in written form, for a model whose card has itn there."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that the answer already has, and multiplies negative ones; 1: none. Source:
    CTRL, arXiv:1909.05858."""
    top_k: int = 0
    """Likeliest tokens that are sampled from at a temperature above 0; 0: all."""
    top_p: float = 1.0
    """Share of probability whose likeliest tokens are sampled from, of the `top_k`; 1: all."""
    max_new_tokens: int | None = None
    """Most tokens of an answer, where that is less than what can be said in the audio; None: no other limit."""
    hurried: bool = False
    """Whether a client is waiting: no higher temperature is tried once the tries together are as long as the
    longest possible answer."""

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)
        # Callers may pass a list; the engine's caches hash the options.
        msgspec.structs.force_setattr(self, "temperatures", tuple(self.temperatures))
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed={self.seed}", "a whole number from 0 to 2**63 - 1")
        if self.task not in get_args(Task):
            raise OptionError(f"task={self.task!r}", " or ".join(get_args(Task)), param="task")
        if not isinstance(self.beam, int) or not 1 <= self.beam <= MAX_BEAMS:
            raise OptionError(f"beam={self.beam}", f"a whole number from 1 to {MAX_BEAMS}", param="beam")
        if not isinstance(self.hypotheses, int) or not 1 <= self.hypotheses <= MAX_HYPOTHESES:
            raise OptionError(
                f"hypotheses={self.hypotheses}", f"a whole number from 1 to {MAX_HYPOTHESES}", param="hypotheses"
            )
        if not 0 <= self.max_no_speech <= 1:
            raise OptionError(f"max_no_speech={self.max_no_speech}", "a number from 0 to 1", param="max_no_speech")
        least, most = REPETITION_PENALTIES
        if not least <= self.repetition_penalty <= most:
            came = f"repetition_penalty={self.repetition_penalty}"
            raise OptionError(came, f"a number from {least:g} to {most:g}", param="repetition_penalty")
        check_truncation(self.top_k, self.top_p)
        check_max_new_tokens(self.max_new_tokens)
        for name, tokens in (("prompt", self.prompt), ("prefix", self.prefix)):
            if len(tokens) > MAX_PREFIX_TOKENS:
                raise OptionError(f"{name} of {len(tokens)} tokens", f"up to {MAX_PREFIX_TOKENS}", param=name)


def check_temperatures(temperatures: object) -> None:
    """Raises OptionError for what is no sequence of temperatures."""
    if not isinstance(temperatures, tuple | list) or not temperatures or not all(map(_is_temperature, temperatures)):
        raise OptionError(f"temperatures={temperatures!r}", "one or more numbers from 0 to 2", param="temperatures")


def check_max_new_tokens(limit: object) -> None:
    """Raises OptionError for what is neither None nor a positive number."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OptionError(f"max_new_tokens={limit!r}", "a whole number, 1 or more; or none", param="max_new_tokens")


NO_DRAFT = DraftTokens()


def check_truncation(top_k: object, top_p: object) -> None:
    """Raises OptionError for what is no number of tokens, and no share of their probability."""
    if type(top_k) is not int or top_k < 0:
        raise OptionError(f"top_k={top_k!r}", "a whole number, 1 or more; or 0, for all tokens", param="top_k")
    if isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise OptionError(f"top_p={top_p!r}", "a number above 0, at most 1", param="top_p")
