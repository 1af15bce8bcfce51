"""`asr-serve eval`: compares recognizers over folders with transcripts."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asr_serve.api.cli import options as shared
from asr_serve.api.cli.exit_codes import FAILED, exit_on_error, print_error
from asr_serve.api.cli.options import AsJson, Device
from asr_serve.errors import OptionError

if TYPE_CHECKING:
    from asr_serve.evaluation.store import EvaluationStore, EvaluationSummary
    from asr_serve_tools.evaluate.rate_differences import RateDifference

app = typer.Typer(
    no_args_is_help=True,
    help="Compare recognizers over folders with transcripts: error rates with intervals, speed, latency, cost.",
)
DEFAULT_STORE = Path("evaluations.sqlite")
MAX_JOBS = 256
MOST_REASONS = 3
"""Reasons of failures that are printed."""

Store = Annotated[Path, typer.Option("--store", metavar="FILE", help="SQLite file of all results.")]


@app.command("run", no_args_is_help=True)
@exit_on_error
def run(
    systems: Annotated[
        str,
        typer.Option("--systems", "-s", metavar="NAME,NAME", help="Systems to compare (below).", show_default=False),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            metavar="FOLDER,FOLDER",
            help="Folders or lists with references (below).",
            show_default=False,
        ),
    ],
    store: Store = DEFAULT_STORE,
    live: Annotated[
        bool,
        typer.Option("--live", help="Send each clip at its own speed to /v1/stream of a server, and time its words."),
    ] = False,
    hotwords: shared.Hotwords = None,
    cost_per_hour: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE",
            min=0,
            help="Price of an hour of the machine; with RTFx it gives that of an hour of audio.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=MAX_JOBS, help="Requests in flight at a server, or live callers at once."),
    ] = 4,
    clips: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Only N clips of each dataset, spread evenly over it.", show_default=False
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, beside what the store has.")] = False,
    language: shared.Language = None,
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the table only, no progress.")] = False,
) -> int:
    """Measure systems over datasets.

    Every clip is stored as it is done, and the same command goes on after an
    interruption: what is there is not computed again. Another revision of a
    model, or a list or audio file that changed, is a run of its own.

    \b
    Systems
      whisper-tiny-en             a model of ours (asr-serve models list)
      whisper-tiny-en@int8        with int8 or dynamic weights, without (none), in fp32 or bf16
      http://host:8000/v1#MODEL   any OpenAI-compatible server or cluster ingress;
                                  the key is read from ASR_SERVE_API_KEY
      faster-whisper:tiny.en      if faster-whisper is installed; @float32
      vosk:small-en               if vosk is installed; or a folder

    \b
    Data
      FOLDER      transcripts.tsv: relative/path.flac, a tab, the text;
                  *.rttm beside it: diarization error
      LIST.jsonl  a manifest with the audio's path and `text`
      wav.scp     with Kaldi's `text` beside it

    Local systems run one after another in this process; --jobs is for servers.
    To spread a comparison over machines, serve the models and name the
    cluster's ingress as a system.

    \b
    Examples
      asr-serve eval run -s moonshine-tiny-en,whisper-tiny-en -d calls/
      asr-serve eval run -s whisper-tiny-en@int8,faster-whisper:tiny.en -d calls/
      asr-serve eval run -s http://localhost:8000/v1#moonshine-tiny-en -d calls/ --live
      asr-serve eval report --html report.html
    """
    from asr_serve.api.cli.progress import ProgressBar, ProgressMeter
    from asr_serve.config import client_key
    from asr_serve.evaluation.store import EvaluationStore
    from asr_serve_tools.evaluate.clip_lists import read_clips
    from asr_serve_tools.evaluate.evaluated_systems import check_key, check_system, open_system
    from asr_serve_tools.evaluate.evaluation_run import RunOptions, evaluate
    from asr_serve_tools.evaluate.rate_differences import differences_to_best

    names = _names(systems, "systems")
    for name in names:
        check_system(name)
    check_key(names, client_key())
    options = RunOptions(live, jobs, shared.hotwords(hotwords), language, cost_per_hour, not again)
    datasets = [read_clips(Path(folder), clips, language) for folder in _names(data, "data")]
    run_ids, failed = [], 0
    with EvaluationStore(store, create=True) as results:
        for name in names:
            meter = ProgressMeter()
            with ProgressBar(meter, shown=not quiet) as bar:
                system = open_system(name, jobs=jobs, device=device, api_key=client_key())
                try:
                    for listed in datasets:
                        meter.start()
                        outcome = evaluate(results, system, listed, options, bar.update)
                        run_ids.append(outcome.run.run_id)
                        failed += outcome.failed
                        if not quiet:
                            with bar.paused(stderr=True):
                                there = f", {outcome.before} already there" if outcome.before else ""
                                missing = f", {outcome.failed} failed" if outcome.failed else ""
                                print_error(
                                    f"{name}, {listed.dataset.name}: {outcome.clips} clips done{there}{missing}"
                                )
                finally:
                    system.close()
        found = [each for each in results.summaries() if each.run_id in run_ids]
        print_summaries(found)
        for each in differences_to_best(results, found):
            print_difference(each)
        if failed:
            _print_failures(results, run_ids)
            print_error(f"{failed} clips failed; asr-serve eval report shows all. The same command tries them again")
    return FAILED if failed else 0


@app.command("list")
@exit_on_error
def list_runs(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """List the runs of a store, newest first."""
    from asr_serve.evaluation.store import EvaluationStore

    with EvaluationStore(store) as results:
        found = results.summaries()
    if as_json:
        _print_json(found)
    else:
        print_summaries(found)


@app.command("report", no_args_is_help=True)
@exit_on_error
def report(
    store: Store = DEFAULT_STORE,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a page: one file, which needs no network.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    audio_mib: Annotated[
        float,
        typer.Option(
            metavar="MIB",
            min=0,
            max=512,
            help="Audio that the page may hold, of the clips with most errors; others are played from their files.",
        ),
    ] = 24.0,
) -> None:
    """Write a report of a store: tables that sort, a speed and accuracy plot, clips with errors marked.

    \b
    Examples
      asr-serve eval report --html report.html
      asr-serve eval report --store calls.sqlite --json
    """
    from asr_serve.evaluation.store import EvaluationStore
    from asr_serve_tools.evaluate.evaluation_report import MIB, write_report

    if html is None and not as_json:
        raise OptionError(
            "neither --html nor --json", "one of them, or both", "asr-serve eval report --html report.html"
        )
    with EvaluationStore(store) as results:
        if html is not None:
            print_error(write_report(results, html, round(audio_mib * MIB)))
        if as_json:
            _print_json(results.summaries())


def print_summaries(found: list[EvaluationSummary]) -> None:
    """Prints one line for each run; `-`: not measured. Columns that no run has are left out."""
    from asr_serve.api.cli.progress import print_ruled_table

    def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
        return "-" if value is None else f"{value:.{digits}f}{unit}"

    def rate(value: float | None, low: float | None, high: float | None) -> str:
        return figure(value) if value is None or low is None else f"{value:.2f} ({low:.2f}-{high:.2f})"

    rows: list[tuple[str, ...]] = [
        (
            f"{each.system}{' (live)' if each.live else ''}",
            each.dataset,
            f"{each.clips}/{each.dataset_clips}",
            rate(each.wer, each.wer_low, each.wer_high),
            figure(each.cer) if each.wer is not None else rate(each.cer, each.cer_low, each.cer_high),
            figure(each.rtfx, 1),
            figure(each.latency_p50_s),
            figure(each.first_word_p50_ms, 0),
            figure(each.final_p95_ms, 0),
            figure(each.der),
            figure(each.hotword_recall, 1),
            figure(each.cost_per_audio_hour, 4),
        )
        for each in found
    ]
    columns = (
        *("system", "dataset", "clips", "WER % (95 %)", "CER %", "RTFx", "p50 s", "first word ms", "final p95 ms"),
        *("DER %", "hot words %", "cost/h"),
    )
    measured = [any(row[place] != "-" for row in rows) or place < 3 for place in range(len(columns))]
    print_ruled_table(
        "",
        tuple(column for column, shown in zip(columns, measured, strict=True) if shown),
        [tuple(cell for cell, shown in zip(row, measured, strict=True) if shown) for row in rows],
    )


def print_difference(found: RateDifference) -> None:
    """Prints how far a system is behind the best one, and whether these clips tell the two apart."""
    bounds = f"95 %: {found.low:+.2f} to {found.high:+.2f}"
    said = "" if found.is_certain else ": these clips do not tell them apart"
    print_error(
        f"{found.dataset}: {found.system} has {found.points:.2f} points of {found.measure} more than {found.other} "
        f"({bounds}, over {found.clips} clips){said}"
    )


def _print_failures(results: EvaluationStore, run_ids: list[str]) -> None:
    """Prints the most frequent reasons of clips that failed, with one clip of each."""
    failures = [row for run_id in run_ids for row in results.results(run_id) if row.error is not None]
    clips = {row.error: row.path for row in failures}
    for reason, count in Counter(row.error for row in failures).most_common(MOST_REASONS):
        others = f" and {count - 1} more" if count > 1 else ""
        print_error(f"{clips[reason]}{others}: {reason}")


def _names(given: str, param: str) -> list[str]:
    names = [name for part in given.split(",") if (name := part.strip())]
    if not names:
        raise OptionError(f"--{param} is empty", "names, with commas between them", param=param)
    return list(dict.fromkeys(names))


def _print_json(found: list[EvaluationSummary]) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode({"evaluations": found}), indent=1).decode() + "\n")
