"""`asr-serve listen`: words on the screen while they are spoken."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import msgspec
import typer

from asr_serve.cli.exits import INTERRUPTED, guarded, say
from asr_serve.cli.options import Device, Dtype, Language, Model, Weights
from asr_serve.errors import OptionError, UnsupportedAudio
from asr_serve.units import RATE_HZ, ms_to_samples, samples_to_s

if TYPE_CHECKING:
    import numpy as np

    from asr_serve.streaming.results import StreamResult

HEAD_BYTES = 12
"""Enough to see that it is a container and not samples."""
WAV_HEADER_BYTES = 4_096
"""A longer one is none that a recorder writes."""
PIECE_BYTES = 65_536


@guarded
def listen(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-",
            help="An audio or video file; or - for samples from stdin: 16-bit mono, raw or as WAV.",
            show_default=False,
        ),
    ],
    model: Model = "moonshine-tiny-en",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = None,
    language: Language = None,
    chunk_ms: Annotated[int, typer.Option(help="How much audio between two looks at the text.")] = 720,
    rate_hz: Annotated[
        int | None,
        typer.Option(
            "--rate", metavar="HZ", help="Of raw samples from stdin. Default: 16000.", show_default=False
        ),
    ] = None,
    silence_schedule: Annotated[
        str | None,
        typer.Option(
            metavar="MS:MS,...",
            help="How long a pause ends a segment: 5000:1500,20000:800,inf:300 asks for 1.5 s while a "
            "segment is up to 5 s long, 0.8 s up to 20 s, then 0.3 s.",
        ),
    ] = None,
    real_time: Annotated[
        bool, typer.Option("--real-time", help="Hear a file as slowly as it was spoken.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line, for each chunk, instead of text.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
) -> int:
    """Show speech as text while it comes.

    A segment is printed as a line when a pause has ended it. On a terminal
    the words since then stand below, dim as long as they may change.
    Results go to stdout, everything else to stderr.

    \b
    --json     `delta` is what has become fixed since the line before,
               `unfixed_text` what may still change, `segments` the new ones;
               the last line has `is_final` true and the whole `text`

    \b
    Exit code  0 done, 1 something failed, 2 wrong usage,
               130 ctrl-C: what came from stdin is still finished,
               unless there is a second one

    \b
    Examples
      arecord -f S16_LE -r 16000 | asr-serve listen -
      sox -d -t raw -r 16000 -e signed -b 16 -c 1 - | asr-serve listen -
      ffmpeg -i rtsp://cam -f s16le -ar 16000 -ac 1 - | asr-serve listen -
      asr-serve listen talk.mp3 --real-time
      asr-serve listen talk.mp3 --json | jq -j .delta
    """
    from asr_serve.cli.progress import Meter

    options: dict[str, Any] = {"chunk_ms": chunk_ms, "language": language, "rate_hz": rate_hz}
    if silence_schedule is not None:
        options["silence_schedule"] = silence_schedule
    stdin = Stdin() if source == "-" else None
    if stdin is None and rate_hz is not None:
        raise OptionError("--rate with a file", "it is the rate of raw samples from stdin", "leave it out")
    if stdin is not None and real_time:
        raise OptionError("--real-time with stdin", "it is for a file: stdin comes when it comes", "leave it out")

    import asr_serve
    from asr_serve.streaming.results import StreamOptions

    StreamOptions.of(options)  # a mistake is told before the model is loaded
    shown = Lines(sys.stdout.buffer) if as_json else Captions(sys.stdout.buffer, live=sys.stdout.isatty())
    meter = Meter()
    with asr_serve.load(model, device=device, dtype=dtype, weights=weights) as loaded:
        if stdin is not None:
            if not quiet:
                say("listening; ctrl-C ends")
            options["rate_hz"] = stdin.open(rate_hz)
            stream = loaded.stream(stdin.chunks(), **options)
        elif real_time:
            stream = loaded.stream(as_spoken(source, chunk_ms), **options)
        else:
            stream = loaded.stream(source, **options)
        meter.start()
        with stream, contextlib.closing(shown):
            for result in stream:
                shown.show(result)
                meter.update(ms_to_samples(result.audio_duration_ms), None)
    if not quiet:
        say(meter.describe_done())
    return INTERRUPTED if stdin is not None and stdin.interrupted else 0


class Captions:
    """A line for each segment; below them, where the terminal can, one that changes."""

    def __init__(self, stream: BinaryIO, *, live: bool) -> None:
        self._stream, self._live, self._below = stream, live, False
        self._segments = self._characters = 0
        """That are printed: segments, and characters of the whole text, with the space after each."""

    def show(self, result: StreamResult) -> None:
        lines = ""
        for segment in result.segments[self._segments :]:
            lines += f"{segment.text}\n"
            self._characters += len(segment.text) + 1
        self._segments = len(result.segments)
        live = ""
        if self._live:
            fixed = result.fixed_text[self._characters :]
            open_to_change = result.text[self._characters + len(fixed) :]
            live = caption(fixed, open_to_change, shutil.get_terminal_size().columns)
        self._write(f"\r\x1b[K{lines}{live}" if self._live else lines)
        self._below = bool(live)

    def close(self) -> None:
        """What was not finished stays to be seen."""
        if self._below:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text.encode("utf-8", "replace"))
        self._stream.flush()


class Lines:
    """JSON, a line for each result; nothing but the last line's `text` is said twice."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._segments = self._fixed = 0

    def show(self, result: StreamResult) -> None:
        line: dict[str, object] = {
            "audio_duration_ms": result.audio_duration_ms,
            "is_final": result.is_final,
            "delta": result.fixed_text[self._fixed :],
            "unfixed_text": result.unfixed_text,
            "segments": [
                {"start": round(each.start_s, 3), "end": round(each.end_s, 3), "text": each.text}
                for each in result.segments[self._segments :]
            ],
        }
        if result.is_final:
            line["text"] = result.text
        self._segments, self._fixed = len(result.segments), len(result.fixed_text)
        self._stream.write(msgspec.json.encode(line) + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left open."""


def caption(fixed: str, unfixed: str, columns: int) -> str:
    """The end of the text that fits into one line, the unfixed part dim."""
    surplus = len(fixed) + len(unfixed) - (columns - 1)
    if surplus > 0:
        text = f"…{(fixed + unfixed)[surplus + 1 :]}"
        at = max(0, len(text) - len(unfixed))
        fixed, unfixed = text[:at], text[at:]
    return f"{fixed}\x1b[2m{unfixed}\x1b[0m" if unfixed else fixed


def as_spoken(path: str, chunk_ms: int) -> Iterator[np.ndarray]:
    """The file's audio, every chunk when it would have been recorded."""
    from asr_serve.audio.io import open_audio

    chunk_samples, given = ms_to_samples(chunk_ms), 0
    began_s = time.monotonic()
    with open_audio(path) as audio:
        for second in audio:
            for at in range(0, len(second), chunk_samples):
                piece = second[at : at + chunk_samples]
                given += len(piece)
                time.sleep(max(0.0, began_s + samples_to_s(given) - time.monotonic()))
                yield piece


class Stdin:
    """Samples from standard input, until its end or ctrl-C."""

    def __init__(self) -> None:
        """Raises OptionError for a terminal."""
        if sys.stdin is None or sys.stdin.isatty():
            raise OptionError(
                "`-` reads stdin, which is a terminal",
                "samples from a pipe or a file",
                "record into it: arecord -f S16_LE -r 16000 | asr-serve listen -",
            )
        self._stream = cast(BufferedReader, sys.stdin.buffer)
        self._head, self._left_bytes = b"", sys.maxsize
        self._reading = False
        self.interrupted = False

    def open(self, rate_hz: int | None) -> int:
        """Wait for the first bytes; returns the rate that they, or the user, tell. Raises UnsupportedAudio,
        OptionError."""
        from asr_serve.audio import headers

        while len(self._head) < HEAD_BYTES and self._more():
            pass
        container = headers.name_of(self._head)
        if container is None:
            return rate_hz or RATE_HZ
        while (wav := headers.wav_header(self._head)) is None and len(self._head) < WAV_HEADER_BYTES:
            if container != "wav" or not self._more():
                break
        if wav is None or wav.channels != 1 or wav.bytes_per_s != 2 * wav.rate_hz:
            raise UnsupportedAudio(
                f"a {container} file came on stdin",
                "samples are allowed there, 16-bit mono, raw or as WAV",
                "name the file; or convert it: ffmpeg -i - -f s16le -ar 16000 -ac 1 - | asr-serve listen -",
            )
        if rate_hz not in (None, wav.rate_hz):
            raise OptionError(f"--rate {rate_hz}", f"the WAV on stdin has {wav.rate_hz} Hz", "leave it out")
        self._head = self._head[wav.data_start_bytes :]
        self._left_bytes = wav.data_bytes or sys.maxsize
        return wav.rate_hz

    def chunks(self) -> Iterator[bytes]:
        """As they come. At the first ctrl-C they end; the next is not ours any more."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            while self._left_bytes and (self._head or self._read_on()):
                chunk, self._head = self._head[: self._left_bytes], b""
                self._left_bytes -= len(chunk)
                yield chunk
        finally:
            signal.signal(signal.SIGINT, before)

    def _read_on(self) -> bool:
        try:
            self._reading = True  # before looking: an interrupt from here on is raised, and none is lost
            return not self.interrupted and self._more()
        except KeyboardInterrupt:
            return False
        finally:
            self._reading = False

    def _more(self) -> bool:
        piece = self._stream.read1(PIECE_BYTES)
        self._head += piece
        return bool(piece)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._reading or self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.interrupted = True
