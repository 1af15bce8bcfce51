"""Entry point for audio: any supported input to chunks of 16 kHz mono float32.

Audio is decoded as a stream: memory is bounded by a second or two of it, whatever the length.
Time is counted in samples from the first decoded one; container timestamps only reveal gaps.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from fractions import Fraction
from typing import BinaryIO

import msgspec
import numpy as np

from asr_serve.audio.byte_source import ByteSource
from asr_serve.audio.media_reader import MediaFile
from asr_serve.audio.pcm import clipped, to_mono
from asr_serve.audio.resample import Resampler, check_rate_hz
from asr_serve.errors import AudioError, AudioTooLong, EmptyAudio, UnsupportedAudio
from asr_serve.units import RATE_HZ, resampled_samples, s_to_samples, samples_to_s

CHUNK_SAMPLES = RATE_HZ
"""Samples of every chunk but the last: one second."""

MAX_ARRAY_CHANNELS = 8
"""Most channels of a 2-D array: its axis of at most this length is the channels; the other must be longer."""

HEADER_SLACK_S = 0.25
"""Excess over `max_duration_s` that a header which counts padding may announce; the decoded samples decide."""

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | np.ndarray | tuple[np.ndarray, int]
"""Types of input. A bare array is at 16 kHz; (array, rate_hz) at any rate."""


class AudioLimits(msgspec.Struct, frozen=True):
    """Limits on one input. None: no limit. `max_bytes` and `head_s` are for files, buffers and streams, not arrays."""

    max_duration_s: float | None = None
    max_bytes: int | None = None
    head_s: float | None = None
    """Seconds at the beginning that are read; the rest is left out. None: all."""


NO_LIMITS = AudioLimits()


class AudioStream:
    """Iterator over the chunks of one input, in order.

    Out     chunks (n,) float32, mono, 16 kHz, -1..1, contiguous, 0 < n <= CHUNK_SAMPLES, all but the last
            CHUNK_SAMPLES; together exactly ceil(samples_in * 16000 / rate) samples. A contiguous float32
            mono array at 16 kHz is returned as views of itself.
    Raises  while iterating: TruncatedAudio and CorruptAudio (after the good part), EmptyAudio, AudioTooLong,
            AudioTooLarge, UnsupportedAudio, SourceNotFound; AudioError when read after `close`

    One thread at a time; streams in different threads are independent.
    """

    duration_hint_samples: int | None
    """Length at 16 kHz according to the header: for progress bars, not for arithmetic. None if unknown."""

    def __init__(
        self,
        pieces: Iterator[tuple[int, np.ndarray]],
        hint_samples: int | None,
        max_samples: int | None,
        parts: tuple[MediaFile | ByteSource, ...] = (),
        head_samples: int | None = None,
    ) -> None:
        self.duration_hint_samples = hint_samples
        self._parts = parts
        self._closed = False
        ready = _limited(_at_16k(pieces), max_samples)
        self._chunks = _closing(parts, _rechunked(ready if head_samples is None else _head(ready, head_samples)))

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if self._closed:
            raise AudioError("audio was read after its stream was closed", "", "read it inside the with block")
        return next(self._chunks)

    def __enter__(self) -> AudioStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the decoder and close our own file. A stream passed by the caller stays open. Idempotent."""
        if not self._closed:
            self._closed = True
            self._chunks.close()
            for part in self._parts:
                part.close()


def open_audio(source: Source, *, limits: AudioLimits = NO_LIMITS) -> AudioStream:
    """Open an audio input and read no more of it than its header.

    Paths are local files, never addresses: nothing is downloaded, playlists are refused. Of several audio streams
    in a file, ffmpeg's best is read; channels are averaged.

    Raises  SourceNotFound, EmptyAudio, NotAudio, UnsupportedAudio, TruncatedAudio, CorruptAudio,
            AudioTooLong (by its header), AudioTooLarge; the rest while iterating, see AudioStream
    """
    max_samples = None if limits.max_duration_s is None else s_to_samples(limits.max_duration_s)
    if isinstance(source, np.ndarray):
        return _open_array(source, RATE_HZ, max_samples)
    if isinstance(source, tuple):
        return _open_array(*_array_and_rate(source), max_samples)
    opened = ByteSource(source, limits.max_bytes)
    with ExitStack() as undo:
        undo.callback(opened.close)
        media = MediaFile(opened)
        undo.callback(media.close)
        if media.announced_samples is not None:
            _expect_allowed(media.announced_samples, max_samples, s_to_samples(HEADER_SLACK_S))
        undo.pop_all()
    head_samples = None if limits.head_s is None else s_to_samples(limits.head_s)
    return AudioStream(media.audio_chunks(), media.hint_samples, max_samples, (media, opened), head_samples)


def read_audio(source: Source, *, limits: AudioLimits = NO_LIMITS) -> np.ndarray:
    """Read a whole input as one (n,) float32 array, for short audio. Raises what `open_audio` and its chunks do."""
    with open_audio(source, limits=limits) as stream:
        return np.concatenate(list(stream))


def _open_array(samples: np.ndarray, rate_hz: int, max_samples: int | None) -> AudioStream:
    planes = _planes(samples)
    check_rate_hz(rate_hz)
    length_samples = resampled_samples(planes.shape[1], rate_hz)
    _expect_allowed(length_samples, max_samples)
    to_mono(planes[:, :0])  # raises for an unsupported sample type
    pieces = ((rate_hz, to_mono(planes[:, at : at + CHUNK_SAMPLES])) for at in range(0, planes.shape[1], CHUNK_SAMPLES))
    return AudioStream(pieces, length_samples, max_samples)


def _planes(samples: np.ndarray) -> np.ndarray:
    """View (channels, n) of a 1-D array, or of a 2-D array in either order."""
    came = f"an array of shape {samples.shape} came"
    allowed = f"(n,), (n, channels) or (channels, n) with at most {MAX_ARRAY_CHANNELS} channels is allowed"
    if samples.ndim not in (1, 2):
        raise UnsupportedAudio(came, allowed, "pass one recording at a time")
    if samples.ndim == 1:
        planes = samples[None, :]
    else:
        short, long = sorted(samples.shape)
        if short == 0 and long > MAX_ARRAY_CHANNELS:
            raise UnsupportedAudio(f"{came}: 0 channels", allowed, "check the shape")
        if long and not short <= MAX_ARRAY_CHANNELS < long:
            if short == 0:
                raise EmptyAudio(f"{came}: 0 samples", "audio needs some", "check how it was made")
            raise UnsupportedAudio(f"{came}, which may be read two ways", allowed, "average the channels first")
        planes = samples if samples.shape[0] == short else samples.T
    if not planes.shape[1]:
        raise EmptyAudio(f"{came}: 0 samples", "audio needs some", "check how it was made")
    return planes


def _array_and_rate(source: tuple[object, ...]) -> tuple[np.ndarray, int]:
    if len(source) == 2 and isinstance(source[0], np.ndarray) and not isinstance(source[1], bool):
        try:
            return source[0], operator.index(source[1])  # type: ignore[arg-type]
        except TypeError:
            pass
    raise UnsupportedAudio(
        f"a tuple of ({', '.join(type(part).__name__ for part in source)}) came",
        "a tuple is (numpy array, whole number of Hz)",
        "swap or convert its parts",
    )


def _expect_allowed(samples: int, max_samples: int | None, slack_samples: int = 0) -> None:
    if max_samples is not None and samples > max_samples + slack_samples:
        raise AudioTooLong(
            f"the audio lasts {samples_to_s(samples):.1f} s or more",
            f"at most {samples_to_s(max_samples):g} s are allowed",
            "cut it into parts, or raise max_duration_s",
        )


def _at_16k(pieces: Iterator[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
    """Resample with one resampler for each run of equal rate; the total length is rounded up once, not per run."""
    due, output, resampler = Fraction(0), 0, None
    for rate_hz, mono in pieces:
        if resampler is None or resampler.rate_hz != rate_hz:
            if resampler is not None:
                due += Fraction(resampler.input_samples * RATE_HZ, resampler.rate_hz)
                tail = resampler.finish()[: -int(-due // 1) - output]
                output += len(tail)
                yield tail
            resampler = Resampler(rate_hz)
        ready = resampler.resample(mono)
        output += len(ready)
        yield ready
    if resampler is not None:
        due += Fraction(resampler.input_samples * RATE_HZ, resampler.rate_hz)
        yield resampler.finish()[: -int(-due // 1) - output]


def _limited(pieces: Iterator[np.ndarray], max_samples: int | None) -> Iterator[np.ndarray]:
    """Clip to full scale; raise AudioTooLong as soon as the limit is exceeded."""
    samples = 0
    for piece in pieces:
        samples += len(piece)
        _expect_allowed(samples, max_samples)
        yield clipped(piece)


def _head(pieces: Iterator[np.ndarray], samples: int) -> Iterator[np.ndarray]:
    """The first samples; what follows is not decoded."""
    while samples > 0 and (piece := next(pieces, None)) is not None:
        yield piece[:samples]
        samples -= len(piece)


def _closing(
    parts: tuple[MediaFile | ByteSource, ...], chunks: Iterator[np.ndarray]
) -> Generator[np.ndarray, None, None]:
    """Close `parts` at the end of `chunks` or at an error, for callers without a with block."""
    try:
        yield from chunks
    finally:
        for part in parts:
            part.close()


def _rechunked(pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Chunks of CHUNK_SAMPLES and a remainder; views where a piece contains a whole chunk."""
    pending: list[np.ndarray] = []
    pending_samples = 0
    for piece in pieces:
        while pending_samples + len(piece) >= CHUNK_SAMPLES:
            cut = CHUNK_SAMPLES - pending_samples
            yield np.concatenate([*pending, piece[:cut]]) if pending else piece[:cut]
            pending, pending_samples, piece = [], 0, piece[cut:]
        if len(piece):
            pending.append(piece)
            pending_samples += len(piece)
    if pending:
        yield np.concatenate(pending) if len(pending) > 1 else pending[0]
