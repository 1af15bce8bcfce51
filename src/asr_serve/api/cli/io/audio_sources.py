"""Live audio sources other than the microphone: stdin, or a file at its own pace."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from types import FrameType
from typing import Any, Protocol, Self, cast

import numpy as np

from asr_serve.audio import container_headers
from asr_serve.audio.pcm import Pcm16Assembler, decode_pcm16
from asr_serve.audio.reader import open_audio
from asr_serve.errors import OptionError, UnsupportedAudio
from asr_serve.units import RATE_HZ, ms_to_samples, samples_to_s

HEAD_BYTES = 12
"""Bytes that tell a container from samples."""
WAV_HEADER_BYTES = 4_096
"""Limit of a WAV header; recorders write no longer ones."""
READ_BYTES = 65_536
PACED_CHUNK_SAMPLES = ms_to_samples(100)


def paced_chunks(path: str) -> Iterator[np.ndarray]:
    """Yields the file's audio, each tenth of a second at the time it would have been recorded."""
    emitted_samples = 0
    began_s = time.monotonic()
    with open_audio(path) as audio:
        for second in audio:
            for at in range(0, len(second), PACED_CHUNK_SAMPLES):
                chunk = second[at : at + PACED_CHUNK_SAMPLES]
                emitted_samples += len(chunk)
                time.sleep(max(0.0, began_s + samples_to_s(emitted_samples) - time.monotonic()))
                yield chunk


def with_level_meter(
    chunks: Iterable[bytes | np.ndarray], hear: Callable[[np.ndarray], None]
) -> Iterator[bytes | np.ndarray]:
    """Yields the same chunks and calls `hear` with the samples of each."""
    pcm16 = Pcm16Assembler()
    for chunk in chunks:
        hear(chunk if isinstance(chunk, np.ndarray) else decode_pcm16(pcm16.take_whole_samples(chunk)))
        yield chunk


class LiveAudioSource(Protocol):
    """Source of PCM16 as it is spoken, until its end or ctrl-C."""

    name: str
    """Name of the device, if it has one."""

    @property
    def interrupted(self) -> bool:
        """Returns whether ctrl-C ended it early."""

    def open(self, rate_hz: int | None) -> int:
        """Opens it and returns the sample rate; `rate_hz` is the one that the user sets."""

    def chunks(self, notice: Callable[[str], None]) -> Iterator[bytes]:
        """Yields chunks as they arrive, those before ctrl-C included. `notice` reports to the user, from any thread."""

    def overflow_report(self) -> str:
        """Describes lost audio for the user. Raises the error that ended the source, if one did."""


class InterruptHandler:
    """Handler of ctrl-C: the first ends the reading, so that the text can be finished; later ones are raised."""

    def __init__(self) -> None:
        self.came = self._reading = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def unless(self, read: Callable[[], bool]) -> bool:
        """Returns what `read` returns, which may block; False if ctrl-C came first. `read` stores its data itself."""
        try:
            self._reading = True  # before the check: an interrupt from here on is raised, and none is lost
            return not self.came and read()
        except KeyboardInterrupt:
            return False
        finally:
            self._reading = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._reading or self.came:
            self.came = True
            raise KeyboardInterrupt
        self.came = True


class StdinSource:
    """Source of samples from standard input."""

    name = ""

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
        self._ctrl_c = InterruptHandler()

    @property
    def interrupted(self) -> bool:
        return self._ctrl_c.came

    def open(self, rate_hz: int | None) -> int:
        """Waits for the first bytes and returns the rate by the WAV header, or the user's. Raises
        UnsupportedAudio, OptionError."""
        while len(self._head) < HEAD_BYTES and self._more():
            pass
        container = container_headers.container_name(self._head)
        if container is None:
            return rate_hz or RATE_HZ
        while (wav := container_headers.read_wav_header(self._head)) is None and len(self._head) < WAV_HEADER_BYTES:
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

    def chunks(self, notice: Callable[[str], None] = lambda line: None) -> Iterator[bytes]:
        with self._ctrl_c:
            while self._left_bytes and (self._head or self._ctrl_c.unless(self._more)):
                chunk, self._head = self._head[: self._left_bytes], b""
                self._left_bytes -= len(chunk)
                yield chunk

    def overflow_report(self) -> str:
        return ""

    def _more(self) -> bool:
        data = self._stream.read1(READ_BYTES)
        self._head += data
        return bool(data)
