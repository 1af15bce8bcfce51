"""`asr-serve clone`: recordings of a speaker to a voice model."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.api.cli.options import VoicesDir
from asr_serve.api.cli.progress import WorkProgress, clock_time

if TYPE_CHECKING:
    from asr_serve.voices.cloning_messages import CloneProgress, CloneReport

STAGE_LABELS = {
    "waiting": "waiting",
    "loading": "loading models",
    "listening": "listening to the recordings",
    "aligning": "finding every sound in them",
    "learning": "learning the voice",
    "comparing": "comparing it with the recordings",
    "done": "done",
}


@exit_on_error
def clone(
    audio: Annotated[
        list[str],
        typer.Option(
            "--audio", metavar="PATH", help="Recordings of one speaker: a folder, files, lists. May be repeated."
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the voice: a-z, 0-9, - and _.")
    ] = None,
    consent: Annotated[
        str | None,
        typer.Option(
            "--consent",
            metavar="TEXT",
            help='Statement in which the speaker agrees: "I, NAME, ...". It is stored with the voice.',
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            help="Transcripts of the recordings, one per line: NAME<tab or |>TEXT. A file beside a recording that "
            "ends in .txt or .lab is read too; recordings without a transcript are recognized.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Speech synthesis model to train; see: asr-serve models list")
    ] = "fastpitch-en",
    weights: Annotated[
        str | None, typer.Option(metavar="DIR", help="Checkpoint folder of that model, instead of its own weights.")
    ] = None,
    codec: Annotated[
        str | None, typer.Option(metavar="NAME", help="Vocoder to use instead of the model's own.")
    ] = None,
    recogniser: Annotated[
        str | None,
        typer.Option("--recogniser", metavar="NAME", help="Model that recognizes recordings without a transcript."),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Longest training time in minutes; training stops earlier when the loss no longer falls.",
            min=0.1,
        ),
    ] = 10.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the training.")] = 0,
    voices_dir: VoicesDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Clone the voice of a speaker who agrees to it.

    About 20 clips of 3 to 12 s, recorded in a quiet room, make a good voice;
    longer recordings are split at pauses. The recordings are not stored. Clips
    that are noisy, clipped, by another speaker or unlike their transcript are
    left out, and the report lists them.

    A voice belongs to its speaker. Clone your own, or that of somebody who has
    given you permission.

    \b
    Examples
      asr-serve clone --name ada --audio recordings/ \\
        --consent "I, Ada Lovelace, agree that my voice is cloned for our phone line."
      asr-serve speak --voice ada "This is how I sound."
      asr-serve voices list
    """
    from asr_serve.config import thread_limit
    from asr_serve.config import voices_dir as folder_of
    from asr_serve.errors import MissingOption
    from asr_serve.voices.cloned_voice import check_voice_name
    from asr_serve.voices.cloned_voice import validated_consent as agreed
    from asr_serve.voices.cloning_messages import CloneRequest

    if name is None:
        raise MissingOption("--name is missing", "a name for the voice", "like: --name ada", param="name")
    statement = agreed(consent, getpass.getuser())
    request = CloneRequest(
        name=check_voice_name(name),
        audio=audio,
        texts=read_texts(texts),
        consent=statement,
        model=model,
        weights=weights,
        vocoder=codec,
        recogniser=recogniser,
        voices_dir=str(folder_of(voices_dir)),
        minutes=minutes,
        seed=seed,
        threads=thread_limit(),
    )
    from asr_serve.cloning.clone import clone_voice as made

    with WorkProgress(print_error, shown=not quiet) as bar:
        report = made(
            request, lambda progress: bar.update(progress.share, STAGE_LABELS[progress.stage], progress_line(progress))
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print("\n".join(report_text(report)))


def read_texts(path: Path | None) -> dict[str, str]:
    """Reads the transcripts of --texts. Raises OptionError."""
    from asr_serve.errors import OptionError
    from asr_serve.voices.transcripts import parse_transcripts

    if path is None:
        return {}
    try:
        return parse_transcripts(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        raise OptionError(f"--texts {path}: {failure}", "a text in UTF-8", param="texts") from failure


def progress_line(progress: CloneProgress) -> str:
    left = "" if progress.left_s is None else f"at most {clock_time(progress.left_s)} left"
    return ", ".join(filter(None, ("" if progress.held_out is None else f"loss {progress.held_out:.3f}", left)))


def report_text(report: CloneReport) -> list[str]:
    """Formats the report as text."""
    card = report.card
    left_out = [clip for clip in report.clips if clip.left_out]
    lines = [
        f"The voice {card.name!r} was cloned in {clock_time(report.took_s)}: {card.clips} clips, "
        f"{card.seconds:.0f} s of speech, from {card.start!r} in {card.steps} steps."
    ]
    if card.similarity is not None:
        lines.append(
            f"It is {100 * card.similarity / card.ceiling:.0f} % as like the recordings as they are each other "
            f"(cosine {card.similarity:.2f} of {card.ceiling:.2f})."
        )
    else:
        lines.append("Its similarity was not measured: the vocoder is not on this machine.")
    if left_out:
        lines += [f"{len(left_out)} of {len(report.clips)} clips were left out:"]
        lines += [f"  {clip.clip}  {clip.left_out}" for clip in left_out]
    return [*lines, f'Hear it: asr-serve speak --voice {card.name} "This is how I sound."']
