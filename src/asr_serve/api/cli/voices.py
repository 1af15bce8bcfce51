"""`asr-serve voices`: lists, renames, deletes, exports and imports cloned voices."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.api.cli.models import as_text, print_table
from asr_serve.api.cli.options import AsJson, VoicesDir
from asr_serve.errors import OptionError
from asr_serve.output_file import replaced_file

if TYPE_CHECKING:
    from asr_serve.voices.voice_store import VoiceStore

app = typer.Typer(no_args_is_help=True, help="Cloned voices: list, show, rename, delete, export, import.")

Name = Annotated[str, typer.Argument(help="A voice's name; see: asr-serve voices list")]


def store_of(folder: str | None) -> VoiceStore:
    from asr_serve.config import voices_dir
    from asr_serve.voices.voice_store import VoiceStore

    return VoiceStore(voices_dir(folder))


@app.command("list")
@exit_on_error
def list_voices(voices_dir: VoicesDir = None, as_json: AsJson = False) -> None:
    """List cloned voices, with model, amount of speech and similarity.

    LIKE is the cosine of what it says to the recordings, of that of the
    recordings to each other: 100 % is the speaker.

    \b
    Example
      asr-serve voices list
    """
    cards = store_of(voices_dir).cards()
    if as_json:
        print(as_text(cards))
        return
    if not cards:
        print_error("there are no cloned voices: asr-serve clone makes one")
        return
    columns = ("NAME", "MODEL", "CLIPS", "SPEECH", "LIKE", "MADE", "CONSENT")
    rows: list[tuple[str, ...]] = [
        (
            card.name,
            card.model,
            str(card.clips),
            f"{card.seconds:.0f} s",
            "-" if card.similarity is None else f"{100 * card.similarity / card.ceiling:.0f} %",
            time.strftime("%Y-%m-%d", time.localtime(card.created)),
            shortened(card.consent.statement),
        )
        for card in cards
    ]
    print_table(columns, rows)


@app.command("show")
@exit_on_error
def show_voice(name: Name, voices_dir: VoicesDir = None, as_json: AsJson = False) -> None:
    """Show a voice's card and the consent of its speaker.

    \b
    Example
      asr-serve voices show ada
    """
    card = store_of(voices_dir).card(name)
    if as_json:
        print(as_text(card))
        return
    fields = msgspec.to_builtins(card)
    width = max(map(len, fields))
    for field, value in fields.items():
        shown = value["statement"] if field == "consent" else value
        print(f"{field:{width}}  {'-' if shown is None else shown}")


@app.command("rename")
@exit_on_error
def rename_voice(
    name: Name, new: Annotated[str, typer.Argument(help="New name.")], voices_dir: VoicesDir = None
) -> None:
    """Rename a voice. Servers use the new name from their next request on.

    \b
    Example
      asr-serve voices rename ada countess
    """
    card = store_of(voices_dir).card(name)
    store_of(voices_dir).rename(name, new, own_voices(card.model))
    print_error(f"{name!r} is {new!r} now")


@app.command("delete")
@exit_on_error
def delete_voice(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    voices_dir: VoicesDir = None,
) -> None:
    """Delete a voice permanently.

    \b
    Example
      asr-serve voices delete ada
    """
    store = store_of(voices_dir)
    store.card(name)
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Delete the voice {name!r} for good?", abort=True)
    store.delete(name)
    print_error(f"{name!r} is deleted")


@app.command("export")
@exit_on_error
def export_voice(
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write, or - for stdout. Default: NAME.zip."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    voices_dir: VoicesDir = None,
) -> None:
    """Export a voice as a zip file: its weights, its card and the consent of its speaker.

    \b
    Example
      asr-serve voices export ada -o ada.zip
    """
    data = store_of(voices_dir).export_voice(name)
    if output is not None and str(output) == "-":
        sys.stdout.buffer.write(data)
        return
    path = output or Path(f"{name}.zip")
    if path.exists() and not force:
        raise OptionError(f"{path} exists", "", "choose another name, or overwrite it with --force", param="output")
    with replaced_file(path) as part:
        part.write_bytes(data)
    print(path)


@app.command("import")
@exit_on_error
def import_voice(
    file: Annotated[Path, typer.Argument(help="File that asr-serve voices export wrote.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="New name. Default: the name that it was exported with."),
    ] = None,
    voices_dir: VoicesDir = None,
) -> None:
    """Import a voice that was exported elsewhere. It works only with the model that it was trained on.

    \b
    Example
      asr-serve voices import ada.zip
    """
    if not file.is_file():
        raise OptionError(f"{file} is not a file", "a file that asr-serve voices export wrote", param="file")
    with file.open("rb") as source:
        card = store_of(voices_dir).import_voice(source, name, every_own_voice())
    print_error(f"{card.name!r} is here; its speaker said: {card.consent.statement}")


def own_voices(model: str) -> tuple[str, ...]:
    """Names of a model's own voices; none for a model that this release does not know."""
    from asr_serve.models.registry import tts_cards

    cards = tts_cards()
    return cards[model].voices if model in cards else ()


def every_own_voice() -> set[str]:
    """Names of the own voices of all models that can learn voices: a cloned voice must have another name."""
    from asr_serve.models.registry import tts_cards

    return {voice for card in tts_cards().values() if card.clones for voice in card.voices}


def shortened(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
