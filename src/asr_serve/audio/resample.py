"""Streaming resampling, to 16 kHz by default, without drift of a single sample."""

from __future__ import annotations

import math

import msgspec
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


FILTER_S = 0.03
"""Input before a sample on which it may depend: more than half the length of soxr's filters."""


class ResamplerState(msgspec.Struct, frozen=True):
    """State of a Resampler, from which another one continues: at the same sample, and with the same values but for the
    rounding of float32."""

    input_samples: int
    output_samples: int
    tail_output: int
    """Output position of the first sample of `tail`."""
    tail: bytes
    """Last input, float32, from a position on at which input and output samples coincide."""


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

    def __init__(self, rate_hz: int, to_hz: int = RATE_HZ, *, exports_state: bool = False) -> None:
        """`exports_state`: whether `export_state` will be called."""
        check_rate_hz(rate_hz)
        check_rate_hz(to_hz)
        self.rate_hz, self.to_hz = rate_hz, to_hz
        self.input_samples = 0
        self.output_samples = 0
        self._soxr = None if rate_hz == to_hz else _new_soxr(rate_hz, to_hz)
        self._origin = (0, 0)
        """Input and output position at which the filter began."""
        self._tail = np.zeros(0, np.float32) if exports_state and self._soxr is not None else None
        self._surplus = np.zeros(0, np.float32)
        """Output of a restored filter that is ahead of the one that it continues."""
        self._skip = 0
        """Output of a restored filter that was returned before."""

    def export_state(self) -> ResamplerState:
        if self._soxr is None:
            return ResamplerState(self.input_samples, self.output_samples, self.output_samples, b"")
        assert self._tail is not None, "a resampler that keeps no tail"
        first_input, first_output = self._origin
        start = self.input_samples - len(self._tail)
        output = first_output + (start - first_input) * self.to_hz // self.rate_hz
        return ResamplerState(self.input_samples, self.output_samples, output, self._tail.tobytes())

    def import_state(self, state: ResamplerState) -> None:
        """Continues there. Call before the first chunk."""
        tail = np.frombuffer(state.tail, np.float32)
        self.input_samples, self.output_samples = state.input_samples, state.output_samples
        if self._soxr is None:
            return
        self._origin = state.input_samples - len(tail), state.tail_output
        self._tail = tail
        ready = self._soxr.resample_chunk(tail) if len(tail) else tail
        self._skip = max(0, state.output_samples - state.tail_output - len(ready))
        self._surplus = ready[state.output_samples - state.tail_output :]

    def resample(self, chunk: np.ndarray) -> np.ndarray:
        """Append `chunk`; return the samples that are ready, maybe none. With equal rates: `chunk` itself."""
        self.input_samples += len(chunk)
        if self._soxr is None:
            self.output_samples += len(chunk)
            return chunk
        if not len(chunk):
            return np.zeros(0, np.float32)
        chunk = np.ascontiguousarray(chunk, np.float32)
        ready: np.ndarray = self._continued(self._soxr.resample_chunk(chunk))
        self.output_samples += len(ready)
        if self._tail is not None:
            tail = np.concatenate([self._tail, chunk])
            self._tail = tail[max(0, self._first_needed - (self.input_samples - len(tail))) :]
        return ready

    @property
    def _first_needed(self) -> int:
        """Input position from which another filter makes all further output, where output samples coincide."""
        first_input, first_output = self._origin
        period = self.rate_hz // math.gcd(self.rate_hz, self.to_hz)
        returned = (self.output_samples - first_output) * self.rate_hz // self.to_hz
        return first_input + max(0, returned - int(self.rate_hz * FILTER_S)) // period * period

    def _continued(self, ready: np.ndarray) -> np.ndarray:
        """Output of a restored filter, where the one that it continues had stopped."""
        if len(self._surplus):
            ready, self._surplus = np.concatenate([self._surplus, ready]), self._surplus[:0]
        if self._skip:
            dropped = min(self._skip, len(ready))
            self._skip -= dropped
            ready = ready[dropped:]
        return ready

    def finish(self) -> np.ndarray:
        """Remaining samples, as if silence followed. Later chunks continue at their position, with a new filter."""
        if self._soxr is None:
            return np.zeros(0, np.float32)
        # soxr rounds the length to nearest: silence after the end lets the filter produce the sample that
        # rounding up needs, and the surplus is cut.
        silence = np.zeros(self.rate_hz // self.to_hz + 2, np.float32)
        missing = resampled_samples(self.input_samples, self.rate_hz, self.to_hz) - self.output_samples
        tail: np.ndarray = self._continued(self._soxr.resample_chunk(silence, last=True))
        assert 0 <= missing <= len(tail), (self.rate_hz, self.input_samples, self.output_samples, len(tail))
        self.output_samples += missing
        self._soxr = _new_soxr(self.rate_hz, self.to_hz)
        self._origin, self._skip = (self.input_samples, self.output_samples), 0
        if self._tail is not None:
            self._tail = self._tail[:0]
        return tail[:missing]


def resample_clip(pcm: np.ndarray, rate_hz: int, to_hz: int) -> np.ndarray:
    """Resample a whole clip: (n,) float32 -> (ceil(n * to_hz / rate_hz),)."""
    resampler = Resampler(rate_hz, to_hz)
    return np.concatenate([resampler.resample(np.asarray(pcm, np.float32)), resampler.finish()])


def _new_soxr(rate_hz: int, to_hz: int) -> soxr.ResampleStream:
    return soxr.ResampleStream(rate_hz, to_hz, 1, quality="HQ")
