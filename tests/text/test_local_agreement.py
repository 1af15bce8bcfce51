"""Words that two hypotheses agree on, and the seam between two that overlap."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asr_serve.text.local_agreement import (
    GARBLED_WORDS,
    SEAM_WORDS,
    Text,
    agreed_count,
    merge_overlap,
    whole_word_tokens,
    word_ends,
    words_of,
)
from asr_serve.text.word_timing import is_unspaced, split_words

PIECES = [" the", " be", "st", " of", " times", ",", " it", " was", "n't", ".", " age", "s", " ", "-", "é"]


def text(tokens: list[int]) -> str:
    return "".join(PIECES[t] for t in tokens).strip()


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=25)


# --- words of tokens ------------------------------------------------------------------------------


def test_ends_of_words():
    assert word_ends([], text) == []
    assert word_ends([0, 1, 2, 3], text) == [1, 3, 4]  # the / be st / of
    assert word_ends([4, 5, 6], text) == [2, 3], "a mark belongs to its word"
    assert word_ends([12, 12, 0], text) == [3], "what comes before the first word belongs to it"


@given(tokens)
def test_ends_rise_to_the_last_token_one_per_word(said):
    ends = word_ends(said, text)
    words = text(said).split()
    assert len(ends) == len(words)
    assert ends == sorted(set(ends))
    assert not ends or ends[-1] == len(said)
    for count, end in enumerate(ends, 1):
        assert len(text(said[:end]).split()) == count


def letters(tokens: list[int]) -> str:
    """Text of tokens that are bytes, some of which are only a part of a letter."""
    return bytes(tokens).decode("utf-8", "replace").strip()


@given(st.text("今天，。 abc(3", max_size=12))
def test_every_letter_of_a_script_without_spaces_is_a_word(said):
    tokens = list(said.encode())
    ends = word_ends(tokens, letters)
    words = words_of(said)
    assert len(ends) == len(words)
    assert ends == sorted(set(ends))
    assert not ends or ends[-1] == len(tokens)
    assert sum(letter in "今天" for letter in said) <= len(words)


def ends_by_prefixes(tokens: list[int], text: Text) -> list[int]:
    """The definition of `word_ends`: each prefix is split anew."""
    unspaced = any(map(is_unspaced, text(tokens)))
    ends: list[int] = []
    for count in range(1, len(tokens) + 1):
        spelled = text(tokens[:count])
        if spelled.endswith("\ufffd") and count < len(tokens):
            continue
        words = len(split_words(spelled)) if unspaced else len(spelled.split())
        if words > len(ends):
            ends.append(count)
        elif ends:
            ends[-1] = count
    return ends


MIXED = [
    *(" the", "今天", "。", "（", "好", " ", "ab", "，", "「天", "」"),
    *("-", "%", " ...", "", "é", "กำ", "3", "\n", "한국", "💡"),
]


def mixed(tokens: list[int]) -> str:
    return "".join(MIXED[token] for token in tokens).strip()


@settings(max_examples=1_000)
@given(st.lists(st.integers(0, len(MIXED) - 1), max_size=25))
def test_ends_are_those_of_all_prefixes(said):
    assert word_ends(said, mixed) == ends_by_prefixes(said, mixed)


@settings(max_examples=1_000)
@given(st.text("今天，。 a（é💡-", max_size=12), st.lists(st.integers(0, 255), max_size=4))
def test_ends_are_those_of_all_prefixes_where_tokens_are_bytes(said, more):
    """Characters lie in several tokens, some of which never become one."""
    tokens = list(said.encode())
    for part in (tokens, tokens[:-1], tokens[1:], [*tokens, *more], [*more, *tokens]):
        assert word_ends(part, letters) == ends_by_prefixes(part, letters)


def test_a_text_is_decoded_in_short_parts():
    """The work for each token does not grow with the text before it."""
    for unit in ("今天", "a b"):
        decoded = []

        def counted(tokens: list[int], decoded: list[int] = decoded) -> str:
            decoded.append(len(tokens))
            return letters(tokens)

        said = list((unit * 300).encode())
        assert word_ends(said, counted)[-1] == len(said)
        assert sorted(decoded)[-2] <= 12, "all of it is decoded once"


def test_words_with_spaces_and_without():
    assert words_of("今天 the 3rd，好。") == ["今", "天", "the", "3rd，", "好。"]
    assert words_of("the best - of times") == ["the", "best", "-", "of", "times"]
    tokens = list("今天a b".encode())
    assert word_ends(tokens, letters) == [3, 6, 8, 9]
    assert agreed_prefix_tokens(tokens, list("今天好".encode()), letters) == 6


def agreed_prefix_tokens(before: list[int], after: list[int], text: Text) -> int:
    """Number of tokens of `after` in the whole words at its start that `before` has too."""
    return whole_word_tokens(after, agreed_count(before, after), text)


# --- agreement ------------------------------------------------------------------------------------


@given(tokens, tokens)
def test_the_agreement_is_the_common_prefix_of_whole_words(before, after):
    count = agreed_prefix_tokens(before, after, text)
    assert before[:count] == after[:count]
    assert count == 0 or count in word_ends(after, text)
    words, agreed = text(after).split(), text(after[:count]).split()
    assert words[: len(agreed)] == agreed


@given(tokens, tokens)
def test_nothing_more_could_have_been_agreed(before, after):
    count = agreed_prefix_tokens(before, after, text)
    longer = [end for end in word_ends(after, text) if end > count]
    assert all(before[:end] != after[:end] for end in longer)


@given(tokens)
def test_a_hypothesis_agrees_with_itself(said):
    assert agreed_prefix_tokens(said, said, text) == (len(said) if text(said) else 0)


def test_a_word_that_may_go_on_is_not_agreed():
    assert agreed_prefix_tokens([0, 1], [0, 1, 2], text) == 1, "'be' became 'best'"
    assert agreed_prefix_tokens([0, 4], [0, 4, 5], text) == 1, "'times' became 'times,'"
    assert agreed_prefix_tokens([0, 1, 2], [0, 1, 2, 3], text) == 3


# --- seams ----------------------------------------------------------------------------------------


def words(line: str) -> list[str]:
    return line.split()


WORDS = words("alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa")


def joined(left: list[str], right: list[str]) -> list[str]:
    met = merge_overlap(left, right)
    assert met is not None
    return left[: met[0]] + right[met[1] :]


def test_an_empty_text_joins_any_other():
    assert merge_overlap([], ["a"]) == (0, 0)
    assert merge_overlap(["a", "b"], []) == (2, 0)
    assert merge_overlap([], []) == (0, 0)


def test_two_letters_in_common_are_no_seam():
    assert merge_overlap([*"天气很好"], [*"很好我们"]) is None
    assert merge_overlap([*"今天天气很好"], [*"天气很好我们"]) == (6, 4)
    assert merge_overlap(["it", "is"], ["it", "is", "late"]) == (2, 2)


def test_no_common_words_no_seam():
    assert merge_overlap(WORDS[:5], WORDS[6:10]) is None


@given(st.permutations(WORDS), st.integers(0, 13), st.integers(2, 6))
def test_two_halves_that_overlap_make_the_whole(order, start, overlap):
    whole = list(order)
    cut = min(start + overlap, len(whole))
    assume(cut - start >= 2)
    assert joined(whole[:cut], whole[start:]) == whole


@settings(max_examples=300)
@given(st.permutations(WORDS), st.integers(3, 12), st.integers(3, 6), st.integers(0, 2), st.integers(0, 2))
def test_a_few_garbled_words_at_the_edges_are_left_out(order, start, overlap, at_end, at_start):
    """The cut-off end of one, and the beginning of the other that starts in a word, are heard wrongly."""
    whole = list(order)
    left, right = whole[: start + overlap], whole[start:]
    assume(start + overlap <= len(whole))
    assume(overlap - at_end - at_start >= 2)
    left = left[: len(left) - at_end] + ["uh"] * at_end
    right = ["eh"] * at_start + right[at_start:]
    assert joined(left, right) == whole


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("It was the Age,", "the age of wisdom.", "It was the Age, of wisdom."),
        (
            "we had everything before us we had nothing",
            "everything befall us we had nothing before us",
            "we had everything before us we had nothing before us",
        ),
        (
            "it was the age of wisdom it was the age",
            "wisdom it was the age of foolishness",
            "it was the age of wisdom it was the age of foolishness",
        ),
    ],
    ids=["case and marks do not matter", "one differing word", "a repeated phrase meets where most words do"],
)
def test_overlaps_are_merged(left, right, expected):
    assert joined(left.split(), right.split()) == expected.split()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["they", "saw", "a"], ["a", "house"], None),
        (["they", "saw", "november"], ["november", "rain"], (3, 1)),
        (["-", "..."], ["-", "..."], None),
    ],
    ids=["one short word is no match", "one long word is", "words without letters match nothing"],
)
def test_matches_of_a_word(left, right, expected):
    assert merge_overlap(left, right) == expected


@settings(max_examples=300)
@given(st.data())
def test_a_seam_lies_within_reach_on_both_sides(data):
    some = st.lists(st.sampled_from(["a", "the", "age", "of", "wisdom", "was", "-"]), max_size=30)
    left, right = data.draw(some), data.draw(some)
    met = merge_overlap(left, right)
    if met is None or not left or not right:
        return
    keep, skip = met
    assert 0 < skip <= min(len(right), SEAM_WORDS)
    assert len(left) - GARBLED_WORDS <= keep <= len(left)
    assert left[keep - 1] == right[skip - 1]


def test_it_is_quick_on_long_texts():
    chance = random.Random(2)
    left, right = ([chance.choice(["the", "age"]) for _ in range(5_000)] for _ in range(2))
    assert merge_overlap(left, right) is not None


@pytest.mark.parametrize("garbled", [GARBLED_WORDS, GARBLED_WORDS + 1])
def test_texts_that_differ_too_much_at_an_edge_are_not_merged(garbled):
    left = [*WORDS[:6], *["uh"] * garbled]
    assert (merge_overlap(left, WORDS[2:]) is not None) is (garbled <= GARBLED_WORDS)
