"""`asr-serve lm`: trains n-gram language models from text, and measures them."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from asr_serve.api.cli.exit_codes import exit_on_error
from asr_serve.api.cli.models import as_text, print_table
from asr_serve.errors import OptionError, SourceNotFound, UnsupportedOption

if TYPE_CHECKING:
    from asr_serve.decoding.language_model.kneser_ney import Perplexity

app = typer.Typer(no_args_is_help=True, help="N-gram language models: build one from text, measure it, look at it.")

MAX_LINE_CHARACTERS = 1 << 20
"""Length limit of a sentence; a longer line is no text with a sentence a line."""

Texts = Annotated[
    list[Path],
    typer.Argument(
        metavar="TEXT...", help="Text in UTF-8, a sentence a line: files, .gz too; - is stdin.", show_default=False
    ),
]
ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A file of asr-serve lm build, an ARPA file, or a binary file of KenLM.",
        show_default=False,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="MODEL",
        help="Count a recogniser's tokens instead of words, which is what its beam search asks for; "
        "see: asr-serve models list",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("build")
@exit_on_error
def build_model(
    texts: Texts,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write: its name ends in .ngram.safetensors, which loads fast, or in .arpa or .arpa.gz, which "
            "other programs read.",
            show_default=False,
        ),
    ],
    order: Annotated[int, typer.Option(help="Order of the model: words in the longest n-grams, 1 to 8.")] = 3,
    prune: Annotated[
        str,
        typer.Option(
            metavar="COUNTS",
            help="Count up to which n-grams are left out, for each order: 0,0,1 leaves out trigrams that occur once. "
            "The last number applies to all higher orders.",
        ),
    ] = "0",
    vocabulary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of all words, one per line; others count as <unk>. Default: the words of the text.",
        ),
    ] = None,
    tokens: Tokens = None,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            "--held-out", metavar="TEXT", help="Text to measure on, which is not trained on. May be repeated."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Train a model on text, by modified Kneser-Ney smoothing.

    The text should be written as the recognizer writes it: a model of upper-case
    words does not match lower-case output. With --tokens the model is for that
    recognizer alone; tokens are shorter than words, so use a higher --order,
    like 5.

    \b
    Examples
      asr-serve lm build talks.txt -o talks.ngram.safetensors
      asr-serve lm build notes/*.txt.gz --order 5 --prune 0,0,1 \\
          --tokens whisper-tiny-en --held-out test.txt -o notes.ngram.safetensors
      zcat news.gz | asr-serve lm build - -o news.arpa.gz
    """
    from asr_serve.decoding.language_model.kneser_ney import perplexity, train
    from asr_serve.decoding.language_model.ngram_files import check_ngram_path, write_ngrams

    check_ngram_path(output)
    if output.exists() and not force:
        raise OptionError(f"{output} exists", "", "choose another name, or overwrite it with --force", param="output")
    if tokens is not None and vocabulary is not None:
        raise OptionError("--vocabulary beside --tokens", "one of them", "a recogniser's tokens are all its words")
    check_stdin_once([*texts, *(held_out or [])])
    thresholds = parse_counts(prune)
    words = [line[0] for line in read_sentences([vocabulary], str.split)] if vocabulary is not None else []
    if vocabulary is not None and not words:
        raise OptionError(f"--vocabulary {vocabulary} has no word", "a word a line", param="vocabulary")
    split = splitter(tokens)
    trained = train(read_sentences(texts, split), order, thresholds, words)
    write_ngrams(trained, output)
    rows = [
        (str(n), f"{len(table.words):,}", *(f"{value:.3f}" for value in discounts))
        for n, (table, discounts) in enumerate(zip(trained.tables, trained.discounts, strict=True), start=1)
    ]
    print_table(("ORDER", "N-GRAMS", "D1", "D2", "D3+"), rows)
    print(f"{output}: {output.stat().st_size:,} bytes, {len(trained.words) - 1:,} {'tokens' if tokens else 'words'}")
    if held_out:
        print_perplexity(perplexity(trained.to_model(), read_sentences(held_out, split)))


@app.command("perplexity")
@exit_on_error
def measure_perplexity(model: ModelFile, texts: Texts, tokens: Tokens = None, as_json: AsJson = False) -> None:
    """Measure how well a model predicts a text: the lower the perplexity, the better.

    Words that the model lacks are counted apart, as OOV, and are not part of
    the perplexity: compare models on the same words. The ends of sentences are.

    \b
    Examples
      asr-serve lm perplexity talks.ngram.safetensors test.txt
      asr-serve lm perplexity notes.ngram.safetensors test.txt --tokens whisper-tiny-en
    """
    from asr_serve.decoding.language_model.kneser_ney import perplexity
    from asr_serve.decoding.language_model.ngram_files import read_ngrams

    check_stdin_once(texts)
    ngrams = read_ngrams(model)
    if tokens is None and ngrams.token is not None:
        raise OptionError(
            f"{model} has n-grams of tokens, like {ngrams.token}",
            "--tokens beside it",
            "name the recogniser whose tokens they are",
            param="tokens",
        )
    found = perplexity(ngrams, read_sentences(texts, splitter(tokens)))
    if not found.words:
        raise OptionError("no sentence to measure on", "text with a sentence a line", param="texts")
    if as_json:
        print(as_text(found._asdict()))
    else:
        print_perplexity(found)


@app.command("show")
@exit_on_error
def show_model(model: ModelFile, as_json: AsJson = False) -> None:
    """Show the size of a model: n-grams by order, words, bytes on disk and in memory.

    \b
    Example
      asr-serve lm show talks.ngram.safetensors
    """
    from asr_serve.decoding.language_model.ngram_files import read_ngrams

    ngrams = read_ngrams(model)
    memory = sum(array.nbytes for array in ngrams.model.to_arrays().values())
    values = {
        "order": len(ngrams.counts),
        "ngrams": ngrams.counts,
        "words": len(ngrams.words),
        "states": ngrams.model.states,
        "file_bytes": model.stat().st_size,
        "memory_bytes": memory,
    }
    if as_json:
        print(as_text(values))
        return
    print_table(("ORDER", "N-GRAMS"), [(str(n), f"{count:,}") for n, count in enumerate(ngrams.counts, start=1)])
    print(f"{len(ngrams.words):,} words, {ngrams.model.states:,} contexts")
    print(f"{model.stat().st_size:,} bytes on disk, {memory:,} in memory")


def print_perplexity(found: Perplexity) -> None:
    share = found.unknown / found.words if found.words else 0.0
    print(f"perplexity {found.perplexity:.2f}, OOV {share:.2%} ({found.unknown:,} of {found.words:,} words)")


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of --prune. Raises OptionError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise OptionError(f"--prune {text[:60]}", "counts with commas, like 0,0,1", param="prune")
    return tuple(map(int, parts))


def splitter(model: str | None) -> Callable[[str], list[str]]:
    """Function that splits a line into words, or into the tokens of a recogniser. Raises UnknownModel,
    UnsupportedOption for a recogniser of words, WeightsMissing."""
    if model is None:
        return str.split
    from asr_serve.models.checkpoints.store import resolve
    from asr_serve.models.registry import asr_card
    from asr_serve.text.tokenizers import load_tokenizer, sentence_encoder

    card = asr_card(model)
    if card.heads == ("wfst",):
        raise UnsupportedOption(
            f"--tokens {model}",
            f"models that return parts of words; {model} searches a decoding graph, which returns words",
            "leave --tokens out: a model of words is for it",
            param="tokens",
        )
    return sentence_encoder(load_tokenizer(resolve(card, None)))


def read_sentences(texts: Sequence[Path], split: Callable[[str], list[str]]) -> Iterator[list[str]]:
    """Words of each line that has any, file after file, each read as a stream. Raises OptionError, SourceNotFound."""
    for path in texts:
        number = 0
        try:
            with open_text(path) as file:
                while line := file.readline(MAX_LINE_CHARACTERS + 1):
                    number += 1
                    if len(line) > MAX_LINE_CHARACTERS:
                        raise OptionError(
                            f"{path}, line {number}: more than {MAX_LINE_CHARACTERS:,} characters", "a sentence a line"
                        )
                    if words := split(line):
                        yield words
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as failure:
            raise OptionError(
                f"{path} is no text after line {number}: {failure}", "UTF-8, or that compressed by gzip as .gz"
            ) from None
        except OSError as failure:
            raise SourceNotFound(f"{path}: {failure.strerror or failure}", "", "check the path") from None


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    if str(path) == "-":
        file = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig")
        try:
            yield file
        finally:
            file.detach()  # stdin stays open
        return
    with (
        gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")
    ) as file:
        yield file


def check_stdin_once(texts: Sequence[Path]) -> None:
    """Raises OptionError where stdin is to be read twice."""
    if [str(path) for path in texts].count("-") > 1:
        raise OptionError("- twice", "stdin is read once")
