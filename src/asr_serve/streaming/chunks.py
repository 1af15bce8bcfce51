"""What may be streamed, cut into pieces of one size."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Iterator

import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Piece
from asr_serve.audio.pcm import clipped, to_mono
from asr_serve.audio.resample import Resampler
from asr_serve.errors import UnsupportedAudio

CHUNK_TYPES = (np.dtype(np.int16), np.dtype(np.float32), np.dtype(np.float64))

Chunk = np.ndarray | bytes | bytearray | memoryview
"""Mono samples (n,), int16 or float in -1..1, or the bytes of 16-bit little-endian ones, cut anywhere."""
Chunks = Iterable[Chunk] | AsyncIterable[Chunk]


def one_source(given: object) -> bool:
    """Whether it is one source of audio, and not several or chunks; a list of numbers is none."""
    if isinstance(given, tuple) and len(given) == 2:
        return isinstance(given[0], np.ndarray) and not isinstance(given[1], np.ndarray | tuple)
    plain = isinstance(given, str | bytes | bytearray | memoryview | os.PathLike | np.ndarray)
    return plain or hasattr(given, "read")


class Cut:
    """Audio in chunks of any size and kind in, pieces of one size out."""

    def __init__(self, piece_ms: int, rate_hz: int) -> None:
        """`rate_hz`: of what `chunk` takes."""
        self._samples = units.ms_to_samples(piece_ms)
        self._resampler = Resampler(rate_hz)
        self._piece = Piece()
        self._half = b""
        """Of a sample, when bytes were cut in the middle of one."""

    def chunk(self, chunk: object) -> Iterator[np.ndarray]:
        """Raises UnsupportedAudio."""
        if isinstance(chunk, bytes | bytearray | memoryview):
            joined = self._half + bytes(chunk)
            whole = len(joined) // 2 * 2
            chunk, self._half = np.frombuffer(joined[:whole], "<i2"), joined[whole:]
        if not isinstance(chunk, np.ndarray):
            came, todo = f"a {type(chunk).__name__}", "a recording may come by itself, not in a list"
        elif chunk.ndim != 1:
            came, todo = f"an array of shape {chunk.shape}", "pick or average the channels: chunk[:, 0]"
        elif chunk.dtype not in CHUNK_TYPES:
            came, todo = f"an array of {chunk.dtype}", "convert the samples first"
        else:
            pcm = to_mono(chunk.copy())  # whoever records may fill the same array again
            return self.add(clipped(self._resampler.put(pcm)))
        raise UnsupportedAudio(
            f"{came} came as a chunk", "(n,) int16 or float samples, or bytes of PCM16, are allowed", todo
        )

    def add(self, pcm: np.ndarray) -> Iterator[np.ndarray]:
        """`pcm` (n,) float32 at 16 kHz."""
        self._piece.add(pcm)
        while self._piece.samples >= self._samples:
            yield self._piece.take(self._samples, 1, last=False)

    def rest(self) -> np.ndarray:
        """What is left at the end: less than a piece, and half a sample is none."""
        self._piece.add(clipped(self._resampler.finish()))
        return self._piece.take(0, 1, last=True)
