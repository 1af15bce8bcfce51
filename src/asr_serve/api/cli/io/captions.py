"""Captions on the screen during speech: finished lines, one that changes, and the audio level."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from asr_serve.api.cli.io.output_names import check_inputs_not_overwritten
from asr_serve.api.cli.io.transcript_outputs import choose_format, is_folder, make_folder, write_atomically
from asr_serve.api.cli.progress import clock_time
from asr_serve.api.stream import StreamResult
from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import OptionError
from asr_serve.text.formats import text_and_json
from asr_serve.text.formats.registry import render, transcript_format
from asr_serve.types import Transcript
from asr_serve.units import ms_to_samples

if TYPE_CHECKING:
    from asr_serve.api.stream import StreamResult


BRIGHT, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
ERASE = "\r\x1b[K"
CELLS = 8
EIGHTHS = " ▏▎▍▌▋▊▉█"
QUIETEST_DB = -60.0
LEAST_COLUMNS = 20
"""Shortest caption beside which the level is shown."""


class LevelMeter:
    """Meter of the level of the last tenth of a second."""

    def __init__(self, rate_hz: int) -> None:
        self._window_samples = ms_to_samples(100, rate_hz)
        self._squares, self._samples = 0.0, 0
        self._db = QUIETEST_DB

    def append_audio(self, pcm: np.ndarray) -> bool:
        """Adds (n,) float32; returns whether there is a new level."""
        self._squares += float(np.dot(pcm, pcm))
        self._samples += len(pcm)
        if self._samples < self._window_samples:
            return False
        mean = self._squares / self._samples
        self._db = 10 * math.log10(mean) if mean > 0 else QUIETEST_DB
        self._squares, self._samples = 0.0, 0
        return True

    def bar(self) -> str:
        """Returns the level as a bar, from silence to full scale."""
        share = 1 - min(1.0, max(0.0, self._db / QUIETEST_DB))
        full, rest = divmod(round(share * CELLS * 8), 8)
        return f"▕{('█' * full + EIGHTHS[rest] * (rest > 0)).ljust(CELLS)}▏"


class Captions:
    """Prints a line for each segment; below them, on a screen, one that changes. Thread-safe."""

    def __init__(self, out: BinaryIO, screen: BinaryIO | None = None, level: LevelMeter | None = None) -> None:
        """`screen`: a terminal, which may be `out`."""
        self._out, self._screen, self._level = out, screen, level
        self._segments = self._characters = 0
        """Printed segments, and printed characters of the whole text, with a space after each segment."""
        self._fixed = self._unfixed = self._speaker = ""
        self._printed: list[str] = []
        """Speaker of each line."""
        self._corrected: list[str] = []
        self._below = False
        self._lock = threading.Lock()

    def show(self, result: StreamResult) -> None:
        with self._lock:
            lines = ""
            for segment in result.segments[self._segments :]:
                lines += f"{text_and_json.speaker_line(segment, self._speaker)}\n"
                self._speaker = segment.speaker
                self._printed.append(segment.speaker)
                self._characters += len(segment.text) + 1
            self._segments = len(result.segments)
            if result.is_final:
                self._corrected = [
                    f"{clock_time(segment.start_s)} {text_and_json.speaker_line(segment)}"
                    for segment, printed in zip(result.segments, self._printed, strict=True)
                    if segment.speaker != printed
                ]
            self._fixed = result.fixed_text[self._characters :]
            self._unfixed = result.text[self._characters + len(self._fixed) :]
            self._print(lines)

    def append_audio(self, pcm: np.ndarray) -> None:
        """Updates the level with (n,) float32."""
        if self._level is not None and self._level.append_audio(pcm):
            with self._lock:
                self._print()

    def notice(self, line: str, say: Callable[[str], None]) -> None:
        """Prints a line on stderr by `say`, between the captions."""
        with self._lock:
            if self._screen is not None:
                _write(self._screen, ERASE)
            say(line)
            self._print()

    @property
    def corrected(self) -> list[str]:
        """Printed lines whose speaker was revised at the end, with their times."""
        return self._corrected

    def close(self) -> None:
        """Leaves unfinished text on the screen and removes the level."""
        with self._lock:
            self._level = None
            if self._screen is not None and self._below:
                live = self._live()
                _write(self._screen, f"{ERASE}{live}\n" if live else ERASE)

    def _print(self, lines: str = "") -> None:
        """Prints `lines` above the one that changes."""
        live = "" if self._screen is None else self._live()
        if self._screen is self._out:
            _write(self._out, f"{ERASE}{lines}{live}")
        else:
            if self._screen is not None:
                _write(self._screen, ERASE)
            if lines:
                _write(self._out, lines)
            if self._screen is not None:
                _write(self._screen, live)
        self._below = bool(live)

    def _live(self) -> str:
        columns = shutil.get_terminal_size().columns
        if self._level is None or columns < LEAST_COLUMNS + CELLS:
            return caption(self._fixed, self._unfixed, columns)
        level_bar = self._level.bar()
        return f"{level_bar} {caption(self._fixed, self._unfixed, columns - len(level_bar) - 1)}"


class JsonLineCaptions:
    """Prints a JSON line for each result; text is not repeated, except for the last line's `text`."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._segments = self._fixed = 0

    def show(self, result: StreamResult) -> None:
        line: dict[str, object] = {
            "audio_duration_ms": result.audio_duration_ms,
            "is_final": result.is_final,
            "delta": result.fixed_text[self._fixed :],
            "unfixed_text": result.unfixed_text,
            "segments": [
                _in_ms(
                    {"start": segment.start_s, "end": segment.end_s, "text": segment.text}
                    | text_and_json.optional_fields(segment)
                )
                for segment in result.segments[self._segments :]
            ],
        }
        if result.is_final:
            line["text"] = result.text
            if any(segment.speaker for segment in result.segments):
                line["speakers"] = [segment.speaker for segment in result.segments]
        self._segments, self._fixed = len(result.segments), len(result.fixed_text)
        self._out.write(msgspec.json.encode(line) + b"\n")
        self._out.flush()

    def append_audio(self, pcm: np.ndarray) -> None:
        """Does nothing: the level is not shown."""

    def notice(self, line: str, say: Callable[[str], None]) -> None:
        say(line)

    @property
    def corrected(self) -> list[str]:
        """Empty: the last line has the `speakers` of all segments."""
        return []

    def close(self) -> None:
        """Does nothing: no line is open."""


def caption(fixed: str, unfixed: str, columns: int) -> str:
    """Returns the end of the text that fits into one line: the fixed part bright, the rest dim."""
    surplus = len(fixed) + len(unfixed) - (columns - 1)
    if surplus > 0:
        text = f"…{(fixed + unfixed)[surplus + 1 :]}"
        at = max(0, len(text) - len(unfixed))
        fixed, unfixed = text[:at], text[at:]
    return "".join(f"{style}{part}{PLAIN}" for style, part in ((BRIGHT, fixed), (DIM, unfixed)) if part)


def _in_ms(told: dict[str, Any]) -> dict[str, Any]:
    """Rounds the times of a segment, and of its words, to milliseconds."""
    times = {name: round(told[name], 3) for name in ("start", "end")}
    words = {"words": [_in_ms(word) for word in told["words"]]} if "words" in told else {}
    return {**told, **times, **words}


def _write(stream: BinaryIO, text: str) -> None:
    stream.write(text.encode("utf-8", "replace"))
    stream.flush()


class TranscriptFile:
    """Transcript file of `listen --output`."""

    def __init__(self, output: str, form: str | None, source: str | None) -> None:
        """`source`: path of the audio file, `-`, or None for the microphone. Raises OptionError for a file that
        could not be written, before any speech."""
        if is_folder(output):
            raise OptionError(f"--output {output}", "one file", "name it: note.txt")
        self.path, self.form = Path(output), choose_format(form, output)
        self._key = {"-": "stdin", None: "microphone"}.get(source, source or "")
        if source not in ("-", None):
            check_inputs_not_overwritten([self.path], [InputItem(self._key, self._key)], [])
        make_folder(self.path.parent)

    @property
    def wants(self) -> dict[str, bool | None]:
        """Options that the format needs; None: where the model has it."""
        row = transcript_format(self.form)
        return ({"words": None} if row.needs_words else {}) | ({"speakers": True} if row.needs_speakers else {})

    def write(self, last: StreamResult, language: str, model: str) -> None:
        """Writes the transcript of the final result `last`. Raises OSError."""
        samples = ms_to_samples(last.audio_duration_ms)
        transcript = Transcript(self._key, last.text, language, samples, last.segments, model)
        write_atomically(self.path, render(transcript, self.form).encode("utf-8", "replace"))
