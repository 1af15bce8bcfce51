"""asr-serve graph: from a lexicon and a language model to a folder, its sizes, and what is refused."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from cli_process import expect_usage_error, invoke

from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.models.decoding_graph import GRAPH_FILE, DecodingGraph
from asr_serve.text.tokenizers import load_tokenizer

pytest.importorskip("kaldifst", reason="kaldifst is not installed: pip install 'asr-serve[build]'")

PIECES = ["", "\u2581c", "\u2581d", "a", "o", "t", "g", "\u2581"]
LEXICON = "cat \u2581c a t\ndog \u2581d o g\ncatt \u2581c a t\ncot \u2581c o t\ncot \u2581c a o t\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, a lexicon and a bigram model."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "pieces.json").write_text(json.dumps(PIECES))
    (tmp_path / "lexicon.txt").write_text(LEXICON)
    (tmp_path / "text.txt").write_text("cat cot\ndog cat\ncot dog cat\n")
    made = invoke("lm", "build", tmp_path / "text.txt", "--order", "2", "-o", tmp_path / "words.arpa")
    assert made.exit_code == 0, made.output
    return tmp_path


def build(folder: Path, *options: str | Path):
    arguments = ("--tokens", folder / "tokens", "--blank", "0", "-o", folder / "graph")
    return invoke("graph", "build", folder / "words.arpa", *arguments, *options)


def test_a_graph_is_built_and_shown(folder: Path) -> None:
    made = build(folder, "--lexicon", folder / "lexicon.txt", "--weight", "0.5")
    assert made.exit_code == 0, made.output
    graph = DecodingGraph.load(folder / "graph" / GRAPH_FILE)
    assert re.findall(r"^(L|G|L o G|det|min|T o) +[\d,]+ +[\d,]+ +\d+\.\d$", made.stdout, re.MULTILINE) == [
        "L", "G", "L o G", "det", "min", "T o",
    ]  # fmt: skip
    assert "1 words are not in the language model and have the probability of <unk>: catt" in made.stdout
    assert f"{graph.states:>14,}{len(graph.arc_costs):>14,}" in made.stdout
    assert "4 words" in made.stdout
    assert load_tokenizer(folder / "graph").decode([0, 3, 2]) == "cat cot catt"
    shown = json.loads(invoke("graph", "show", folder / "graph", "--json").stdout)
    assert shown["states"] == graph.states
    assert shown["arcs"] == len(graph.arc_costs)
    assert (shown["words"], shown["spellings"], shown["weight"]) == (4, 5, 0.5)
    assert (shown["lexicon"], shown["language_model"], shown["on_the_fly"]) == ("lexicon.txt", "words.arpa", False)
    text = invoke("graph", "show", folder / "graph").stdout
    assert f"{graph.states:,}" in text
    assert "words spelled by lexicon.txt; words.arpa with weight 0.5" in text


def test_words_are_spelled_by_the_tokenizer(folder: Path) -> None:
    made = build(folder)
    assert made.exit_code == 0, made.output
    assert load_tokenizer(folder / "graph").decode(range(9)) == "cat cot dog"
    (folder / "list.txt.gz").write_bytes(gzip.compress(b"dog\ncat\ntad\n"))
    (folder / "list2.txt").write_text("dog\ncat\n")
    refused = build(folder, "--words", folder / "list.txt.gz", "--force")
    expect_usage_error(refused, "list.txt.gz, line 3")
    made = build(folder, "--words", folder / "list2.txt", "--force")
    assert made.exit_code == 0, made.output
    assert "1 words of the language model are not in the lexicon" in made.stdout
    assert load_tokenizer(folder / "graph").decode(range(9)) == "dog cat"


def test_words_that_cannot_be_written_are_left_out_and_told(folder: Path) -> None:
    (folder / "text.txt").write_text("cat pig\ndog xyz cat\n")
    assert invoke("lm", "build", folder / "text.txt", "-o", folder / "words.arpa", "--force").exit_code == 0
    made = build(folder)
    assert made.exit_code == 0, made.output
    assert re.search(r"left out are 2 words that .* cannot write: (pig, xyz|xyz, pig)", made.stdout)


def test_a_graph_is_not_written_over_by_chance(folder: Path) -> None:
    (folder / "graph").mkdir()
    expect_usage_error(build(folder), "there already")
    expect_usage_error(build(folder, "--force"), "no decoding graph")
    (folder / "graph").rmdir()
    assert build(folder, "--on-the-fly").exit_code == 0
    expect_usage_error(build(folder), "--force")
    before = DecodingGraph.load(folder / "graph" / GRAPH_FILE)
    assert build(folder, "--force").exit_code == 0
    after = DecodingGraph.load(folder / "graph" / GRAPH_FILE)
    assert before.language_model is not None
    assert after.language_model is None
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dot \u2581d o q", "line 6: 'q' is no token of"),
        ("dot \u2581d oo t", "did you mean 'o'"),
        ("dot", "line 6: the word 'dot' has no spelling"),
        ("cot \u2581c o t", "line 6: 'cot' with the same spelling as in line 4"),
        ("dot \u2581d <token:0> t", "line 6: '<token:0>' is the blank"),
        ("<unk> \u2581d", "line 6: <unk> is no word"),
    ],
)
def test_a_lexicon_is_checked_by_line(folder: Path, line: str, message: str) -> None:
    (folder / "lexicon.txt").write_text(f"{LEXICON}{line}\n")
    refused = build(folder, "--lexicon", folder / "lexicon.txt")
    expect_usage_error(refused, message)
    assert "lexicon.txt, line 6" in refused.stderr
    assert not (folder / "graph").exists()


def test_a_token_between_words_is_no_part_of_a_spelling(folder: Path) -> None:
    (folder / "tokens" / "pieces.json").write_text(json.dumps(["\u2581", "c", "a", "t", ""]))
    (folder / "lexicon.txt").write_text("cat c a t\n\ncact c a \u2581 t\n")
    arguments = ("--tokens", folder / "tokens", "--blank", "4", "-o", folder / "graph")
    refused = invoke("graph", "build", folder / "words.arpa", *arguments, "--lexicon", folder / "lexicon.txt")
    expect_usage_error(refused, "lexicon.txt, line 3: '\u2581' in the spelling of 'cact'")


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b"cat \xff\n", "no text"), (b"c" * 70_000, "line 1: more than")],
)
def test_what_is_no_lexicon_is_refused(folder: Path, data: bytes, message: str) -> None:
    (folder / "lexicon.txt").write_bytes(data)
    expect_usage_error(build(folder, "--lexicon", folder / "lexicon.txt"), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weight", "0"), "more than 0"),
        (("--weight", "nan"), "more than 0"),
        (("--lexicon", "a", "--words", "b"), "one of them"),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: tuple[str, ...], message: str) -> None:
    expect_usage_error(build(folder, *options), message)


def test_wrong_tokens_are_refused(folder: Path) -> None:
    def refused(*arguments: str | Path) -> object:
        return invoke("graph", "build", folder / "words.arpa", "-o", folder / "graph", *arguments)

    expect_usage_error(refused("--tokens", "armspech-hy"), "did you mean 'armspeech-hy'")
    expect_usage_error(refused("--tokens", folder / "tokens"), "--blank")
    expect_usage_error(refused("--tokens", folder / "none", "--blank", "0"), "there is no model")
    expect_usage_error(refused("--tokens", folder / "tokens", "--blank", "9"), "0 to 8")
    expect_usage_error(refused("--tokens", "armspeech-hy", "--blank", "0"), "leave it out")
    expect_usage_error(refused("--tokens", "whisper-tiny-en"), "head ctc")


def test_a_list_without_words_is_refused(folder: Path) -> None:
    (folder / "list.txt").write_text("\n")
    expect_usage_error(build(folder, "--words", folder / "list.txt"), "list.txt has no word")


def test_wrong_language_models_are_refused(folder: Path) -> None:
    (folder / "text.txt").write_text("\u2581c a t\n")
    assert invoke("lm", "build", folder / "text.txt", "-o", folder / "words.arpa", "--force").exit_code == 0
    expect_usage_error(build(folder), "without --tokens")
    (folder / "words.arpa").write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-99 <s>\n-0.1 </s>\n-1 <unk>\n\n\\end\\\n")
    expect_usage_error(build(folder), "has no words")
    (folder / "words.arpa").write_text("\\data\\\nngram 1=2\n\n\\1-grams:\n-0.1 </s>\n-1 pig\n\n\\end\\\n")
    expect_usage_error(build(folder), "can write none of the 1 words")
    expect_usage_error(build(folder, "--lexicon", folder / "lexicon.txt"), "none of the 4 words of the lexicon")
    (folder / "words.arpa").write_text("\\data\\\nngram 1=1\n\n\\1-grams:\n-1 cat\n\n\\end\\\n")
    expect_usage_error(build(folder), "no sentence")
    assert invoke("graph", "build", folder / "no.arpa", "--tokens", "armspeech-hy", "-o", "g").exit_code == FAILED
    assert not (folder / "graph").exists()


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaldifst", None)
    expect_usage_error(build(folder), "pip install 'asr-serve[build]'")


def test_what_is_no_graph_is_not_shown(folder: Path) -> None:
    missing = invoke("graph", "show", folder)
    assert (missing.exit_code, "graph build" in missing.stderr) == (FAILED, True)
    assert build(folder).exit_code == 0
    (folder / "graph" / "graph.json").write_text("{}")
    broken = invoke("graph", "show", folder / "graph")
    assert (broken.exit_code, "graph.json cannot be read" in broken.stderr) == (FAILED, True)
    (folder / "graph" / "graph.json").unlink()
    assert invoke("graph", "show", folder / "graph").exit_code == FAILED
    assert invoke("graph").exit_code == USAGE


def test_help_shows_an_example() -> None:
    text = invoke("graph", "build", "--help").stdout
    assert "pip install 'asr-serve[build]'" in text
    assert "asr-serve graph build orders.arpa --tokens armspeech-hy" in text
    assert "engine.decoding_graph=orders-graph" in text
