"""Where texts are cut, and that it does not matter how they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.text.g2p.sentence_splitter import (
    LIVE_SPLIT_POLICY,
    MAX_SENTENCE_CHARACTERS,
    OFFLINE_SPLIT_POLICY,
    SentenceSplitter,
)


def cut(text, hurry=OFFLINE_SPLIT_POLICY, size=None, **options):
    splitter = SentenceSplitter(hurry, **options)
    size = size or len(text) or 1
    pieces = [piece for at in range(0, len(text), size) for piece in splitter.append_text(text[at : at + size])]
    return [*pieces, *splitter.finish()]


def texts(*args, **options):
    return [piece.text for piece in cut(*args, **options)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["It rains.", "It pours!", "Does it?", "Yes."],
        ["Dr. Smith met J. R. R. Tolkien at 5 p.m. on Main St. near No. 5.", "He left."],
        ["Pi is 3.14, or 22/7.", "See example.com/a.b?c=d.", "Then go."],
        ["He arrived at 5 p.m.", "The door was open."],
        ["They came from the U.S. Navy.", "We are in the U.S.", "It is large."],
        ["It is 5 in. wide and 6 ft. long.", "Call ext. 12 now."],
        ["We had 5 in. of rain in 2 hrs. and 10 min. of sun."],
        ["He let me in.", "John sat.", "It is 7 in.", "The rest is 8."],
        ["Come on Sat. if you can.", "He sat.", "We left."],
        ["I said no.", "They did not hear."],
        ["Use e.g. this one, i.e. the first, etc. and go."],
        ["“Really?” she asked.", "“Yes.”", "He nodded."],
        ["Well... maybe not.", "Hm..."],
        ["1. First things first.", "2. Then the others."],
    ],
    ids=lambda sentences: sentences[0][:20],
)
def test_sentences(sentences):
    assert texts(" ".join(sentences), OFFLINE_SPLIT_POLICY._replace(first=MAX_SENTENCE_CHARACTERS)) == sentences


def test_paragraphs_and_lists():
    pieces = cut("A heading\n\nSome text\nthat goes on. And more.\n- one\n- two\n\n\nThe end")
    assert [(piece.text, piece.after) for piece in pieces] == [
        ("A heading", "none"),
        ("Some text\nthat goes on.", "paragraph"),
        ("And more.", "sentence"),
        ("- one", "sentence"),
        ("- two", "sentence"),
        ("The end", "paragraph"),
    ]


def test_the_first_clause_of_a_long_sentence_comes_alone():
    long = (
        "When the sunlight strikes raindrops in the air, they act as a prism and form a rainbow, which is a "
        "division of white light into many beautiful colors."
    )
    first, rest = texts(long)
    assert first == "When the sunlight strikes raindrops in the air,"
    assert f"{first} {rest}" == long
    assert texts("Well, it is short enough to be said in one.") == ["Well, it is short enough to be said in one."]
    assert texts(f"It begins. {long}") == ["It begins.", long]


def test_a_comma_in_a_date_cuts_nothing():
    text = "On the morning of the day that everybody had waited for since March 15, 2024, all was quiet in town."
    assert texts(text)[0].endswith("2024,")


def test_a_sentence_without_end_is_cut_at_words():
    pieces = texts("word " * 500)
    assert all(len(piece) <= MAX_SENTENCE_CHARACTERS and set(piece.split()) == {"word"} for piece in pieces)
    assert sum(len(piece.split()) for piece in pieces) == 500
    assert all(len(piece) <= MAX_SENTENCE_CHARACTERS for piece in texts("x" * 2_000))


def test_live_text_is_split_as_soon_as_it_is_safe():
    splitter = SentenceSplitter(LIVE_SPLIT_POLICY)
    said = [[piece.text for piece in splitter.append_text(token)] for token in ("Good", " morn", "ing", ",", " I")]
    assert said == [[], [], [], [], ["Good morning,"]]
    assert [piece.text for piece in splitter.append_text(" paid $3.14. Dr")] == ["I paid $3.14."]
    assert not list(splitter.append_text(". Smith "))
    assert [piece.text for piece in splitter.append_text("said so! ")] == ["Dr. Smith said so!"]
    assert [piece.text for piece in splitter.finish()] == []


def test_live_text_without_punctuation_is_cut_between_plain_words():
    text = "so this goes on and on about Henry VIII and 5 million other things " * 6
    for piece in texts(text, LIVE_SPLIT_POLICY):
        assert len(piece) <= LIVE_SPLIT_POLICY.word + 20
        assert not piece.endswith((" 5", " Henry"))


def test_phonemes_have_no_abbreviations():
    assert texts("dˈɑktəɹ. ɐ. bˈi.", abbreviations=False) == ["dˈɑktəɹ.", "ɐ.", "bˈi."]


def test_one_splitter_takes_one_text_after_another():
    splitter = SentenceSplitter()
    assert [piece.text for piece in [*splitter.append_text("One text"), *splitter.finish()]] == ["One text"]
    assert [(p.start, p.text, p.after) for p in [*splitter.append_text(" Another."), *splitter.finish()]] == [
        (1, "Another.", "none")
    ]


TEXTS = st.text("abA1 .,!?;:—-\"')\n", max_size=300) | st.lists(
    st.sampled_from(
        ["Dr.", "word", "U.S.", "The", "3.14", "e.g.", "end.", "no.", "\n", "\n\n", "- ", "“so,”", "p.m.", "5"]
    )
).map(" ".join)


@given(TEXTS, st.sampled_from([OFFLINE_SPLIT_POLICY, LIVE_SPLIT_POLICY]), st.integers(1, 20))
def test_pieces_change_nothing(text, hurry, size):
    assert cut(text, hurry, size) == cut(text, hurry)


@given(TEXTS, st.sampled_from([OFFLINE_SPLIT_POLICY, LIVE_SPLIT_POLICY]))
def test_nothing_is_lost_and_places_are_right(text, hurry):
    pieces = cut(text, hurry)
    assert "".join("".join(piece.text for piece in pieces).split()) == "".join(text.split())
    for piece in pieces:
        assert text[piece.start : piece.start + len(piece.text)] == piece.text
        assert piece.text == piece.text.strip()
        assert 0 < len(piece.text) <= MAX_SENTENCE_CHARACTERS
