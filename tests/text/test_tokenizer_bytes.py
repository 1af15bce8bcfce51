"""Vocabularies whose pieces hold any bytes: whatever a model says with them has words."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asr_serve.text.tokenizers import BytePieceTokenizer
from asr_serve.text.word_timing import align_words, locate_words
from asr_serve.types import Span

PARTS = [
    *("hello", " world", "don't", "12", "3.5", "$", "...", "-", "“", "”", " ", "\u00a0", "\u3000", "\ufffd"),
    *("👨\u200d👩\u200d👧", "🇦🇲", "e\u0301", "\u0301", "น้ำ", "ประเทศ", "日本", "ｶﾞ", "한국어", "مرحبا", "नमस्ते"),
]


def cut(text: str, sizes: random.Random) -> list[bytes]:
    data, found = text.encode(), []
    while data:
        size = sizes.choice([1, 1, 2, 3, 4, 6])
        found, data = [*found, data[:size]], data[size:]
    return found


def expect_words(pieces: list[bytes]) -> None:
    tokenizer = BytePieceTokenizer([b"<unk>", b"<s>", b"</s>", *pieces])
    tokens = list(range(3, 3 + len(pieces)))
    text, span = tokenizer.decode(tokens), Span(0, 160 * max(1, len(pieces)))
    times = [(160 * i, 160 * i + 160) for i in range(len(pieces))]
    found = align_words(text, tokens, [-0.1] * len(pieces), times, tokenizer.decode, span)
    assert "".join("".join(word.text for word in found).split()) == "".join(text.split())
    assert len(locate_words(text, found)) == len(found)
    at = 0
    for word in found:
        assert at <= word.start_samples < word.end_samples <= span.end_samples
        at = word.end_samples


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.integers(0, 99))
def test_bytes_cut_anywhere_are_decoded(parts: list[str], seed: int) -> None:
    expect_words(cut("".join(parts), random.Random(seed)))


@given(st.lists(st.binary(max_size=4), max_size=12))
@example([b"ab", b"  \xc2", b"\xa0"])
def test_invalid_utf8(pieces: list[bytes]) -> None:
    expect_words(pieces)


@pytest.mark.parametrize("end", [b"\xe3\x81", b"\xff", b" ", b"", b"\xc2"])
def test_an_answer_that_ends_within_a_character(end: bytes) -> None:
    expect_words([*cut("日本 and น้ำ", random.Random(1)), end])
