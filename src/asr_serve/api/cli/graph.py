"""`asr-serve graph`: builds decoding graphs for streaming CTC models from a lexicon and a language model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error
from asr_serve.api.cli.models import as_text, print_table
from asr_serve.api.cli.options import AsJson, Weights
from asr_serve.errors import OptionError, WeightsMissing

if TYPE_CHECKING:
    from asr_serve.decoding.language_model.ngram_tables import WordNgrams
    from asr_serve.decoding.wfst.graph_builder import GraphStep
    from asr_serve.decoding.wfst.lexicon import CtcTokens, DecodingLexicon, WordSpeller
    from asr_serve.models.decoding_graph import DecodingGraph, GraphInfo
    from asr_serve.text.tokenizers import Tokenizer

app = typer.Typer(
    no_args_is_help=True, help="Decoding graphs: a fixed vocabulary and its language model for a streaming CTC model."
)

SHOWN_WORDS = 5
"""Words that a message names of many."""
MAX_WEIGHT = 10.0


@app.command("build")
@exit_on_error
def build_graph(
    language_model: Annotated[
        Path,
        typer.Argument(
            metavar="LANGUAGE_MODEL",
            help="N-grams of words: a file of asr-serve lm build (without --tokens), an ARPA file, or a binary file of "
            "KenLM. With order 1 it has the probabilities of single words.",
            show_default=False,
        ),
    ],
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens",
            metavar="MODEL|FOLDER",
            help="The streaming model with a CTC head that will search the graph, see: asr-serve models list; or a "
            "folder with a tokenizer, and --blank.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder that is made.", show_default=False)
    ],
    lexicon: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A word and the names of its tokens on each line, like: cat c a t. Several lines of a word are "
            "several spellings. Default: the model's tokenizer spells the words.",
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The words, one a line, which the model's tokenizer spells. Default: those of the language model.",
            show_default=False,
        ),
    ] = None,
    weight: Annotated[
        float, typer.Option(help="Factor of the language model's log-probabilities, beside those of the recogniser.")
    ] = 1.0,
    on_the_fly: Annotated[
        bool,
        typer.Option(
            "--on-the-fly",
            help="Leave the language model beside the graph, to be composed while it is searched: for large ones, "
            "whose graphs would fill the memory.",
        ),
    ] = False,
    blank: Annotated[
        int | None, typer.Option(metavar="ID", help="The blank's token, of a FOLDER of --tokens.", show_default=False)
    ] = None,
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Over a graph that is there.")] = False,
) -> None:
    """Build a graph of all sentences that a recogniser may return.

    The recogniser's search then follows the graph: it returns words of the
    lexicon only, and combines acoustic scores with those of the language model. Words of the
    lexicon that the language model lacks have the probability of <unk>. Words
    that the lexicon lacks are not recognised. It needs kaldifst:
    pip install 'asr-serve\\[build]'

    \b
    Examples
      asr-serve lm build orders.txt --order 3 -o orders.arpa
      asr-serve graph build orders.arpa --tokens armspeech-hy -o orders-graph
      asr-serve graph build orders.arpa --tokens u2pp-librispeech-en \\
          --weights u2pp/ --lexicon lexicon.txt --weight 0.7 -o orders-graph
      asr-serve transcribe calls/ --model armspeech-hy \\
          --set engine.decoding_graph=orders-graph
    """
    from asr_serve.decoding.language_model.ngram_files import read_ngrams
    from asr_serve.decoding.language_model.ngram_tables import missing_words
    from asr_serve.decoding.wfst.graph_builder import build_decoding_graph, cheaper_backoffs, import_kaldifst
    from asr_serve.decoding.wfst.lexicon import WordSpeller
    from asr_serve.models.decoding_graph import GraphInfo, checksum_tokens

    if not 0 < weight <= MAX_WEIGHT:
        raise OptionError(f"--weight {weight:g}", f"more than 0, up to {MAX_WEIGHT:g}", param="weight")
    if lexicon is not None and words is not None:
        raise OptionError("--words beside --lexicon", "one of them", "a lexicon has its words")
    check_output(output, force)
    import_kaldifst()  # before the files are read, which may take minutes
    tokenizer, model_tokens = load_tokens(tokens, weights, blank)
    ngrams = read_ngrams(language_model)
    check_words(ngrams, language_model, model_tokens)
    speller = WordSpeller(tokenizer, model_tokens)
    spelled = make_lexicon(speller, model_tokens, ngrams, lexicon, words)
    ids = {word: index for index, word in enumerate(spelled.words)}
    print_coverage(ngrams, spelled, missing_words(ngrams.reindexed(ids), len(spelled.words)).tolist())
    model = ngrams.for_words(spelled.words)
    if (cheaper := cheaper_backoffs(model)) and not on_the_fly:
        print(f"{cheaper:,} n-grams are less probable than their back-off, whose probability the graph has for them")
    model = model._replace(
        arc_logprobs=model.arc_logprobs * weight,
        backoff_logprobs=model.backoff_logprobs * weight,
        final_logprobs=model.final_logprobs * weight,
    )
    graph = build_decoding_graph(model_tokens, spelled, model, on_the_fly=on_the_fly, report=print_step)
    info = GraphInfo(
        model=tokens,
        tokens=len(model_tokens.names),
        tokens_checksum=checksum_tokens(tokenizer.token_names(), model_tokens.blank),
        words=len(spelled.words),
        spellings=len(spelled.spellings),
        language_model=language_model.name,
        lexicon=None if lexicon is None else lexicon.name,
        weight=weight,
        on_the_fly=on_the_fly,
    )
    write_folder(output, graph, info, speller.word_pieces(spelled))
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {size:,} bytes, {len(spelled.words):,} words")


@app.command("show")
@exit_on_error
def show_graph(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of asr-serve graph build.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """The size of a graph: its states, arcs and words, its bytes on disk and in memory, and what it was made of.

    \b
    Example
      asr-serve graph show orders-graph
    """
    from asr_serve.models.decoding_graph import GRAPH_FILE, DecodingGraph, GraphInfo

    if not (folder / GRAPH_FILE).is_file():
        raise WeightsMissing(f"no {GRAPH_FILE} in {folder}", "a folder that `asr-serve graph build` wrote")
    info, graph = GraphInfo.load(folder), DecodingGraph.load(folder / GRAPH_FILE)
    memory = sum(array.nbytes for array in graph.to_arrays().values())
    values = {
        "states": graph.states,
        "arcs": len(graph.arc_costs),
        "epsilon_arcs": int((graph.arc_labels < 0).sum()),
        **msgspec.to_builtins(info),
        "file_bytes": (folder / GRAPH_FILE).stat().st_size,
        "memory_bytes": memory,
    }
    if as_json:
        print(as_text(values))
        return
    print_table(
        ("STATES", "ARCS", "EPSILON ARCS", "WORDS", "SPELLINGS"),
        [
            (
                f"{graph.states:,}",
                f"{len(graph.arc_costs):,}",
                f"{values['epsilon_arcs']:,}",
                f"{info.words:,}",
                f"{info.spellings:,}",
            )
        ],
    )
    source = "the tokenizer" if info.lexicon is None else info.lexicon
    how = ", composed while it is searched" if info.on_the_fly else ""
    print(f"for {info.model}; words spelled by {source}; {info.language_model} with weight {info.weight:g}{how}")
    print(f"{values['file_bytes']:,} bytes on disk, {memory:,} in memory")


def load_tokens(name: str, weights: str | None, blank: int | None) -> tuple[Tokenizer, CtcTokens]:
    """Tokenizer and tokens of a model, or of a folder with a tokenizer. Raises UnknownModel, WeightsMissing,
    WeightsCorrupt, OptionError."""
    from asr_serve.decoding.wfst.lexicon import CtcTokens
    from asr_serve.engine.builder import AsrCheckpoint
    from asr_serve.models.registry import asr_card
    from asr_serve.text.tokenizers import load_tokenizer

    if Path(name).is_dir():
        if blank is None:
            raise OptionError(
                f"--tokens {name} without --blank", "the id of the CTC blank, beside a folder", "--blank 0"
            )
        tokenizer = load_tokenizer(Path(name))
        return tokenizer, CtcTokens.of(name, tokenizer, blank)
    asr_card(name)  # an unknown name is told first
    if blank is not None:
        raise OptionError(f"--blank {blank} of the model {name}", "nothing: a model tells its blank", "leave it out")
    found = AsrCheckpoint.find(name, weights)
    own = found.config.ctc_blank_id
    if not found.card.streaming or own is None:
        raise OptionError(f"--tokens {name}", "a streaming model with the head ctc", "see: asr-serve models list")
    return found.tokenizer, CtcTokens.of(name, found.tokenizer, own)


def check_words(ngrams: WordNgrams, path: Path, tokens: CtcTokens) -> None:
    """Raises OptionError for a model without words, or one of tokens."""
    from asr_serve.decoding.wfst.lexicon import NOT_WORDS

    own = [word for word in ngrams.words if word not in NOT_WORDS]
    if not own:
        raise OptionError(f"the language model {path} has no words", "n-grams of words")
    if ngrams.token is not None:
        raise OptionError(
            f"{path} has n-grams of tokens, like {ngrams.token}",
            "n-grams of words",
            "asr-serve lm build without --tokens makes them",
        )


def make_lexicon(
    speller: WordSpeller, tokens: CtcTokens, ngrams: WordNgrams, lexicon: Path | None, words: Path | None
) -> DecodingLexicon:
    """Lexicon of a file, of a list of words, or of the language model's words. Raises OptionError, SourceNotFound."""
    from asr_serve.decoding.wfst.lexicon import read_lexicon, read_words

    if lexicon is not None:
        return read_lexicon(lexicon, tokens)
    if words is not None:
        lines: dict[str, int] = {}
        for number, word in read_words(words):
            if word in lines:
                raise OptionError(
                    f"{words}, line {number}: {word[:60]!r} again, as in line {lines[word]}",
                    "each word once",
                    "remove the line",
                    param="words",
                )
            lines[word] = number
        if not lines:
            raise OptionError(f"{words} has no word", "a word a line", "write the words into it", param="words")
        found, unspelled = speller.lexicon(lines)
        if unspelled:
            raise OptionError(
                f"{words}, line {lines[unspelled[0]]}: {tokens.model} cannot write {unspelled[0][:60]!r}"
                + (f", nor {len(unspelled) - 1:,} other words" if unspelled[1:] else ""),
                "words of its letters",
                "spell them in a --lexicon, or remove them",
                param="words",
            )
        return found
    found, unspelled = speller.lexicon(ngrams.words)
    if not found.words:
        raise OptionError(
            f"{tokens.model} can write none of the {len(unspelled):,} words of the language model, like "
            f"{some(unspelled)}",
            "words of its letters, as it writes them",
        )
    if unspelled:
        print(f"left out are {len(unspelled):,} words that {tokens.model} cannot write: {some(unspelled)}")
    return found


def print_coverage(ngrams: WordNgrams, lexicon: DecodingLexicon, missing: Sequence[int]) -> None:
    """Tells which words have no n-gram. Raises OptionError where none has."""
    if len(missing) == len(lexicon.words):
        raise OptionError(
            f"the language model has none of the {len(lexicon.words):,} words of the lexicon, like "
            f"{some(lexicon.words)}",
            "words that both have, written alike",
            "build the language model from text with these words: look at capitals and accents",
        )
    if len(missing):
        fate = "are not recognised" if ngrams.unknown is None else "have the probability of <unk>"
        print(f"{len(missing):,} words are not in the language model and {fate}: ", end="")
        print(some([lexicon.words[word] for word in missing]))
    extra = len(set(ngrams.words) - set(lexicon.words) - {"<unk>"})
    if extra:
        print(f"{extra:,} words of the language model are not in the lexicon and are not recognised")


def some(words: Sequence[str]) -> str:
    """A few of the words, for a message."""
    shown = ", ".join(word[:40] for word in words[:SHOWN_WORDS])
    return f"{shown}, ..." if len(words) > SHOWN_WORDS else shown


def print_step(step: GraphStep) -> None:
    if step.name == "L":  # the first
        print(f"{'STEP':8}{'STATES':>14}{'ARCS':>14}{'SECONDS':>10}")
    print(f"{step.name:8}{step.states:>14,}{step.arcs:>14,}{step.duration_s:>10.1f}", flush=True)


def check_output(folder: Path, force: bool) -> None:
    """Raises OptionError for a folder that is there and may not, or must not, be written over."""
    from asr_serve.models.decoding_graph import GRAPH_INFO_FILE

    if not folder.exists():
        return
    if not force:
        raise OptionError(f"{folder} is there already", "another folder", "--force writes over it", param="output")
    if not (folder / GRAPH_INFO_FILE).is_file():
        raise OptionError(f"{folder} is there, and is no decoding graph", "another folder", param="output")


def write_folder(folder: Path, graph: DecodingGraph, info: GraphInfo, pieces: Sequence[str]) -> None:
    """Writes a graph, its words and its origin; what is there is replaced once all is written."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    graph.save(part)
    info.save(part)
    (part / "pieces.json").write_bytes(msgspec.json.encode(pieces))
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)
