"""The written form: the committed cases, times, marks, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.errors import UnsupportedOption
from asr_serve.pipelines.segments import SegmentNormalizer
from asr_serve.text.normalization import inverse_cjk, inverse_edits, inverse_numbers, wetext_grammar
from asr_serve.text.normalization.inverse import check_inverse_normalization, inverse_normalize
from asr_serve.text.word_timing import locate_words, split_words
from asr_serve.types import Alternative, Segment, Word

CASES = Path(__file__).parents[3] / "bench" / "itn_cases.tsv"
STILL_WRONG = {
    "one hundred pounds",
    "a thousand dollars",
    "two and a half million dollars",
    "in the eighties",
    "the hundredth time",
    "double oh seven",
    "There were twelve of them.",
    "a hundred people",
    "twenty one degrees Celsius",
    "six foot two",
    "负五度",
    "零下五度",
    "三・一四",
    "第二十五回",
}
"""Of the cases; whoever mends one takes it out here."""
UNTOUCHED = STILL_WRONG - {"one hundred pounds", "twenty one degrees Celsius"}
"""Of these the text stays as it was said: nothing wrong is written."""
ROWS = [line.split("\t") for line in CASES.read_text("utf-8").splitlines() if not line.startswith("#")]


def segment(text: str, *, confidences: Sequence[float] = (0.9,)) -> Segment:
    """A second for each word."""
    words = tuple(
        Word(text[first:behind], 16_000 * at, 16_000 * at + 12_000, confidences[at % len(confidences)])
        for at, (first, behind) in enumerate(split_words(text))
    )
    return Segment(0, 16_000 * len(words), text, words=words)


@pytest.mark.parametrize(("language", "said", "wanted"), ROWS, ids=[row[1] for row in ROWS])
def test_the_committed_cases(language: str, said: str, wanted: str) -> None:
    made = inverse_normalize(segment(said), language)
    assert (made.text != wanted) == (said in STILL_WRONG), made.text
    if said in UNTOUCHED:
        assert made == segment(said)
    again = inverse_normalize(made, language)
    assert again == made
    if made.text != said:
        assert made.spoken == said
    assert [made.text[a:b] for a, b in locate_words(made.text, made.words)] == [w.text for w in made.words]
    times = [t for w in made.words for t in (w.start_samples, w.end_samples)]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0, segment(said).words[-1].end_samples)


def test_a_written_word_lasts_as_long_as_what_was_said_for_it() -> None:
    made = inverse_normalize(
        segment("I paid twenty-five dollars and thirty cents on May fifth, two thousand and ten."), "en"
    )
    assert made.text == "I paid $25.30 on May 5, 2010."
    told = [(w.text, w.start_samples // 16_000, w.end_samples // 16_000 + 1, w.spoken) for w in made.words]
    assert told == [
        ("I", 0, 1, ""),
        ("paid", 1, 2, ""),
        ("$25.30", 2, 7, "twenty-five dollars and thirty cents"),
        ("on", 7, 8, ""),
        ("May", 8, 9, ""),
        ("5,", 9, 10, "fifth"),
        ("2010.", 10, 14, "two thousand and ten"),
    ]


def test_a_written_word_is_as_certain_as_its_least_certain_part() -> None:
    made = inverse_normalize(segment("Room one oh one.", confidences=(0.9, 0.8, 0.3, 0.7)), "en")
    assert [(w.text, w.confidence) for w in made.words] == [("Room", 0.9), ("101.", 0.3)]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        # as Moonshine and Whisper write them, of our own voice
        ("Call five, five, five, one, two, three, four, five, six, seven.", "Call 555-123-4567."),
        ("Please dial five, five, five, one, two, three, four.", "Please dial 555-1234."),
        ("At two, one, two, five, five, five, oh, one, nine, eight, please.", "At 212-555-0198, please."),
        ("Call 555-1234567.", "Call 555-123-4567."),
        ("Call 1-212-5551234 now.", "Call 1-212-555-1234 now."),
        ("Call five five five one two three four.", "Call 555-1234."),
        ("Call five five five, one two three, four five six seven.", "Call 555-123-4567."),
        ("Call five five five - one two three - four five six seven.", "Call 555-123-4567."),
        ("Call triple five oh one double nine, or ask.", "Call 555-0199, or ask."),
        ("call one eight hundred five five five one two three four", "call 1-800-555-1234"),
        ("I paid twenty-five dollars, five five five one two three four.", "I paid $25, 555-1234."),
        # no telephone's
        ("Two, three, four, five, six, seven, eight!", None),
        ("seven, six, five, four, three, two, one, go", None),
        ("Five, five, five, one, two, three.", None),
        ("Five, five, five, one, two, three, four, ten, eleven.", None),
        ("One, five, five, one, two, three, four.", None),
        ("five, five, five. One, two, three, four", None),
        ("555-12345678 and 12-555-1234567 and 555-1234 and 1555-1234567", None),
    ],
)
def test_telephone_numbers(said: str, wanted: str | None) -> None:
    made = inverse_normalize(segment(said), "en")
    assert made.text == (wanted or said)
    assert made.spoken == ("" if wanted is None else said)
    assert inverse_normalize(made, "en") == made
    assert [made.text[a:b] for a, b in locate_words(made.text, made.words)] == [w.text for w in made.words]
    assert made.words[-1].end_samples == segment(said).words[-1].end_samples


def test_words_of_two_speakers_are_not_one_number() -> None:
    said = segment("twenty five dollars")
    first, *others = said.words
    parted = Segment(0, said.end_samples, said.text, words=(Word("twenty", 0, 9, 0.9, "A"), *others))
    assert first.speaker == ""
    assert inverse_normalize(parted, "en") == parted


def test_without_words_only_the_text_is_written() -> None:
    made = inverse_normalize(Segment(0, 16_000, "Fifty five percent, they say."), "en")
    assert (made.text, made.spoken, made.words) == ("55%, they say.", "Fifty five percent, they say.", ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "...",
        "“Quoted,” she said.",
        "$25.30 on May 5, 2010.",
        "It's 3:30 p.m.",
        "2023年5月3号",
        "ॐ नमः",
        "a\x00b",
    ],
)
@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_written_forms_are_unchanged(text: str, language: str) -> None:
    assert inverse_normalize(Segment(0, 10, text), language) == Segment(0, 10, text)


_NEAR = "one two five twenty fifty hundred thousand and oh point dollars percent may first a p.m. half past minus"
NEAR = st.sampled_from([*_NEAR.split(), "Twenty-five", "dot", "com", "at", "the", ",", "三", "百"])


@settings(deadline=None)
@given(st.lists(st.one_of(NEAR, st.text(max_size=6)), max_size=12).map(" ".join), st.sampled_from(["en", "zh", "ja"]))
def test_any_text_keeps_its_words_and_their_times(text: str, language: str) -> None:
    said = segment(text)
    made = inverse_normalize(said, language)
    assert len(made.words) <= max(1, len(said.words)) + 2 * len(made.text)
    times = [t for w in made.words for t in (w.start_samples, w.end_samples)]
    assert all(a.start_samples <= b.start_samples for a, b in zip(made.words, made.words[1:], strict=False))
    assert not times or (times[0], times[-1]) == (said.words[0].start_samples, said.words[-1].end_samples)
    assert "".join("".join(w.text.split()) for w in made.words) == "".join(made.text.split()) or not made.words
    assert bool(made.spoken) == (made.text != said.text)


def test_a_long_text_is_normalized_in_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar's time grows with the square of what it is given at once."""
    asked: list[str] = []

    def note(said: str, language: str) -> tuple[wetext_grammar.GrammarRewrite, ...]:
        asked.append(said)
        return ()

    monkeypatch.setattr(inverse_edits, "find_rewrites", note)
    prose = "nothing to be counted here at all " * 3_000
    assert inverse_edits.find_edits(prose, "en") == []
    assert asked == []
    inverse_edits.find_edits("twenty five men " * 8_000, "en")
    assert max(len(each.split()) for each in asked) == inverse_edits.MAX_SPAN_WORDS
    assert sum(len(each.split()) for each in asked) == 24_000
    asked.clear()
    inverse_edits.find_edits("二十五人" * 10_000, "zh")
    assert max(map(len, asked)) == inverse_edits.MAX_SPAN_CHARACTERS
    assert "".join(asked) == "二十五人" * 10_000
    asked.clear()
    inverse_edits.find_edits("twenty five " * 8_000, "en")  # nobody says such a number
    inverse_edits.find_edits("二十五" * 10_000, "zh")
    assert max(map(len, asked), default=0) <= inverse_edits.MAX_SPAN_CHARACTERS


def test_other_languages_have_none() -> None:
    assert inverse_normalize(segment("vingt-cinq euros"), "fr") == segment("vingt-cinq euros")
    with pytest.raises(UnsupportedOption, match="en, ja, zh") as error:
        check_inverse_normalization("fr")
    assert error.value.param == "itn"
    check_inverse_normalization("")
    check_inverse_normalization("zh")
    with pytest.raises(UnsupportedOption):
        SegmentNormalizer("hy", itn=True)
    assert SegmentNormalizer("hy", itn=False).normalize(segment("twenty five"), "hy") == segment("twenty five")
    assert SegmentNormalizer("", itn=True).normalize(segment("twenty five"), "en").text == "25"


def test_alternatives_are_written_too() -> None:
    spoken = ("twenty five", "twenty nine")
    alternatives = tuple(Alternative(text, -float(i), segment(text).words) for i, text in enumerate(spoken))
    listed = msgspec.structs.replace(segment(spoken[0]), alternatives=alternatives)
    written = SegmentNormalizer("en", itn=True).normalize(listed, "en")
    assert (written.text, written.spoken) == ("25", "twenty five")
    assert [(each.text, each.score) for each in written.alternatives] == [("25", 0.0), ("29", -1.0)]
    assert [[word.text for word in each.words] for each in written.alternatives] == [["25"], ["29"]]


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wetext_grammar.load_wetext.cache_clear()
    monkeypatch.setitem(sys.modules, "wetext", None)
    try:
        for asked in (lambda: check_inverse_normalization("en"), wetext_grammar.load_wetext):
            with pytest.raises(UnsupportedOption, match=r"pip install 'asr-serve\[itn\]'"):
                asked()
    finally:
        wetext_grammar.load_wetext.cache_clear()


READS = """
import kaldifst
from asr_serve.text.normalization.wetext_grammar import find_rewrites, load_wetext

read, paths = kaldifst.TextNormalizer, []


def noted(path):
    paths.append(path)
    return read(path)


kaldifst.TextNormalizer = noted
load_wetext()
assert kaldifst.TextNormalizer is noted
assert [each.text for each in find_rewrites("twenty five", "en")] == ["25"]
assert paths == [], paths
from wetext import normalize  # nobody here asks for that; who does gets it, and the graph is read once

assert {normalize("25", lang="en", operator="tn") for _ in range(2)} == {"twenty five"}
assert {path.rpartition("fsts")[2][1:] for path in paths} == {"en/tn/tagger.fst", "en/tn/verbalizer.fst"}
assert len(paths) == 2, paths
"""


def test_only_requested_graphs_are_loaded() -> None:
    """Each keeps every thread waiting while it is read."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", READS], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@settings(deadline=None)
@given(st.integers(0, 10**9 - 1))
def test_numbers_read_back(number: int) -> None:
    assert inverse_numbers.number_value(in_words(number)) == number


@settings(deadline=None)
@given(st.integers(1, 10**8 - 1))
def test_chinese_numbers_read_back(number: int) -> None:
    assert inverse_cjk.cjk_number(in_characters(number)) == number


def in_words(number: int) -> list[str]:
    ones = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    ones += "seventeen eighteen nineteen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    if number < 20:
        return [ones.split()[number]]
    if number < 100:
        return [tens.split()[number // 10 - 2], *(in_words(number % 10) if number % 10 else [])]
    for size, name in ((10**6, "million"), (1_000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return [*in_words(number // size), name, *(["and"] * (0 < rest < 100)), *(in_words(rest) if rest else [])]
    raise AssertionError


def in_characters(number: int) -> str:
    if number >= 10_000:
        high, low = divmod(number, 10_000)
        return f"{in_characters(high)}万{'零' if 0 < low < 1_000 else ''}{in_characters(low) if low else ''}"
    made, gap = "", False
    for size, name in ((1_000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // size % 10
        if digit:
            made += ("零" if gap and made else "") + "零一二三四五六七八九"[digit] + name
            gap = False
        else:
            gap = True
    return made
