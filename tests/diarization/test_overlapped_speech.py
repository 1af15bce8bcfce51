"""Stretches in which two speakers talk at once."""

from __future__ import annotations

import numpy as np
import pytest

from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import MARGIN_SAMPLES, OVERLAP_SAMPLES, overlapped_speech
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
    assert [(each.speaker, each.start_samples, each.end_samples) for each in found.turns] == [
        ("A", 100_000, 180_000 + MARGIN_SAMPLES),
        ("B", 150_000 - MARGIN_SAMPLES, 220_000 + MARGIN_SAMPLES),
    ]
    assert found.ranges == ((100_000, 180_000), (150_000, 220_000))
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


def test_a_segment_without_words_is_dropped_where_turns_are_most_of_it():
    whole = Segment(0, 1_000, "one two")
    assert outside_ranges(whole, [(0, 400)]) == [whole]
    assert outside_ranges(whole, [(0, 400), (300, 700)]) == []
