"""The command line. One file per command; torch is loaded only inside the commands that need it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from asr_serve.cli import doctor, label, listen, models, serve, speak, train, transcribe
from asr_serve.cli.exits import INTERRUPTED
from asr_serve.cli.voices import cloning, managing

app = typer.Typer(
    name="asr-serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"asr-serve {version('asr-serve')}")
        except PackageNotFoundError:
            print("asr-serve (run from its source, not installed)")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Speech to text, and text to speech, on your own machine.

    \b
      asr-serve transcribe talk.mp3              print what was said
      asr-serve transcribe calls/ -f srt -o out/ subtitles for a folder
      asr-serve listen --mic                     words while they are spoken
      asr-serve speak "Hello there."             say it, or -o hello.mp3
      asr-serve clone --name me --audio clips/   teach it a voice; asr-serve voices list
      asr-serve label calls/ --out labels        what two models agree on, to train on
      asr-serve train voice --help               make voices of your own
      asr-serve serve                            the same over HTTP, as OpenAI's clients speak it
      asr-serve models list                      which models there are
      asr-serve doctor                           this machine, what is missing
    """


app.command("transcribe", no_args_is_help=True)(transcribe.transcribe)
app.command("listen", no_args_is_help=True)(listen.listen)
app.command("label", no_args_is_help=True)(label.label)
app.command("speak", no_args_is_help=True)(speak.speak)
app.command("clone", no_args_is_help=True)(cloning.clone)
app.add_typer(managing.app, name="voices")
app.add_typer(train.app, name="train")
app.command("serve")(serve.serve)
app.add_typer(models.app, name="models")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """The `asr-serve` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
