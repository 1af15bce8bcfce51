"""Stretches in which two speakers talk at once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import (
    MARGIN_SAMPLES,
    MIN_ALONE_SAMPLES,
    OVERLAP_SAMPLES,
    OverlappedTurn,
    overlapped_speech,
    subtract_ranges,
)
from asr_serve.diarization.word_speakers import outside_ranges
from asr_serve.types import Segment, Span, SpeakerTurn, Word

SPAN = Span(100_000, 300_000)


def turn(speaker: str, start: int, end: int) -> SpeakerTurn:
    return SpeakerTurn(speaker, start, end)


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [turn("A", 0, 400_000)],
        [turn("A", 0, 200_000), turn("B", 200_000, 400_000)],
        [turn("A", 0, 200_000), turn("B", 200_001 - OVERLAP_SAMPLES, 400_000)],
        [turn("A", 0, 120_000), turn("B", 0, 100_000 + OVERLAP_SAMPLES - 1)],
        [turn("A", 310_000, 400_000), turn("B", 310_000, 400_000)],
    ],
    ids=["nobody", "one", "in turn", "too short", "mostly outside", "outside"],
)
def test_there_is_none(turns):
    assert overlapped_speech(SPAN, turns) is None


def test_turns_that_overlap_are_chosen_and_others_are_told():
    turns = [turn("A", 90_000, 180_000), turn("B", 150_000, 220_000), turn("A", 230_000, 290_000)]
    found = overlapped_speech(SPAN, turns)
    assert found is not None
    assert found.turns == (
        OverlappedTurn("A", 100_000, 180_000, Span(100_000, 180_000 + MARGIN_SAMPLES)),
        OverlappedTurn("B", 150_000, 220_000, Span(150_000 - MARGIN_SAMPLES, 220_000 + MARGIN_SAMPLES)),
    )
    assert found.mixture_of("A") == (((0, 80_000), (130_000, 190_000)), ((50_000, 120_000),))
    assert found.mixture_of("B") == (((50_000, 120_000),), ((0, 80_000), (130_000, 190_000)))


def test_of_three_the_others_of_each_are_the_two():
    turns = [turn("A", 100_000, 160_000), turn("B", 140_000, 240_000), turn("C", 220_000, 300_000)]
    found = overlapped_speech(SPAN, turns)
    assert found is not None
    assert {each.speaker for each in found.turns} == {"A", "B", "C"}
    assert found.mixture_of("B")[1] == ((0, 60_000), (120_000, 200_000))


def test_a_window_tells_where_two_are_active():
    likely = np.zeros((10, 3), np.uint8)
    likely[2:8, 0] = likely[5:9, 2] = 200
    likely[4, 1] = 127
    assert LocalSpeakers(360, 270, 3, likely.tobytes()).overlaps() == [(360 + 5 * 270, 360 + 8 * 270)]


def segment(*words: tuple[str, int, int]) -> Segment:
    return Segment(
        0, 1_000, " ".join(word for word, *_ in words), words=tuple(Word(word, a, b, 0.9) for word, a, b in words)
    )


def test_words_outside_of_turns_stay():
    whole = segment(("one", 0, 100), ("two", 150, 260), ("three", 300, 400), ("four", 600, 700), ("five", 800, 900))
    first, last = outside_ranges(whole, [(200, 350), (340, 660)])
    assert (first.text, first.start_samples, first.end_samples) == ("one", 0, 100)
    assert (last.text, last.start_samples, last.end_samples) == ("five", 800, 1_000)
    assert outside_ranges(whole, [(1_000, 2_000)]) == [whole]
    assert outside_ranges(whole, [(0, 1_000)]) == []


def test_a_segment_without_words_stays():
    whole = Segment(0, 1_000, "one two")
    assert outside_ranges(whole, [(0, 400), (300, 700)]) == [whole]


def test_no_part_reaches_into_a_range():
    whole = segment(("one", 0, 100), ("two", 200, 350), ("three", 600, 700))
    first, last = outside_ranges(whole, [(300, 400)])
    assert (first.text, first.start_samples, first.end_samples) == ("one two", 0, 300)
    assert (first.words[-1].start_samples, first.words[-1].end_samples) == (200, 300)
    assert (last.text, last.start_samples, last.end_samples) == ("three", 600, 1_000)
    (all_words,) = outside_ranges(msgspec.structs.replace(whole, tokens=(1, 2)), [(650, 2_000), (-10, 20)])[:1]
    assert (all_words.text, all_words.start_samples, all_words.end_samples) == ("one two", 20, 350)
    (same,) = outside_ranges(msgspec.structs.replace(whole, tokens=(1, 2)), [(800, 2_000)])
    assert (same.tokens, same.words, same.end_samples) == ((1, 2), whole.words, 800)


def test_ranges_are_subtracted():
    assert subtract_ranges([(0, 10), (5, 20), (30, 40)], [(8, 9), (35, 50)]) == [
        (0, 5),
        (5, 8),
        (9, 10),
        (10, 20),
        (30, 35),
    ]
    assert subtract_ranges([(0, 10)], [(0, 10)]) == []


@pytest.mark.parametrize(
    ("alone", "separable"), [(MIN_ALONE_SAMPLES - 1, False), (MIN_ALONE_SAMPLES, True)], ids=["neither", "one"]
)
def test_two_are_separable_where_one_of_them_is_alone(alone, separable):
    found = overlapped_speech(SPAN, [turn("A", 100_000, 200_000 + alone), turn("B", 100_000, 200_000)])
    assert found is not None
    assert (found.separable("A"), found.separable("B")) == (separable, separable)
