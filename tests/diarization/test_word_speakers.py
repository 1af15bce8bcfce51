"""Who said each word."""

from __future__ import annotations

from asr_serve.diarization.word_speakers import TurnIndex, split_by_speaker
from asr_serve.types import Segment, SpeakerTurn, Word


def turns(*each: tuple[str, int, int]) -> TurnIndex:
    return TurnIndex([SpeakerTurn(*turn) for turn in each])


def segment(text: str, times: list[tuple[int, int]]) -> Segment:
    words = tuple(Word(w, *t, 0.9) for w, t in zip(text.split(), times, strict=True))
    return Segment(0, 1_000, text, tuple(range(5)), -0.1, logprobs=(-0.1,) * 5, words=words)


def test_a_segment_ends_where_the_speaker_changes():
    said = segment("Hello there. Hi, you.", [(0, 100), (100, 300), (500, 600), (600, 900)])
    one, other = split_by_speaker(said, turns(("A", 0, 350), ("B", 450, 1_000)), words=True)
    assert (one.text, one.speaker, one.start_samples, one.end_samples) == ("Hello there.", "A", 0, 300)
    assert (other.text, other.speaker, other.start_samples, other.end_samples) == ("Hi, you.", "B", 500, 1_000)
    assert [w.speaker for w in other.words] == ["B", "B"]
    assert (one.tokens, one.logprobs) == ((), ())


def test_words_are_told_only_if_they_were_wanted():
    said = segment("a b", [(0, 100), (500, 600)])
    parts = split_by_speaker(said, turns(("A", 0, 300), ("B", 400, 1_000)), words=False)
    assert [(p.text, p.words) for p in parts] == [("a", ()), ("b", ())]


def test_one_speaker_keeps_the_segment_as_it_is():
    said = segment("a b", [(0, 100), (500, 600)])
    (same,) = split_by_speaker(said, turns(("A", 0, 1_000)), words=False)
    assert (same.tokens, same.logprobs, same.text) == (said.tokens, said.logprobs, "a b")


def test_where_two_speak_a_sentence_stays_with_whoever_began_it():
    said = segment("a b c d", [(0, 100), (200, 300), (400, 500), (600, 700)])
    parts = split_by_speaker(said, turns(("A", 0, 800), ("B", 250, 520)), words=False)
    assert [(p.text, p.speaker) for p in parts] == [("a b c d", "A")]


def test_a_word_in_a_pause_goes_to_who_is_nearest():
    who = turns(("A", 0, 100), ("B", 500, 900))
    assert who.speaker(150, 200) == "A"
    assert who.speaker(420, 480) == "B"
    assert turns().speaker(0, 10) == ""


def test_without_words_whoever_speaks_most():
    said = Segment(0, 1_000, "nobody knows when")
    (one,) = split_by_speaker(said, turns(("A", 0, 300), ("B", 300, 1_000)), words=True)
    assert (one.speaker, one.text) == ("B", "nobody knows when")


def test_characters_without_spaces_are_divided_too():
    words = (Word("你", 0, 100), Word("好", 100, 200), Word("我", 500, 600), Word("是", 600, 700))
    said = Segment(0, 800, "你好，我是。", words=words)
    parts = split_by_speaker(said, turns(("A", 0, 300), ("B", 400, 800)), words=False)
    assert [(p.text, p.speaker) for p in parts] == [("你好，", "A"), ("我是。", "B")]


def test_a_turn_far_before_that_is_long_is_found():
    assert turns(("A", 0, 10_000), ("B", 10, 20), ("C", 30, 40)).speaker(9_000, 9_100) == "A"
