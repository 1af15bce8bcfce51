"""`asr-serve label`: pseudo-labels for untranscribed speech, from the agreement of two models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from asr_serve.api.cli import options as shared
from asr_serve.api.cli.exit_codes import FAILED, exit_on_error, print_error
from asr_serve.api.cli.options import Device, Dtype, Language, Quantize, Set
from asr_serve.errors import OptionError
from asr_serve.text.languages import requested_language_code

if TYPE_CHECKING:
    from asr_serve.audio.input_manifest import InputItem
    from asr_serve_tools.label.label_store import LabelSummary
    from asr_serve_tools.label.labeling import LabelUnit


@exit_on_error
def label(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="MANIFEST|FOLDER...", help="Audio files, folders, quoted globs, lists (.scp, .jsonl, .txt)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for labels and report.")],
    models: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Two recognition models. The text of the first becomes the label.")
    ] = "moonshine-tiny-en,whisper-tiny-en",
    threshold: Annotated[
        float, typer.Option(help="Largest character error rate between the two texts at which a segment is kept.")
    ] = 0.1,
    per: Annotated[str, typer.Option(metavar="segment|file", help="Unit that is kept or left out.")] = "segment",
    language: Language = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    more: Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, no progress.")] = False,
) -> int:
    """Make pseudo-labels for untranscribed speech, from the agreement of two models.

    Both models transcribe every recording, split at the same pauses. A segment
    whose two texts differ in few characters is kept, with the first model's
    text as its label: training data without any reference (CER-Hypo).

    \b
    DIR/kept.jsonl    audio_filepath, offset, duration, text, cer and both
                      hypotheses: a manifest as NeMo reads it
    DIR/all.jsonl     the same of every segment
    DIR/kept.svg      hours kept against the threshold
    DIR/summary.json  the same in numbers

    The same command continues after an interruption; another --threshold needs
    no new transcription. A file that fails is reported at the end.

    \b
    Examples
      asr-serve label calls/ --out labels
      asr-serve label unlabelled.jsonl --out labels --threshold 0.05
      asr-serve label talks/ -o labels --models moonshine-base-en,whisper-base-en
      asr-serve label clips/ -o labels --per file
    """
    from asr_serve.api.cli.progress import ProgressBar, ProgressMeter
    from asr_serve.audio import input_manifest
    from asr_serve_tools.label.label_store import LabelStore, lock_label_folder
    from asr_serve_tools.label.labeling import check_label_options, max_segment_ms, split_writable_items
    from asr_serve_tools.label.labeling import label_recordings as run

    names = [name.strip() for name in models.split(",") if name.strip()]
    check_label_options(names, threshold, per)
    if "-" in paths:
        raise OptionError("`-`, which is standard input", "a file, because two models read it", "name one")
    engine = shared.engine(more, quantize)
    items, failures = split_writable_items(unique_by_absolute_path(input_manifest.expand_inputs(paths)))
    if not (items or failures):
        raise OptionError(f"{', '.join(paths)} lists no audio", "at least one recording")
    with lock_label_folder(out):
        record = LabelStore(
            out, {"models": names, "per": per, "language": requested_language_code(language), "quantize": quantize}
        )
        remaining = [item for item in items if not record.is_labeled(str(item.source))]
        if remaining:
            meter = ProgressMeter()
            with ProgressBar(meter, shown=not quiet) as bar, ExitStack() as stack:
                import asr_serve
                from asr_serve.pipelines.options import TranscribeOptions

                loaded = [
                    stack.enter_context(
                        asr_serve.load(name, device=device, dtype=dtype, turn_model="none", engine=engine)
                    )
                    for name in names
                ]
                longest = max_segment_ms(model.card for model in loaded)
                options = TranscribeOptions(language=language, max_segment_ms=longest)
                meter.start()
                failed = run(loaded, names, remaining, options, record, cast("LabelUnit", per), bar.update)
                speed = meter.describe_done()
            if not quiet:
                print_error(
                    f"{len(remaining) - len(failed)} done, {len(items) - len(remaining)} already there; {speed}"
                )
            failures += failed
        summary = record.finish(threshold, len(failures))
    print(summary_line(summary, out))
    for failure in failures:
        print_error(f"failed: {failure.key}: {failure.error}")
    return FAILED if failures else 0


def unique_by_absolute_path(items: Iterable[InputItem]) -> Iterator[InputItem]:
    """Each file once, by its absolute path, because a manifest is also read from other folders."""
    from asr_serve.audio.input_manifest import InputItem

    known: set[str] = set()
    for item in items:
        path = os.path.abspath(str(item.source))
        if path not in known:
            known.add(path)
            yield InputItem(item.key, path)


def summary_line(summary: LabelSummary, out: Path) -> str:
    """One line like `kept 12 of 40 segments, 0.050 of 0.200 h of speech, at a threshold of 0.1 -> labels`."""
    return (
        f"kept {summary.kept_segments} of {summary.segments} segments, {summary.kept_hours:.3f} of "
        f"{summary.speech_hours:.3f} h of speech, at a threshold of {summary.threshold:g} -> {out}"
    )
