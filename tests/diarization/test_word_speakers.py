"""The speaker of each word."""

from __future__ import annotations

import pytest

from asr_serve.diarization.word_speakers import TurnIndex, split_by_speaker
from asr_serve.types import Segment, SpeakerTurn, Word


def turns(*each: tuple[str, int, int]) -> TurnIndex:
    return TurnIndex([SpeakerTurn(*turn) for turn in each])


def segment(text: str, times: list[tuple[int, int]]) -> Segment:
    words = tuple(Word(w, *t, 0.9) for w, t in zip(text.split(), times, strict=True))
    return Segment(0, 1_000, text, tuple(range(5)), -0.1, logprobs=(-0.1,) * 5, words=words)


HANZI = (Word("你", 0, 100), Word("好", 100, 200), Word("我", 500, 600), Word("是", 600, 700))


def test_a_segment_ends_where_the_speaker_changes():
    whole = segment("Hello there. Hi, you.", [(0, 100), (100, 300), (500, 600), (600, 900)])
    one, other = split_by_speaker(whole, turns(("A", 0, 350), ("B", 450, 1_000)), words=True)
    assert (one.text, one.speaker, one.start_samples, one.end_samples) == ("Hello there.", "A", 0, 300)
    assert (other.text, other.speaker, other.start_samples, other.end_samples) == ("Hi, you.", "B", 500, 1_000)
    assert [w.speaker for w in other.words] == ["B", "B"]
    assert (one.tokens, one.logprobs) == ((), ())


@pytest.mark.parametrize(
    ("segment", "index", "expected"),
    [
        (segment("a b", [(0, 100), (500, 600)]), turns(("A", 0, 300), ("B", 400, 1_000)), [("a", "A"), ("b", "B")]),
        (
            segment("a b c d", [(0, 100), (200, 300), (400, 500), (600, 700)]),
            turns(("A", 0, 800), ("B", 250, 520)),
            [("a b c d", "A")],
        ),
        (
            Segment(0, 800, "你好，我是。", words=HANZI),
            turns(("A", 0, 300), ("B", 400, 800)),
            [("你好，", "A"), ("我是。", "B")],
        ),
    ],
    ids=["a change", "an interrupted sentence stays whole", "characters without spaces"],
)
def test_texts_of_speakers(segment, index, expected):
    parts = split_by_speaker(segment, index, words=False)
    assert [(part.text, part.speaker) for part in parts] == expected
    assert all(part.words == () for part in parts)


def test_one_speaker_keeps_the_segment_as_it_is():
    whole = segment("a b", [(0, 100), (500, 600)])
    (same,) = split_by_speaker(whole, turns(("A", 0, 1_000)), words=False)
    assert (same.tokens, same.logprobs, same.text) == (whole.tokens, whole.logprobs, "a b")


@pytest.mark.parametrize(
    ("index", "span", "speaker"),
    [
        (turns(("A", 0, 100), ("B", 500, 900)), (150, 200), "A"),
        (turns(("A", 0, 100), ("B", 500, 900)), (420, 480), "B"),
        (turns(), (0, 10), ""),
        (turns(("A", 0, 10_000), ("B", 10, 20), ("C", 30, 40)), (9_000, 9_100), "A"),
    ],
    ids=["nearest before", "nearest after", "no turn", "a long turn that began far before"],
)
def test_the_speaker_of_a_word(index, span, speaker):
    assert index.speaker(*span) == speaker


def test_without_words_the_most_active_speaker_counts():
    whole = Segment(0, 1_000, "nobody knows when")
    (one,) = split_by_speaker(whole, turns(("A", 0, 300), ("B", 300, 1_000)), words=True)
    assert (one.speaker, one.text) == ("B", "nobody knows when")
