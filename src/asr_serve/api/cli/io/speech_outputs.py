"""Outputs of synthesized speech: a file or stdout. The loudspeaker is in `loudspeaker.py`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from asr_serve.api.speech import format_of_path
from asr_serve.audio.encode import AudioEncoder
from asr_serve.errors import OptionError


class SpeechSink(Protocol):
    def write(self, pcm: np.ndarray) -> None:
        """Writes (n,) int16, at the rate that the sink was opened with."""


class StdoutSpeechSink:
    """Writer of an audio format's bytes as they are made."""

    def __init__(self, encoder: AudioEncoder, stream: BinaryIO) -> None:
        self._encoder, self._stream = encoder, stream

    def write(self, pcm: np.ndarray) -> None:
        self._send(self._encoder.encode(pcm))

    def end(self) -> None:
        self._send(self._encoder.finish())

    def _send(self, data: bytes) -> None:
        if data:
            self._stream.write(data)
            self._stream.flush()


class FileSpeechSink(StdoutSpeechSink):
    """Writer of a file whose header gets the length at the end."""

    def end(self) -> None:
        super().end()
        if header := self._encoder.final_header():
            self._stream.seek(0)
            self._stream.write(header)


@contextlib.contextmanager
def open_stdout(form: str, rate_hz: int, stream: BinaryIO) -> Iterator[SpeechSink]:
    sink = StdoutSpeechSink(AudioEncoder(form, rate_hz), stream)
    yield sink
    sink.end()


@contextlib.contextmanager
def open_file(path: Path, form: str, rate_hz: int) -> Iterator[SpeechSink]:
    """Opens a file under another name and renames it when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            sink = FileSpeechSink(AudioEncoder(form, rate_hz), stream)
            yield sink
            sink.end()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def format_of(output: str | None, form: str | None) -> str:
    """Returns --format, or the format of --output's suffix, or wav. Raises OptionError."""
    from asr_serve.audio.encode import content_type

    if form is not None:
        content_type(form)
        return form
    return "wav" if output in (None, "-") else format_of_path(Path(str(output)))


def check_output(output: str | None) -> None:
    """Raises OptionError for a folder, or for a file in a folder that does not exist."""
    if output in (None, "-"):
        return
    path = Path(str(output))
    if path.is_dir():
        raise OptionError(f"--output {output} is a folder", "a file", f"like {path / 'speech.wav'}")
    if not path.parent.is_dir():
        raise OptionError(f"--output {output}: there is no folder {path.parent}", "one that exists", "make it first")
