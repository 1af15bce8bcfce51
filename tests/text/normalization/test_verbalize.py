"""What is written, and how it is read: the hard cases are rows of fixtures/verbalized.tsv."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import UnsupportedOption
from asr_serve.text.normalization.verbalize import verbalize

CASES = Path(__file__).parent / "fixtures" / "verbalized.tsv"
READ = [tuple(line.split("\t")) for line in CASES.read_text("utf-8").splitlines() if "\t" in line]
BRITISH = [
    ("03/04/2024", "the third of April, twenty twenty four"),
    ("1,234 km", "one thousand two hundred and thirty-four kilometres"),
    ("5 meters", "five metres"),
]


@pytest.mark.parametrize(("written", "read"), READ, ids=[written for written, _ in READ])
def test_written_forms_are_verbalized(written, read):
    assert verbalize(written) == read


@pytest.mark.parametrize(("written", "read"), BRITISH)
def test_british(written, read):
    assert verbalize(written, "en-gb") == read
    assert verbalize(written) != read


def test_another_language():
    with pytest.raises(UnsupportedOption, match="en, en-gb") as caught:
        verbalize("eins", "de")
    assert caught.value.param == "language"


@given(st.text(max_size=80) | st.text("0123456789.,:/-+$%'\" abxkmM€½@#", max_size=60))
def test_any_text_is_verbalized_without_digits(text):
    assert not any(letter in "0123456789" for letter in verbalize(text))


PLAIN = ["The", "quick,", "brown", "fox;", "jumps", "over", "a", "lazy", "dog.", "Why?", "I'd", "say:", "never!"]


@given(st.lists(st.sampled_from(PLAIN)))
def test_plain_words_stay_as_they_are(words):
    assert verbalize(" ".join(words)) == " ".join(words)
