"""Shared parts of OpenAI's responses: errors, events, log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from asr_serve.text.tokenizers import token_texts
from asr_serve.types import Segment

TokenTexts = Callable[[list[int]], str]
"""Decodes token ids to text."""


class Logprob(msgspec.Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float
    """Natural logarithm."""


def server_sent_event(data: object) -> bytes:
    """Encodes one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def token_logprobs(segments: Iterable[Segment], spell: TokenTexts, *, first: bool = True) -> list[Logprob]:
    """Log-probabilities of all tokens, with texts; joined, these are the segments' with a space between."""
    logprobs: list[Logprob] = []
    for segment in segments:
        lead = "" if first else " "
        first = False
        for text, logprob in zip(token_texts(segment.tokens, spell), segment.logprobs, strict=True):
            token, lead = lead + text, ""
            logprobs.append(Logprob(token, list(token.encode()), logprob))
    return logprobs


class Problem(msgspec.Struct, frozen=True):
    """Error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: Problem
