"""Stretches in which two speakers talk at once, and the turns of each that have to be recognized apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asr_serve import units
from asr_serve.types import Span, SpeakerTurn

SpeakerRanges = tuple[tuple[tuple[int, int], ...], ...]
"""(start, end) of the turns of each speaker, in samples."""
MAX_MIXTURE_SAMPLES = units.s_to_samples(30)
"""Longest audio that is separated at once."""
OVERLAP_SAMPLES = units.ms_to_samples(500)
"""Overlap of two turns from which they are recognized apart."""
MARGIN_SAMPLES = units.ms_to_samples(250)
"""Audio before and after a turn that is recognized with it."""
MIN_ALONE_SAMPLES = units.s_to_samples(1)
"""Speech of one speaker alone from which two can be separated: the spectra of a voice are learnt from it. Where neither
speaks alone for so long, the shares of each would be arbitrary."""


class OverlappedTurn(NamedTuple):
    """Turn of one speaker during which others talk."""

    speaker: str
    start_samples: int
    end_samples: int
    audio: Span
    """The turn with its margins."""


class OverlappedSpeech(NamedTuple):
    """Turns of a segment to recognize apart. Times are the recording's."""

    span: Span
    turns: tuple[OverlappedTurn, ...]
    turns_by_speaker: dict[str, tuple[tuple[int, int], ...]]
    """Turns of each speaker in the segment."""

    def mixture_of(self, speaker: str) -> SpeakerRanges:
        """Returns when the speaker and when anybody else talks, in samples since the segment's start."""
        first = self.span.start_samples

        def from_start(turns: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
            return tuple((start - first, end - first) for start, end in turns)

        others = (turn for name, turns in self.turns_by_speaker.items() if name != speaker for turn in turns)
        return from_start(self.turns_by_speaker[speaker]), from_start(sorted(others))

    def separable(self, speaker: str) -> bool:
        """Returns whether the speaker can be separated from the others: either is alone for MIN_ALONE_SAMPLES."""
        own, others = self.mixture_of(speaker)
        alone = subtract_ranges(own, others), subtract_ranges(others, own)
        return any(sum(end - start for start, end in each) >= MIN_ALONE_SAMPLES for each in alone)


def subtract_ranges(ranges: Sequence[tuple[int, int]], removed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns what of the ranges (start, end) is in none of `removed`: sorted and disjoint."""

    def inside(start: int, end: int, among: Sequence[tuple[int, int]]) -> bool:
        return any(first <= start and end <= last for first, last in among)

    edges = itertools.pairwise(sorted({edge for each in (*ranges, *removed) for edge in each}))
    return [each for each in edges if inside(*each, ranges) and not inside(*each, removed)]


def overlapped_speech(span: Span, turns: Sequence[SpeakerTurn]) -> OverlappedSpeech | None:
    """Returns the turns of a segment that overlap another speaker's by OVERLAP_SAMPLES, each with what it overlaps;
    None if there are none. Turns are cut to the segment."""
    turns_by_speaker: dict[str, list[tuple[int, int]]] = {}
    for turn in turns:
        start, end = max(turn.start_samples, span.start_samples), min(turn.end_samples, span.end_samples)
        if start < end:
            turns_by_speaker.setdefault(turn.speaker, []).append((start, end))
    cut = [(name, start, end) for name, own in turns_by_speaker.items() for start, end in own]
    chosen = sorted(
        {
            one
            for one in cut
            for other in cut
            if one[0] != other[0] and min(one[2], other[2]) - max(one[1], other[1]) >= OVERLAP_SAMPLES
        },
        key=lambda each: each[1:],
    )
    if not chosen:
        return None
    found = tuple(
        OverlappedTurn(
            name,
            start,
            end,
            Span(max(start - MARGIN_SAMPLES, span.start_samples), min(end + MARGIN_SAMPLES, span.end_samples)),
        )
        for name, start, end in chosen
    )
    return OverlappedSpeech(span, found, {name: tuple(sorted(own)) for name, own in turns_by_speaker.items()})
