"""The search: when an answer ends, when it is a loop, and which of several tries wins."""

from __future__ import annotations

import math
import zlib

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asr_serve.decoding.hypothesis import Hypothesis, compression_ratio, repeated_tokens
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.errors import OptionError

EOS = 2
SAID = list("the quick brown fox jumps over a lazy dog while nine sphinxes judge")


def words(tokens: list[int]) -> str:
    return " ".join(f"w{t}" for t in tokens)


def hypothesis(max_tokens: int = 40, text=words, **options) -> Hypothesis:
    return Hypothesis(SearchOptions(**options), EOS, max_tokens, text)


def append_all(h: Hypothesis, tokens: list[int], logprob: float = -0.1):
    """Add tokens until one ends it; returns the finish and the answer of `settle`."""
    for token in tokens:
        if finish := h.append_token(token, logprob):
            return finish, h.finalize(finish)
    raise AssertionError("it did not end")


# --- endings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "finish", "kept"),
    [
        (40, [7, 8, 9, EOS], "stop", (7, 8, 9)),
        (3, [7, 8, 9], "length", (7, 8, 9)),
        (40, [5, 6, *[7, 8, 9] * 10], "repetition", (5, 6, 7, 8, 9)),
        (40, [EOS], "stop", ()),
    ],
    ids=["end of text is no token", "the token limit", "a loop keeps its phrase once", "silence"],
)
def test_endings(max_tokens, tokens, finish, kept):
    found, answer = append_all(hypothesis(max_tokens, temperatures=(0.0,)), tokens, -0.5)
    assert found == answer.finish == finish
    assert answer.tokens == kept
    assert answer.avg_logprob == pytest.approx(-0.5), "the mean of the kept tokens and of end-of-text"
    assert (answer.temperature, answer.compression_ratio) == (0.0, 1.0)


# --- looping --------------------------------------------------------------------------------------


def runs(tokens: list[int]) -> tuple[int, int]:
    """By brute force: the shortest phrase the end repeats enough, and that run's length; else 0, 0."""
    for width in range(1, 25):
        n = width
        while n < len(tokens) and tokens[-n - 1] == tokens[-n - 1 + width]:
            n += 1
        if n >= max(16, 4 * width) and len(tokens) >= n:
            return width, n
    return 0, 0


phrases = st.lists(st.integers(3, 6), min_size=1, max_size=24)


@settings(deadline=None)
@given(st.lists(st.integers(3, 5), max_size=110))
def test_loop_detection_equals_brute_force(tokens):
    width, run = runs(tokens)
    assert repeated_tokens(tokens) == (run - width if width else 0)


@settings(deadline=None)
@given(st.lists(st.integers(3, 4), max_size=15))
def test_short_answers_never_loop(tokens):
    assert repeated_tokens(tokens) == 0


@settings(deadline=None)
@given(st.lists(st.integers(3, 9), max_size=20), phrases, st.integers(2, 3))
def test_two_or_three_repeats_pass(before, phrase, repeats):
    tokens = before + phrase * repeats
    width, _ = runs(tokens)
    assume(not width)  # the phrase itself may hold a loop
    assert repeated_tokens(tokens) == 0


@settings(deadline=None)
@given(st.lists(st.integers(3, 9), max_size=30), phrases, st.integers(4, 30))
def test_every_loop_is_caught_and_the_phrase_is_kept_once(before, phrase, repeats):
    assume(len(phrase) * repeats >= 16)
    tokens = before + phrase * repeats
    needless = repeated_tokens(tokens)
    assert needless > 0
    kept = tokens[:-needless]
    width, _ = runs(tokens)
    # what was dropped goes on as the phrase that is kept does
    cycle = kept[-width:]
    assert tokens[len(kept) :] == [cycle[i % width] for i in range(needless)]


@settings(deadline=None)
@given(st.lists(st.integers(3, 9), max_size=12), phrases)
def test_a_looping_row_ends_within_its_fourth_repeat(before, phrase):
    h = hypothesis(max_tokens=400, temperatures=(0.0,))
    finish, answer = append_all(h, before + phrase * 30)
    assert finish == "repetition"
    assert len(answer.tokens) <= len(before) + 2 * len(phrase)


def test_no_no_no_no_is_speech():
    assert repeated_tokens([5] * 15) == 0
    assert repeated_tokens([5] * 16) == 15
    assert repeated_tokens([5, 6] * 7 + [5]) == 0
    assert repeated_tokens(list(range(3, 28)) * 8) == 0, "a phrase of 25 tokens is longer than we look"


# --- fall-back ------------------------------------------------------------------------------------


def test_temperatures_are_tried_in_their_order():
    h = hypothesis(temperatures=(0.0, 0.3, 0.9), min_avg_logprob=-0.5)
    seen = []
    for _ in range(2):
        seen.append(h.temperature)
        assert append_all(h, [7, EOS], -1.0)[1] is None
        assert h.tokens == [], "a new try starts from nothing"
    seen.append(h.temperature)
    _, answer = append_all(h, [8, EOS], -0.2)
    assert seen == [0.0, 0.3, 0.9]
    assert (answer.tokens, answer.temperature) == ((8,), 0.9)
    assert answer.avg_logprob == pytest.approx(-0.2), "nothing of an earlier try counts"


@pytest.mark.parametrize(
    ("temperatures", "min_avg_logprob", "logprob"), [((0.0, 0.5), -1.0, -0.9), ((0.0,), 0.0, -9.0)],
    ids=["the first that passes wins", "a single rejected one is still an answer"],
)  # fmt: skip
def test_the_first_answer(temperatures, min_avg_logprob, logprob):
    h = hypothesis(temperatures=temperatures, min_avg_logprob=min_avg_logprob)
    _, answer = append_all(h, [7, EOS], logprob)
    assert (answer.tokens, answer.temperature) == ((7,), 0.0)


@given(st.permutations([-1.4, -1.1, -2.0]))
def test_the_likeliest_rejected_answer_wins(scores):
    h = hypothesis(temperatures=(0.0, 0.2, 0.4), min_avg_logprob=-1.0)
    answers = [append_all(h, [10 + i, EOS], score)[1] for i, score in enumerate(scores)]
    assert answers[:2] == [None, None]
    best = scores.index(-1.1)
    assert answers[2].tokens == (10 + best,)
    assert answers[2].temperature == (0.0, 0.2, 0.4)[best]


def test_a_finished_answer_beats_a_likelier_loop():
    h = hypothesis(temperatures=(0.0, 0.2), min_avg_logprob=-1.0)
    assert append_all(h, [5] * 30, -0.001)[1] is None
    _, answer = append_all(h, [7, EOS], -3.0)
    assert (answer.finish, answer.tokens) == ("stop", (7,))


def test_repetitive_text_is_decoded_again():
    said = iter(["ha " * 60, "".join(SAID)])
    h = hypothesis(text=lambda _: next(said), temperatures=(0.0, 0.4))
    assert append_all(h, [7, EOS])[1] is None
    _, answer = append_all(h, [7, EOS])
    assert answer.temperature == 0.4
    assert answer.compression_ratio < 2.4


# --- compression ratio and options ----------------------------------------------------------------


@given(st.text())
def test_the_compression_ratio_is_that_of_zlib(text):
    data = text.encode()
    expected = len(data) / len(zlib.compress(data)) if len(data) >= 32 else 1.0
    assert compression_ratio(text) == expected


def test_speech_passes_and_repetition_does_not():
    assert compression_ratio("it was the best of times, it was the worst of times, it was the age") < 2.4
    assert compression_ratio("thank you. " * 20) > 2.4


@pytest.mark.parametrize(
    "options",
    [
        {"temperatures": ()},
        {"temperatures": (-0.1,)},
        {"temperatures": (0.0, 2.1)},
        {"temperatures": (math.nan,)},
        {"temperatures": (math.inf,)},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        SearchOptions(**options)


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        SearchOptions().seed = 3
