"""Command line. One file per command; torch is loaded only inside the commands that need it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from asr_serve.api.cli import (
    batch,
    clone,
    cluster,
    doctor,
    edge,
    graph,
    listen,
    lm,
    models,
    plan,
    policy,
    serve,
    speak,
    transcribe,
    voices,
)
from asr_serve.api.cli.exit_codes import INTERRUPTED

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
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speech recognition and speech synthesis on your own machine.

    \b
      asr-serve transcribe talk.mp3              transcribe a recording
      asr-serve transcribe calls/ -f srt -o out/ write subtitles for a folder
      asr-serve listen --mic                     transcribe the microphone live
      asr-serve speak "Hello there."             synthesize speech; -o hello.mp3 writes it
      asr-serve clone --name me --audio clips/   clone a voice; asr-serve voices list
      asr-serve label calls/ --out labels        pseudo-labels for training, from two models
      asr-serve train voice --help               train a voice of your own
      asr-serve serve                            serve all of it over HTTP, for OpenAI's clients
      asr-serve batch submit calls/              have a server answer a folder, whenever it has time
      asr-serve cluster up                       serve on several machines, with Ray
      asr-serve models list                      list models
      asr-serve policy --help                    roll a model out to a share of the callers
      asr-serve lm build talks.txt -o talks.arpa build a language model from text
      asr-serve graph --help                     limit a streaming model to a fixed vocabulary
      asr-serve plan --callers 100 --mix mix.toml  plan how many replicas a load needs
      asr-serve edge                             take RTP from telephones and browsers
      asr-serve doctor                           show this machine, and what is missing
    """


app.command("transcribe", no_args_is_help=True)(transcribe.transcribe)
app.command("listen", no_args_is_help=True)(listen.listen)
app.command("speak", no_args_is_help=True)(speak.speak)
app.command("clone", no_args_is_help=True)(clone.clone)
app.add_typer(voices.app, name="voices")
app.command("serve")(serve.serve)
app.add_typer(batch.app, name="batch")
app.add_typer(cluster.app, name="cluster")
app.add_typer(models.app, name="models")
app.add_typer(policy.app, name="policy")
app.add_typer(lm.app, name="lm")
app.add_typer(graph.app, name="graph")
app.command("plan", no_args_is_help=True)(plan.plan)
app.command("edge")(edge.edge)
app.command("doctor")(doctor.doctor)
# Commands of other packages beside this one: `label` and `train` of asr_serve_tools.
for extension in entry_points(group="asr_serve.commands"):
    command = extension.load()
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=extension.name)
    else:
        app.command(extension.name, no_args_is_help=True)(command)


def main() -> None:
    """Entry point of the `asr-serve` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
