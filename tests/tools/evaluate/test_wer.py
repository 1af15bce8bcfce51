"""Error rates with answers known by hand."""

from __future__ import annotations

import sys

import pytest

from asr_serve.errors import OptionError
from asr_serve_tools.evaluate import wer as room
from asr_serve_tools.evaluate.wer import cer, normalize, wer

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.mark.parametrize(
    ("said", "heard", "counts", "percent"),
    [
        ("the cat sat", "the cat sat", (0, 0, 0, 3), 0.0),
        ("the cat sat", "The cat -- SAT!", (0, 0, 0, 3), 0.0),
        ("the cat sat", "the dog sat", (1, 0, 0, 2), 100 / 3),
        ("the cat sat", "the sat", (0, 1, 0, 2), 100 / 3),
        ("the cat sat", "the fat cat sat", (0, 0, 1, 3), 100 / 3),
        ("the cat sat", "", (0, 3, 0, 0), 100.0),
        ("cat", "a big black dog", (1, 0, 3, 0), 400.0),
        ("mister smith has twenty one colours", "Mr. Smith has 21 colors", (0, 0, 0, 5), 0.0),
    ],
    ids=["same", "case", "substitution", "deletion", "insertion", "silent", "above-100", "normalised"],
)
def test_words(said: str, heard: str, counts: tuple[int, int, int, int], percent: float) -> None:
    rate = wer([said], [heard])
    assert (rate.substitutions, rate.deletions, rate.insertions, rate.hits) == counts
    assert rate.percent == pytest.approx(percent)
    assert rate.reference == len(normalize(said).split())
    assert rate.errors == sum(counts[:3])


def test_the_rate_is_over_the_corpus() -> None:
    """One error in one word and none in nine: 10 %, not the mean of 100 % and 0 %."""
    rate = wer(["yes", "a b c d e f g h i"], ["no", "a b c d e f g h i"])
    assert rate.percent == pytest.approx(10.0)


def test_text_where_nothing_was_said_is_insertions() -> None:
    rate = wer(["one word here", "", "[noise]"], ["one word here", "thank you", ""])
    assert (rate.insertions, rate.reference) == (2, 3)
    assert cer(["abcd", ""], ["abcd", "xy"]).percent == pytest.approx(50.0)


def test_characters_count_the_spaces() -> None:
    rate = cer(["ab cd"], ["ab cx"])
    assert (rate.substitutions, rate.reference) == (1, 5)
    assert rate.percent == pytest.approx(20.0)


def test_normalize_leaves_single_spaces() -> None:
    assert normalize("  Hello,\n  WORLD!  [noise] ") == "hello world"


@pytest.mark.parametrize(
    ("references", "hypotheses", "says"),
    [
        (["a", "b"], ["a"], "2 references and 1 hypotheses"),
        ([], [], "0 references without a word"),
        (["", "[noise]"], ["a", "b"], "2 references without a word"),
        ("abc", ["abc"], "put it in a list"),
        (["abc"], "abc", "put it in a list"),
    ],
    ids=["lengths", "nothing", "only-silence", "reference-string", "hypothesis-string"],
)
def test_bad_inputs(references: list[str], hypotheses: list[str], says: str) -> None:
    for rate in (wer, cer):
        with pytest.raises(OptionError, match=says):
            rate(references, hypotheses)


@pytest.mark.parametrize("package", ["jiwer", "whisper_normalizer"])
def test_a_missing_package_names_the_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room._normalizer.cache_clear()
    for name in [package, "whisper_normalizer.english"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"not installed.*pip install jiwer whisper-normalizer"):
        wer(["a"], ["a"])
