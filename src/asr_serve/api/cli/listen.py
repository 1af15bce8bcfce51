"""`asr-serve listen`: live transcription on the screen."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asr_serve import DEFAULT_MODEL
from asr_serve.api.cli import options as shared
from asr_serve.api.cli.exit_codes import INTERRUPTED, exit_on_error, print_error
from asr_serve.config import client_key
from asr_serve.errors import OptionError
from asr_serve.units import RATE_HZ, ms_to_samples

if TYPE_CHECKING:
    from asr_serve.api.cli.backends import Audio, LocalTranscriber, RemoteTranscriber
    from asr_serve.api.cli.io.audio_sources import LiveAudioSource
    from asr_serve.api.cli.io.captions import TranscriptFile
    from asr_serve.api.stream import StreamResult
    from asr_serve.config import EngineConfig

DEFAULT_CHUNK_MS = 720


@exit_on_error
def listen(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|-]", help="Audio or video file; or - for samples from stdin: 16-bit mono, raw or WAV."
        ),
    ] = None,
    file: Annotated[str | None, typer.Option(metavar="FILE", help="Audio or video file, as the argument FILE.")] = None,
    mic: Annotated[bool, typer.Option("--mic", help="Listen to the microphone until ctrl-C.")] = False,
    chosen_input: Annotated[
        str | None, typer.Option("--input", metavar="NAME|NUMBER", help="Microphone to use, by name or number.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server that recognizes the speech, instead of a model in this process: http://127.0.0.1:8000",
        ),
    ] = None,
    api_key: shared.ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Name of the model; see: asr-serve models list",
            show_default=f"{DEFAULT_MODEL}, or the server's own",
        ),
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
    weights: shared.Weights = None,
    language: shared.Language = None,
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
    chunk_ms: Annotated[
        int | None,
        typer.Option(
            help="Audio in ms between two updates of the text.", show_default=f"{DEFAULT_CHUNK_MS}, or the server's own"
        ),
    ] = None,
    rate_hz: Annotated[
        int | None, typer.Option("--rate", metavar="HZ", help="Sample rate of raw samples from stdin. Default: 16000.")
    ] = None,
    silence_schedule: shared.SilenceSchedulePoints = None,
    real_time: Annotated[
        bool, typer.Option("--real-time", "--realtime", help="Read a file at the speed at which it was spoken.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the whole transcript, written at the end as `transcribe` writes it.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="Format of the --output file: text, json, srt and so on. Default: by its suffix.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each chunk, instead of text.")
    ] = False,
    more: shared.Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> int:
    """Transcribe live speech, and print the text while it is spoken.

    A segment is printed as a line when a pause ends it. On a terminal the
    words after it are shown below: bright when they are final, dim while they
    may change, with the level of the audio beside them.
    Results go to stdout, everything else to stderr.

    \b
    --json     `delta` is the text that became final since the line before,
               `unfixed_text` the text that may still change, `segments` the
               new segments; the last line has `is_final` true and the whole
               `text`; with --server there is a line for each change.
               Segments have `words`, `speaker` and `spoken` where these are
               requested; the last line lists in `speakers` the speaker of
               each segment, after all audio has been compared
    --speakers a line names the speaker that is known so far; corrections are
               printed at the end. The --output file has the corrected ones
    --server   a lost connection is opened again, without loss of audio or
               text

    \b
    Exit code  0 done, 1 something failed, 2 wrong usage,
               130 ctrl-C: audio that came from stdin is still transcribed,
               unless ctrl-C comes twice; --mic ends with it, and with 0

    \b
    Examples
      asr-serve listen --mic
      asr-serve listen --mic --server http://127.0.0.1:8000 > note.txt
      arecord -f S16_LE -r 16000 | asr-serve listen -
      ffmpeg -i rtsp://cam -f s16le -ar 16000 -ac 1 - | asr-serve listen -
      asr-serve listen talk.mp3 --real-time
      asr-serve listen talk.mp3 --json | jq -j .delta
      asr-serve listen --mic -m armspeech-hy --set engine.beam=8
      asr-serve listen talk.mp3 --hotwords 'Kubernetes,Ada Lovelace'
      asr-serve listen meeting.wav --speakers --itn
      asr-serve listen --mic --speakers -o meeting.vtt
      asr-serve listen meeting.wav --num-speakers 3 --json | tail -1 | jq .speakers
      asr-serve listen meeting.wav --words --json | jq -c '.segments[].words'
    """
    from asr_serve.api.cli.io.audio_sources import paced_chunks, with_level_meter
    from asr_serve.api.cli.io.captions import Captions, JsonLineCaptions, LevelMeter
    from asr_serve.api.cli.progress import ProgressMeter

    path = choose_source(source, file, mic=mic)
    is_live = real_time or path in ("-", None)
    check_options(path, rate_hz, chosen_input, real_time=real_time)
    options: dict[str, Any] = {"language": language, "silence_schedule": silence_schedule, "prompt": prompt}
    options |= {"hotwords": shared.hotwords(hotwords) or None}
    config: EngineConfig | None = None
    if server is None:
        language_model, config = shared.language_model(language_model, shared.engine(more))
    options |= {"language_model": language_model or None, "language_model_weight": language_model_weight}
    options |= {"words": words or None, "speakers": speakers or None, "itn": itn}
    options |= {"num_speakers": num_speakers, "min_speakers": min_speakers, "max_speakers": max_speakers}
    transcript_file = result_file(output, form, path)
    options = {name: value for name, value in options.items() if value is not None}
    options = ({} if transcript_file is None else transcript_file.wants) | options
    loading = {"device": device, "dtype": dtype, "weights": weights}
    transcriber = choose_backend(server, api_key, model, chunk_ms, options, more, config, **loading)
    live_source = open_source(path, chosen_input)
    screen = sys.stdout.buffer if sys.stdout.isatty() else None
    if screen is None and sys.stderr.isatty() and is_live and not quiet:
        screen = sys.stderr.buffer
    meter = ProgressMeter()
    last: StreamResult | None = None
    with transcriber:
        if live_source is not None and not quiet:
            print_error(f"listening{f' to {live_source.name}' if live_source.name else ''}; ctrl-C ends")
        rate = RATE_HZ if live_source is None else live_source.open(rate_hz)
        level = LevelMeter(rate) if is_live else None
        captions = JsonLineCaptions(sys.stdout.buffer) if as_json else Captions(sys.stdout.buffer, screen, level)

        def show(result: StreamResult) -> None:
            nonlocal last
            last = result
            captions.show(result)
            meter.update(ms_to_samples(result.audio_duration_ms), None)

        def notice(line: str) -> None:
            captions.notice(line, print_error)

        audio: Audio
        if live_source is not None:
            audio = with_level_meter(live_source.chunks(notice), captions.append_audio)
        else:
            assert path is not None
            audio = with_level_meter(paced_chunks(path), captions.append_audio) if real_time else path
        meter.start()
        with contextlib.closing(captions):
            transcriber.listen(audio, rate, show, notice)
    if transcript_file is not None and last is not None:
        transcript_file.write(last, transcriber.language, transcriber.model)
    if live_source is not None and (lost := live_source.overflow_report()):
        print_error(f"warning: {lost}")
    if not quiet:
        if captions.corrected:
            phrase = "line has another speaker" if len(captions.corrected) == 1 else "lines have other speakers"
            print_error(
                "\n".join([f"{len(captions.corrected)} {phrase}, as all that was said shows:", *captions.corrected])
            )
        print_error(f"{meter.describe_done()}{f' -> {output}' if output else ''}")
    return INTERRUPTED if live_source is not None and live_source.interrupted else 0


def choose_source(source: str | None, file: str | None, *, mic: bool) -> str | None:
    """Returns the file's path, `-` for stdin, None for the microphone. Raises OptionError unless one is chosen."""
    given = [name for name in (source, file and f"--file {file}", "--mic" if mic else None) if name]
    if len(given) != 1:
        raise OptionError(
            f"{' and '.join(given)} came" if given else "nothing to listen to came",
            "one of FILE, - and --mic",
            "see: asr-serve listen --help",
        )
    return None if mic else source or file


def result_file(output: str | None, form: str | None, path: str | None) -> TranscriptFile | None:
    """Returns the file of --output, for the whole transcript. Raises OptionError."""
    if output is None:
        if form is not None:
            raise OptionError(f"--format {form} without --output", "it is that file's", "add --output FILE")
        return None
    from asr_serve.api.cli.io.captions import TranscriptFile

    return TranscriptFile(output, form, path)


def check_options(path: str | None, rate_hz: int | None, chosen_input: str | None, *, real_time: bool) -> None:
    """Raises OptionError for options that do not apply to this source."""
    source_name = {"-": "stdin", None: "--mic"}.get(path, "a file")
    if rate_hz is not None and path != "-":
        raise OptionError(f"--rate with {source_name}", "it is the rate of raw samples from stdin", "leave it out")
    if real_time and path in ("-", None):
        raise OptionError(
            f"--real-time with {source_name}", f"it is for a file: {source_name} comes when it comes", "leave it out"
        )
    if chosen_input is not None and path is not None:
        raise OptionError(f"--input with {source_name}", "it says which microphone", "leave it out, or use --mic")


def choose_backend(
    server: str | None,
    api_key: str | None,
    model: str | None,
    chunk_ms: int | None,
    options: dict[str, Any],
    more: list[str] | None,
    config: EngineConfig | None,
    **loading: str | None,
) -> LocalTranscriber | RemoteTranscriber:
    """Returns a model in this process, with `config`, or the server. Raises OptionError."""
    from asr_serve.api.cli.backends import LocalTranscriber, RemoteTranscriber

    if server is None:
        if api_key is not None:
            raise OptionError("--api-key without --server", "it is for a server", "leave it out")
        chunk_ms = DEFAULT_CHUNK_MS if chunk_ms is None else chunk_ms
        assert config is not None
        return LocalTranscriber(model or DEFAULT_MODEL, options | {"chunk_ms": chunk_ms}, engine=config, **loading)
    for name, value in {**loading, "set": more or None}.items():
        if value not in ("auto", None):
            raise OptionError(f"--{name} with --server", "the server has the model", "leave it out")
    if model is not None:
        options["model"] = model
    if chunk_ms is not None:
        options["partial_ms"] = chunk_ms
    if "hotwords" in options:
        options["hotwords"] = ",".join(options["hotwords"])
    options |= {
        name: str(options[name]).lower()
        for name in ("words", "speakers", "itn")
        if options.get(name) is not None  # words of a file's format: where the server's model has them
    }
    return RemoteTranscriber(server, api_key or client_key(), options)


def open_source(path: str | None, chosen_input: str | None) -> LiveAudioSource | None:
    """Opens stdin or the microphone; None for a file. Raises OptionError, UnsupportedOption, SourceNotFound."""
    if path is None:
        from asr_serve.api.cli.io.microphone import MicrophoneSource

        return MicrophoneSource(chosen_input)
    if path == "-":
        from asr_serve.api.cli.io.audio_sources import StdinSource

        return StdinSource()
    return None
