"""Error rates with answers known by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asr_serve.errors import OptionError
from asr_serve_tools.evaluate import wer as room
from asr_serve_tools.evaluate.wer import cer, normalize, wer

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.mark.parametrize(
    ("reference", "hypothesis", "counts", "percent"),
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
def test_words(reference: str, hypothesis: str, counts: tuple[int, int, int, int], percent: float) -> None:
    rate = wer([reference], [hypothesis])
    assert (rate.substitutions, rate.deletions, rate.insertions, rate.hits) == counts
    assert rate.percent == pytest.approx(percent)
    assert rate.reference == len(normalize(reference).split())
    assert rate.errors == sum(counts[:3])


@pytest.mark.parametrize(
    ("rate", "references", "hypotheses", "counts", "percent"),
    [
        # One error in one word and none in nine: 10 %, not the mean of 100 % and 0 %.
        (wer, ["yes", "a b c d e f g h i"], ["no", "a b c d e f g h i"], (1, 0, 10), 10.0),
        (wer, ["one word here", "", "[noise]"], ["one word here", "thank you", ""], (0, 2, 3), 200 / 3),
        (cer, ["abcd", ""], ["abcd", "xy"], (0, 2, 4), 50.0),
        (cer, ["ab cd"], ["ab cx"], (1, 0, 5), 20.0),
    ],
    ids=["over the corpus", "insertions in silence", "characters in silence", "spaces are characters"],
)
def test_corpus_rates(
    rate: Any, references: list[str], hypotheses: list[str], counts: tuple[int, int, int], percent: float
) -> None:
    found = rate(references, hypotheses)
    assert (found.substitutions, found.insertions, found.reference) == counts
    assert found.percent == pytest.approx(percent)


def test_normalize_leaves_single_spaces() -> None:
    assert normalize("  Hello,\n  WORLD!  [noise] ") == "hello world"


@pytest.mark.parametrize(
    ("references", "hypotheses", "match"),
    [
        (["a", "b"], ["a"], "2 references and 1 hypotheses"),
        ([], [], "0 references without a word"),
        (["", "[noise]"], ["a", "b"], "2 references without a word"),
        ("abc", ["abc"], "put it in a list"),
        (["abc"], "abc", "put it in a list"),
    ],
    ids=["lengths", "nothing", "only-silence", "reference-string", "hypothesis-string"],
)
def test_bad_inputs(references: list[str], hypotheses: list[str], match: str) -> None:
    for rate in (wer, cer):
        with pytest.raises(OptionError, match=match):
            rate(references, hypotheses)


@pytest.mark.parametrize("package", ["jiwer", "whisper_normalizer"])
def test_a_missing_package_names_the_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room._normalizer.cache_clear()
    for name in [package, "whisper_normalizer.english"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"not installed.*pip install jiwer whisper-normalizer"):
        wer(["a"], ["a"])
