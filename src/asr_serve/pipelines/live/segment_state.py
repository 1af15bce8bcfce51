"""State of live segments as data, from which another engine of the same model continues them.

Locked words are part of it as tokens, with which every later hypothesis starts, so nothing that was reported depends
on whether the other engine would recognize it alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from asr_serve.decoding.hypothesis import Recognition


class Anchor(NamedTuple):
    """Hypothesis of the audio of a segment before `end`."""

    end: int
    language: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def probability(self, index: int) -> float:
        """Probability of one of the tokens; 0 where the model gives none."""
        return math.exp(self.logprobs[index]) if self.logprobs else 0.0


class RepeatedSegmentState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a RepeatedSegment, whose fields these are, without the hypothesis in flight: an anchor in flight is due
    again, and a final is requested again."""

    start: int
    starts_mid_speech: bool
    audio_from: int
    end: int | None
    decided_samples: int
    cut_off: bool
    reach: int
    due_anchors: list[int]
    anchored: int
    submitted: bool
    tokens: tuple[int, ...]
    shown: tuple[int, ...]
    language: str
    language_probs: dict[str, float]
    recognized_to: int
    final: Recognition | None
    output_from: int
    output_to: int | None
    start_resolved: bool
    skipped_tokens: int
    locked_tokens: int
    locked_to: int
    head: int | None
    anchors: list[Anchor]


class TokenStreamState(msgspec.Struct, frozen=True, kw_only=True):
    """Results so far of a stream through a streaming model. It is replayed from its start, and tokens that are known
    are not taken again."""

    start: int
    tokens: list[int]
    logprobs: list[float]
    token_samples: list[int]
    word_starts: list[int]
    runs: list[tuple[int, int]]
    tail: tuple[int, ...]
    recognized_to: int
    stops: list[int]
    finished: bool


class StreamedSegmentState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a StreamedSegment, whose fields these are."""

    stream: int
    """Index of its stream in LiveSegmentStates."""
    before: int | None
    """Index of the segment before in the same stream, where it is not known yet where that ends."""
    after: int | None
    """Index of the next segment in the same stream."""
    start: int
    end: int | None
    decided_samples: int
    cut_off: bool
    until: int | None
    settle_at: int
    confirmed_to: int
    first: int
    count: int


class LiveSegmentStates(msgspec.Struct, frozen=True):
    """States of the segments of a session, by the kind of its recognizer."""

    repeated: list[RepeatedSegmentState] = []
    streamed: list[StreamedSegmentState] = []
    streams: list[TokenStreamState] = []
