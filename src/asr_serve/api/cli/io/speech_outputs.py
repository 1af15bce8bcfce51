"""Outputs of synthesized speech: a file or stdout. The loudspeaker is in `loudspeaker.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asr_serve.api.speech import format_of_path
from asr_serve.audio.encode import AudioEncoder
from asr_serve.errors import OptionError

SpeechWriter = Callable[[np.ndarray], object]
"""Writes (n,) int16 at the rate of its output."""


@contextlib.contextmanager
def open_stdout(form: str, rate_hz: int, stream: BinaryIO) -> Iterator[SpeechWriter]:
    """Yields the writer of an audio format's bytes, each sent as soon as it is made."""
    encoder = AudioEncoder(form, rate_hz)

    def send(data: bytes) -> None:
        if data:
            stream.write(data)
            stream.flush()

    yield lambda pcm: send(encoder.encode(pcm))
    send(encoder.finish())


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
