"""Readers of one input's audio in chunks: directly where bytes are available, on a thread where they may be
slow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from asr_serve.audio.reader import AudioLimits, Source, open_audio
from asr_serve.errors import AsrServeError, CorruptAudio

MAX_BUFFERED_CHUNKS = 32
"""Limit of decoded chunks of a slow input, each a second."""


class AudioReader(Protocol):
    """Source of an input's audio."""

    @property
    def hint_samples(self) -> int | None:
        """Duration by the header, if there is one."""

    @property
    def ended(self) -> bool:
        """Returns whether all audio has been returned."""

    def next_chunk(self) -> np.ndarray | None:
        """Returns the next chunk, (n,) float32 at 16 kHz; None if none is ready, or at the end."""

    def close(self) -> None: ...


class DirectReader:
    """Reader that decodes in `next_chunk`. Raises what `open_audio` raises, at once."""

    def __init__(self, source: Source, limits: AudioLimits) -> None:
        self._stream = open_audio(source, limits=limits)
        self.hint_samples = self._stream.duration_hint_samples
        self.ended = False

    def next_chunk(self) -> np.ndarray | None:
        """Returns the next chunk; None at the end. Raises the stream's errors."""
        chunk = next(self._stream, None)
        self.ended = chunk is None
        return chunk

    def close(self) -> None:
        self._stream.close()


class ThreadedReader:
    """Reads a slow input (a pipe, an upload in progress) on a thread of its own, so that it delays no other input.

    `wake` is called from that thread whenever there is more. A thread that waits for bytes when `close` is called
    ends when more arrive, or when their sender closes.
    """

    hint_samples = None

    def __init__(self, source: Source, limits: AudioLimits, wake: Callable[[], None]) -> None:
        self._chunks: deque[np.ndarray] = deque()
        self._changed = threading.Condition()
        self._finished = self._closed = False
        self._error: AsrServeError | None = None
        self._wake = wake
        threading.Thread(target=self._read, args=(source, limits), name="slow audio", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Returns whether all audio has been returned."""
        with self._changed:
            return self._finished and not self._chunks and self._error is None

    def next_chunk(self) -> np.ndarray | None:
        """Returns the next chunk; None if none is ready, or at the end. Raises the stream's errors after the
        audio before them."""
        with self._changed:
            if self._chunks:
                self._changed.notify()
                return self._chunks.popleft()
            if self._error is not None:
                raise self._error
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify()

    def _read(self, source: Source, limits: AudioLimits) -> None:
        error: AsrServeError | None = CorruptAudio("reading the audio failed", todo="report it, with the log")
        try:
            with open_audio(source, limits=limits) as stream:
                for chunk in stream:
                    if not self._append(chunk):
                        break
            error = None
        except AsrServeError as failure:
            error = failure
        finally:  # on any error the reader must neither wait for ever nor mistake half of the audio for all
            with self._changed:
                self._finished, self._error = True, error
            self._wake()

    def _append(self, chunk: np.ndarray) -> bool:
        """Returns False once the reader is closed."""
        with self._changed:
            while len(self._chunks) >= MAX_BUFFERED_CHUNKS and not self._closed:
                self._changed.wait()
            self._chunks.append(chunk)
            closed = self._closed
        self._wake()
        return not closed


OpenReader = Callable[[Source, AudioLimits, Callable[[], None]], AudioReader]
"""Opens the reader of a source; the last argument is called whenever a slow input has more."""


def open_reader(source: Source, limits: AudioLimits, wake: Callable[[], None]) -> AudioReader:
    """Opens the reader for a source. Streams that cannot seek may be slow."""
    if callable(getattr(source, "read", None)) and not _seekable(source):
        return ThreadedReader(source, limits, wake)
    return DirectReader(source, limits)


def _seekable(source: object) -> bool:
    seekable = getattr(source, "seekable", None)
    try:
        return bool(seekable()) if callable(seekable) else False
    except (OSError, ValueError):
        return False  # closed: reading it will say so
