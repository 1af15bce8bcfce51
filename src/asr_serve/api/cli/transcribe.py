"""`asr-serve transcribe`: files, folders, lists or standard input to text, JSON or subtitles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, cast, get_args

import msgspec
import typer

from asr_serve.api.cli import options as shared
from asr_serve.api.cli.exit_codes import FAILED, exit_on_error, print_error
from asr_serve.errors import AsrServeError, OptionError

if TYPE_CHECKING:
    from asr_serve.api.cli.io.transcript_outputs import TranscriptSink
    from asr_serve.api.cli.progress import ProgressBar
    from asr_serve.audio.input_manifest import InputItem
    from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, Progress, SegmentDone
    from asr_serve.pipelines.options import LongForm, TranscribeOptions


class Transcriber(Protocol):
    """Model interface that this command uses; `asr_serve.load` returns one."""

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions
    ) -> Generator[SegmentDone | FileDone | FileFailed | Progress, None, None]: ...


DEFAULT_MODEL = "moonshine-tiny-en"


class TranscribeOutcome(msgspec.Struct):
    """Results of the inputs."""

    done: int = 0
    failed: list[tuple[str, AsrServeError]] = []


def run(
    model: Transcriber,
    items: Sequence[InputItem],
    options: TranscribeOptions,
    sink: TranscriptSink,
    bar: ProgressBar,
    *,
    verbose: bool = False,
) -> TranscribeOutcome:
    """Transcribes the items into the sink. A failed item is recorded and the others go on.

    On any end (ctrl-C, a failing sink) the remaining work is cancelled.
    """
    from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, Progress, SegmentDone

    outcome = TranscribeOutcome()
    with contextlib.closing(model.events(items, options)) as events:
        for event in events:
            match event:
                case SegmentDone():
                    with bar.paused():
                        sink.segment(items[event.index], event.segment)
                case FileDone():
                    with bar.paused(stderr=verbose):
                        written = sink.done(items[event.index], event.transcript)
                        if verbose and written is not None:
                            print_error(f"{event.key} -> {written}")
                    outcome.done += 1
                case FileFailed():
                    outcome.failed.append((event.key, event.error))
                case Progress():
                    bar.update(event.audio_samples, event.total_samples)
    return outcome


@exit_on_error
def transcribe(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATHS...",
            help="Audio or video files, folders, quoted globs, lists (.scp, .jsonl, .txt), or - for stdin.",
        ),
    ],
    model: shared.Model = DEFAULT_MODEL,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Pipeline of stages to run instead of a model: chain-lm, chain-then-whisper, ctc-graph-lm, or a TOML "
            "file; NAME,VARIABLE=VALUE,... where it has variables.",
        ),
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
    quantize: shared.Quantize = None,
    weights: shared.Weights = None,
    language: shared.Language = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Translate into English; needs a multilingual Whisper.")
    ] = False,
    beam: Annotated[
        int, typer.Option(min=1, help="Beam width: hypotheses that the decoder keeps. 1 is greedy search, the fastest.")
    ] = 1,
    n_best: Annotated[
        int,
        typer.Option(
            min=1,
            help="Alternatives of each segment in the JSON formats, for searches that have so many hypotheses: --beam "
            "or, for streaming models, --set engine.beam.",
        ),
    ] = 1,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Factor from 1 to 2 by which tokens that an answer already has become less likely. 1: none."),
    ] = 1.0,
    prompt: shared.Prompt = None,
    hotwords: shared.Hotwords = None,
    language_model: shared.LanguageModel = None,
    language_model_weight: shared.LanguageModelWeight = None,
    words: shared.Words = False,
    speakers: shared.Speakers = False,
    num_speakers: shared.NumSpeakers = None,
    min_speakers: shared.MinSpeakers = None,
    max_speakers: shared.MaxSpeakers = None,
    itn: shared.Itn = None,
    long_form: Annotated[
        str,
        typer.Option(
            metavar="parallel|sequential",
            help="How long recordings are decoded. parallel: segments, split at pauses, in one batch; the fastest. "
            "sequential: windows in order, each with the text before it as its prompt; needs a Whisper.",
        ),
    ] = "parallel",
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="Output format: text, json, verbose_json (OpenAI's), jsonl (one line per input); srt, vtt, karaoke "
            "(vtt with a time before each word); ctm (words), rttm (speakers), textgrid (both, for Praat). "
            "Default: by the suffix of --output, else text.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR|FILE",
            help="Folder, for one file per input; or a file, for one input or for jsonl. Default: stdout.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip inputs whose results exist.")] = False,
    silence_schedule: shared.SilenceSchedulePoints = None,
    max_segment_ms: Annotated[
        int | None,
        typer.Option(min=1, help="Longest segment in ms; longer speech is split. Default: the model's own limit."),
    ] = None,
    no_vad: Annotated[
        bool, typer.Option("--no-vad", help="Transcribe silence too: no voice activity detection.")
    ] = False,
    max_duration_s: Annotated[float | None, typer.Option(help="Refuse inputs longer than this many seconds.")] = None,
    more: shared.Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, no progress.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the model, its device and each finished file.")
    ] = False,
) -> int:
    """Transcribe speech. Results go to stdout or --output, everything else to stderr.

    A file that fails is reported at the end; the others are transcribed.

    \b
    Exit code  0 all done, 1 something failed, 2 wrong usage,
               130 ctrl-C: finished results stay, --resume continues

    \b
    --words, --speakers and --itn take effect in every format that can hold
    them; karaoke, ctm and textgrid imply --words, rttm implies --speakers.
    With --itn the JSON formats also hold the spoken form, as `spoken`.

    \b
    Examples
      asr-serve transcribe talk.mp3
      asr-serve transcribe film.mkv --output film.srt
      asr-serve transcribe calls/ --format srt --output out/ --resume
      asr-serve transcribe 'calls/**/*.flac' --silence-schedule inf:500
      asr-serve transcribe wav.scp --output results.jsonl
      asr-serve transcribe calls/ -m armspeech-hy --set engine.beam=8
      asr-serve transcribe calls/ -m vosk-small-en --set engine.beam=5 --n-best 5 -o calls.jsonl
      asr-serve transcribe meeting.m4a --num-speakers 3 -o meeting.vtt
      asr-serve transcribe meeting.m4a --max-speakers 4 --format rttm
      asr-serve transcribe lecture.mp4 --words --itn -o lecture.srt
      asr-serve transcribe interview.wav -o interview.TextGrid
      asr-serve transcribe talk.mp3 --hotwords 'Kubernetes,Ada Lovelace'
      asr-serve transcribe calls/ --hotwords @names.txt -o out/
      asr-serve transcribe calls/ --pipeline chain-then-whisper -o out/
      asr-serve transcribe talk.mp3 -m whisper-tiny-en --beam 4 --language-model notes.ngram.safetensors
      asr-serve transcribe book.mp3 -m whisper-tiny-en --long-form sequential
      ffmpeg -i rtsp://camera -f wav - | asr-serve transcribe -
    """
    from asr_serve.api.cli.io import transcript_outputs
    from asr_serve.api.cli.progress import ProgressBar, ProgressMeter
    from asr_serve.audio import input_manifest
    from asr_serve.audio.silence_schedule import SilenceSchedule
    from asr_serve.text.formats.registry import TRANSCRIPT_FORMATS, transcript_format

    form = transcript_outputs.choose_format(form, output)
    wanted = transcript_format(form)
    if n_best > 1 and not wanted.shows_alternatives:
        places = [name for name, row in TRANSCRIPT_FORMATS.items() if row.shows_alternatives]
        raise OptionError(
            f"--n-best {n_best} with the format {form}",
            f"a format with a place for alternatives: {', '.join(places)}",
            "add --format json",
            param="n_best",
        )
    if "-" in paths and sys.stdin is not None and sys.stdin.isatty():
        raise OptionError("`-` reads stdin, which is a terminal", "a pipe or a file", "name a file instead")
    if max_duration_s is not None and not max_duration_s > 0:
        raise OptionError(f"--max-duration-s {max_duration_s}", "more than 0 seconds")
    language_model_name, engine = shared.language_model(language_model, shared.engine(more, quantize))
    strategy = choose_long_form(long_form)
    if pipeline is not None and weights is not None:
        raise OptionError("--weights beside --pipeline", "the file names the weights of each stage", param="weights")
    if pipeline is not None and model != DEFAULT_MODEL:
        raise OptionError(f"--model {model} beside --pipeline", "the file names the model of each stage", param="model")
    hotword_list = shared.hotwords(hotwords)
    schedule = None if silence_schedule is None else SilenceSchedule.from_text(silence_schedule)
    # Expands all of them, so that a malformed list fails before any work.
    items = list(input_manifest.expand_inputs(paths))
    if not items:
        raise OptionError(f"{', '.join(paths)} lists no audio", "at least one input")
    lists = [Path(path) for path in paths if Path(path).suffix.lower() in input_manifest.LIST_SUFFIXES]
    sink = transcript_outputs.choose_sink(form, output, items, lists=lists, resume=resume)
    remaining = [item for item in items if not sink.finished(item)]
    skipped = len(items) - len(remaining)
    if not remaining:
        if not quiet:
            print_error(f"nothing to do: all {skipped} results are there")
        return 0

    meter = ProgressMeter()
    with ProgressBar(meter, shown=not quiet) as bar:
        import asr_serve
        from asr_serve.audio.reader import AudioLimits
        from asr_serve.pipelines.options import TranscribeOptions

        options = TranscribeOptions(
            language=language,
            task="translate" if translate else "transcribe",
            beam=beam,
            n_best=n_best,
            repetition_penalty=repetition_penalty,
            prompt=prompt or "",
            hotwords=hotword_list,
            language_model=language_model_name,
            language_model_weight=language_model_weight,
            words=words or (None if wanted.needs_words else False),
            speakers=speakers or wanted.needs_speakers,
            num_speakers=num_speakers,
            min_speakers=min_speakers,
            max_speakers=max_speakers,
            itn=itn,
            long_form=strategy,
            vad=not no_vad,
            silence_schedule=schedule,
            max_segment_ms=max_segment_ms,
            limits=AudioLimits(max_duration_s=max_duration_s),
        )
        with (
            asr_serve.load_pipeline(pipeline, device=device, dtype=dtype, engine=engine)
            if pipeline is not None
            else asr_serve.load(model, device=device, dtype=dtype, weights=weights, turn_model="none", engine=engine)
        ) as loaded:
            if verbose:
                with bar.paused(stderr=True):
                    print_error("\n".join(f"{name}: {value}" for name, value in loaded.describe().items()))
            sink.begin()
            meter.start()
            bar.update(0, None)
            outcome = run(loaded, remaining, options, sink, bar, verbose=verbose)
            speed = meter.describe_done()
    if not quiet:
        print_error(summary(outcome, skipped, speed, output))
    for key, error in outcome.failed:
        print_error(f"failed: {key}: {error}")
    return FAILED if outcome.failed else 0


def choose_long_form(chosen: str) -> LongForm:
    """Validates --long-form. Raises OptionError with the nearest name."""
    from asr_serve.pipelines.options import LongForm
    from asr_serve.types import unknown_name_error

    for strategy in get_args(LongForm):
        if chosen == strategy:
            return cast("LongForm", strategy)
    raise unknown_name_error("--long-form", chosen, get_args(LongForm))


def summary(outcome: TranscribeOutcome, skipped: int, speed: str, output: str | None) -> str:
    """Returns `3 done, 1 failed, 2 already there; 63.0 s of audio in 2.1 s, 30.0 x real time -> out/`."""
    counts = [f"{outcome.done} done"]
    if outcome.failed:
        counts.append(f"{len(outcome.failed)} failed")
    if skipped:
        counts.append(f"{skipped} already there")
    return f"{', '.join(counts)}; {speed}{f' -> {output}' if output else ''}"
