"""Tokens and their times to words: the words say the text, and none lies where it cannot have been said."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asr_serve.text.tokenizers import BytePieceTokenizer
from asr_serve.text.word_timing import (
    MIN_WORD_SAMPLES,
    TOKEN_SOUND_SAMPLES,
    align_words,
    fit_word_times,
    locate_words,
    split_words,
    token_times_from_frames,
)
from asr_serve.types import Span, Word


def pieces(*texts: str) -> tuple[list[int], BytePieceTokenizer]:
    """Ids that say these, ▁ for a space."""
    vocabulary = [b"<unk>", b"<s>", b"</s>", *(text.encode() for text in texts)]
    return list(range(3, len(vocabulary))), BytePieceTokenizer(vocabulary)


def align(texts: list[str], times: list[tuple[int, int]], **more: object) -> list[Word]:
    tokens, tokenizer = pieces(*texts)
    span = more.pop("span", Span(0, 160_000))
    logprobs = more.pop("logprobs", [-0.5] * len(tokens))
    return list(align_words(tokenizer.decode(tokens), tokens, logprobs, times, tokenizer.decode, span, **more))  # type: ignore[arg-type]


def word_times(found: list[Word]) -> list[tuple[str, int, int]]:
    return [(word.text, word.start_samples, word.end_samples) for word in found]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Ever tried. Ever failed.", ["Ever", "tried.", "Ever", "failed."]),
        ("It's the U.S. (3.5%), no?", ["It's", "the", "U.S.", "(3.5%),", "no?"]),
        ("ten - or so", ["ten -", "or", "so"]),
        ("– Bonjour ! Ça va ?", ["– Bonjour !", "Ça", "va ?"]),
        ("& Co.", ["&", "Co."]),
        ("他说：“你好，world！”（3.5亿）", ["他", "说：", "“你", "好，", "world！”", "（3.5", "亿）"]),
        ("我用 iPhone 打电话。", ["我", "用", "iPhone", "打", "电", "话。"]),
        ("ﾊﾛｰ コーヒー", ["ﾊ", "ﾛ", "ｰ", "コ", "ー", "ヒ", "ー"]),
        ("안녕 하세요.", ["안녕", "하세요."]),
        ("น้ำดื่ม", ["น้ำ", "ดื่", "ม"]),  # a base, and all that stands above and below it
        ("cafe\u0301 नमस्ते दुनिया", ["cafe\u0301", "नमस्ते", "दुनिया"]),
        ("♪ la la", ["♪", "la", "la"]),
        ("...", ["..."]),
        ("  \t ", []),
        ("", []),
        (" a  b ", ["a", "b"]),
    ],
)
def test_split_words(text: str, want: list[str]) -> None:
    assert [text[first:behind] for first, behind in split_words(text)] == want


@given(st.text(alphabet=st.sampled_from("ab .,-(“”!?'你好ーはน้ำ안3%é\u0301♪ "), max_size=30))
def test_words_cover_the_text(text: str) -> None:
    """What lies outside of them are spaces, and inside a word there are some only before or behind a lone mark."""
    ranges = split_words(text)
    assert "".join(text[a:b] for a, b in ranges).replace(" ", "") == "".join(text.split())
    assert all(text[a] != " " and text[b - 1] != " " for a, b in ranges)
    assert ranges == sorted(ranges)
    assert all(left[1] <= right[0] for left, right in pairwise(ranges))


@pytest.mark.parametrize(
    ("tokens", "times", "span", "expected"),
    [
        (
            ["▁Ever", "▁tr", "ied", ".", "▁Ag", "ain"],
            [(0, 900), (1_000, 2_000), (2_000, 3_000), (3_000, 9_000), (9_000, 9_900), (9_900, 12_000)],
            None,
            [("Ever", 0, 900), ("tried.", 1_000, 3_000), ("Again", 9_000, 12_000)],
        ),
        (
            ["a", "b", "▁", "c"],
            [(1_000, 1_500), (1_500, 2_500), (2_500, 7_000), (7_000, 8_000)],
            None,
            [("ab", 1_000, 2_500), ("c", 7_000, 8_000)],
        ),
        (["..."], [(500, 900)], Span(100, 9_000), [("...", 100, 9_000)]),
        ([], [], None, []),
    ],
    ids=["first token to last", "the space of a spelling model is no part of a word", "marks alone", "nothing"],
)
def test_times_of_words(tokens, times, span, expected) -> None:
    found = align(tokens, times) if span is None else align(tokens, times, span=span)
    assert word_times(found) == expected


def test_confidence_is_the_geometric_mean_without_marks() -> None:
    logs = [math.log(p) for p in (0.9, 0.4, 0.1, 0.01)]
    times = [(1_000 * i, 1_000 * i + 1_000) for i in range(4)]
    ever, tried = align(["▁Ever", "▁tr", "ied", "."], times, logprobs=logs)
    assert ever.confidence == pytest.approx(0.9)
    assert tried.confidence == pytest.approx(0.2)
    assert [word.confidence for word in align(["▁Ever", "▁tr", "ied", "."], times, logprobs=[])] == [0.0, 0.0]


def test_characters_share_the_time_of_their_token() -> None:
    tokens, tokenizer = pieces("你好，", "x", "y", "z")
    split_character = "世".encode()
    tokenizer = BytePieceTokenizer([*tokenizer.pieces[:4], *(split_character[i : i + 1] for i in range(3))])
    times = [(0, 4_000), (5_000, 5_500), (5_500, 6_000), (6_000, 7_000)]
    found = align_words(tokenizer.decode(tokens), tokens, [-1.0] * 4, times, tokenizer.decode, Span(0, 8_000))
    assert word_times(list(found)) == [("你", 0, 2_000), ("好，", 2_000, 4_000), ("世", 5_000, 7_000)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [([(1_000, 7_000), (7_000, 25_000)], (20_000, 25_000)), ([(1_000, 2_000), (2_000, 21_000)], (2_000, 8_000))],
)
def test_a_word_that_spans_a_pause_keeps_its_longer_part(times, expected) -> None:
    assert fit_word_times(times, Span(0, 30_000), [Span(8_000, 20_000)]) == [times[0], expected]


def test_a_word_in_a_pause_moves_to_speech() -> None:
    pause = [Span(8_000, 20_000)]
    (_, first), (start, end), (second, _) = fit_word_times(
        [(1_000, 7_000), (12_000, 15_000), (20_100, 25_000)], Span(0, 30_000), pause
    )
    assert first == 7_000
    assert end <= 8_000 or start >= 20_000
    assert end <= second
    assert fit_word_times([(0, 100)], Span(0, 30_000), [Span(0, 30_000)]) == [(0, MIN_WORD_SAMPLES)], (
        "all of it is quiet"
    )


SPANS = st.lists(st.integers(0, 60_000), min_size=2, max_size=12, unique=True).map(
    lambda edges: [Span(a, b) for a, b in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)]
)


@given(
    raw=st.lists(st.tuples(st.integers(-5_000, 70_000), st.integers(-5_000, 70_000)), min_size=1, max_size=40),
    quiet=SPANS,
    span=st.tuples(st.integers(0, 30_000), st.integers(2_000, 40_000)).map(lambda x: Span(x[0], x[0] + x[1])),
)
@example(raw=[(0, 0)] * 40, quiet=[Span(0, 1_999)], span=Span(0, 2_000))
@example(raw=[(9, 3)], quiet=[], span=Span(0, 1))
def test_word_times_are_ordered_and_outside_silence(raw: list[tuple[int, int]], quiet: list[Span], span: Span) -> None:
    found = fit_word_times(raw, span, quiet)
    assert len(found) == len(raw)
    at = span.start_samples
    speech = span.samples - sum(
        max(0, min(q.end_samples, span.end_samples) - max(q.start_samples, span.start_samples)) for q in quiet
    )
    for start, end in found:
        assert at <= start <= end <= span.end_samples
        at = end
        if speech:
            assert not any(start < q.end_samples and q.start_samples < end for q in quiet)
    room = speech or span.samples
    if room >= len(raw) * MIN_WORD_SAMPLES and not quiet:
        assert all(end - start >= MIN_WORD_SAMPLES for start, end in found)
    if room >= 2 * len(raw):
        assert all(end > start for start, end in found)


@given(
    st.lists(
        st.tuples(st.sampled_from(["▁ha", "llo", ",", "▁", "你好", "。", "▁3", "."]), st.integers(0, 3_000)),
        max_size=20,
    )
)
def test_joined_words_are_the_text(spoken_pieces: list[tuple[str, int]]) -> None:
    times, at = [], 0
    for _, length in spoken_pieces:
        times.append((at, at + length))
        at += length
    tokens, tokenizer = pieces(*(text for text, _ in spoken_pieces))
    text = tokenizer.decode(tokens)
    found = align_words(text, tokens, [-0.1] * len(tokens), times, tokenizer.decode, Span(0, max(at, 1_000)))
    assert "".join(word.text for word in found).replace(" ", "") == text.replace(" ", "")
    where = locate_words(text, found)
    between = [text[a[1] : b[0]] for a, b in pairwise(where)]
    assert all(not gap.strip() for gap in between)
    assert all(0 < word.confidence <= 1 for word in found)


def test_a_token_of_a_streaming_model_lasts_until_the_next() -> None:
    assert token_times_from_frames([], 320, 1_000) == []
    assert token_times_from_frames([(1, 2), (3, 4), (100, 101)], 320, 33_000) == [
        (320, 960),
        (960, 960 + TOKEN_SOUND_SAMPLES),
        (32_000, 33_000),
    ]
