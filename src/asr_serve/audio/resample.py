"""Streaming resampling, to 16 kHz by default, without drift of a single sample."""

from __future__ import annotations

import numpy as np
import soxr

from asr_serve.errors import UnsupportedAudio
from asr_serve.units import RATE_HZ, resampled_samples

MIN_RATE_HZ = 1_000
MAX_RATE_HZ = 384_000
"""Twice the highest rate of recorders. With higher ones an input of a few bytes could cost hours of work."""


def check_rate_hz(rate_hz: int) -> None:
    """Raise UnsupportedAudio for a rate outside MIN_RATE_HZ..MAX_RATE_HZ."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise UnsupportedAudio(
            f"a sample rate of {rate_hz} Hz came",
            f"rates from {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz are allowed",
            "check the rate, or resample the audio first",
        )


class Resampler:
    """Resampler of one mono stream from `rate_hz` to `to_hz`, in chunks of any size.

    In      chunk (n,) float32, any n
    Out     (m,) float32; after `finish`, n input samples have become exactly ceil(n * to_hz / rate_hz), and
            output sample k is at k / to_hz s of the input (the filter's delay is removed). Any chunking gives the
            same samples, bit for bit.
    State   `input_samples` at `rate_hz`, `output_samples` at `to_hz`, and soxr's filter
    Raises  UnsupportedAudio for a rate outside MIN_RATE_HZ..MAX_RATE_HZ
    Source  soxr, quality HQ
    """

    def __init__(self, rate_hz: int, to_hz: int = RATE_HZ) -> None:
        check_rate_hz(rate_hz)
        check_rate_hz(to_hz)
        self.rate_hz, self.to_hz = rate_hz, to_hz
        self.input_samples = 0
        self.output_samples = 0
        self._soxr = None if rate_hz == to_hz else _new_soxr(rate_hz, to_hz)

    def resample(self, chunk: np.ndarray) -> np.ndarray:
        """Append `chunk`; return the samples that are ready, maybe none. With equal rates: `chunk` itself."""
        self.input_samples += len(chunk)
        if self._soxr is None:
            self.output_samples += len(chunk)
            return chunk
        if not len(chunk):
            return np.zeros(0, np.float32)
        ready: np.ndarray = self._soxr.resample_chunk(np.ascontiguousarray(chunk, np.float32))
        self.output_samples += len(ready)
        return ready

    def finish(self) -> np.ndarray:
        """Remaining samples, as if silence followed. Later chunks continue at their position, with a new filter."""
        if self._soxr is None:
            return np.zeros(0, np.float32)
        # soxr rounds the length to nearest: silence after the end lets the filter produce the sample that
        # rounding up needs, and the surplus is cut.
        silence = np.zeros(self.rate_hz // self.to_hz + 2, np.float32)
        missing = resampled_samples(self.input_samples, self.rate_hz, self.to_hz) - self.output_samples
        tail: np.ndarray = self._soxr.resample_chunk(silence, last=True)
        assert 0 <= missing <= len(tail), (self.rate_hz, self.input_samples, self.output_samples, len(tail))
        self.output_samples += missing
        self._soxr = _new_soxr(self.rate_hz, self.to_hz)
        return tail[:missing]


def resample_clip(pcm: np.ndarray, rate_hz: int, to_hz: int) -> np.ndarray:
    """Resample a whole clip: (n,) float32 -> (ceil(n * to_hz / rate_hz),)."""
    resampler = Resampler(rate_hz, to_hz)
    return np.concatenate([resampler.resample(np.asarray(pcm, np.float32)), resampler.finish()])


def _new_soxr(rate_hz: int, to_hz: int) -> soxr.ResampleStream:
    return soxr.ResampleStream(rate_hz, to_hz, 1, quality="HQ")
