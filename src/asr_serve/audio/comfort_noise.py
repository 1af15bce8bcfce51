"""Comfort noise: what a line sounds like while nobody speaks, in place of silence that was told as its length.

A network that finds speech by hearing the noise around it hears digital zeros as something else, and remembers them for
seconds. So the noise heard last goes on, with its level and its spectrum.
"""

from __future__ import annotations

import msgspec
import numpy as np

from asr_serve.audio.pcm import decode_pcm16, to_int16

TAIL_S, MAX_TAIL_SAMPLES = 0.256, 4_096
"""Length of the audio whose noise goes on."""
TAPS = 128
FRAME_STEP = TAPS // 2
WHITE_SAMPLES = 1 << 16


def _white() -> np.ndarray:
    noise = np.random.default_rng(26).standard_normal(WHITE_SAMPLES + TAPS)
    noise[WHITE_SAMPLES:] = noise[:TAPS]
    return noise


class ComfortNoiseState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a ComfortNoise."""

    position: int = 0
    tail: bytes = b""
    """The audio heard last, 16-bit little-endian."""


class ComfortNoise:
    """Noise of one caller, whose samples are 16-bit integers over 32768. The same audio, silences and lengths give the
    same noise, on every server.

    State   the last quarter of a second
    """

    def __init__(self, rate_hz: int) -> None:
        self._most = min(round(TAIL_S * rate_hz), MAX_TAIL_SAMPLES)
        self._tail = np.zeros(0, np.float32)
        self._position = 0
        """Samples so far, modulo WHITE_SAMPLES."""
        self._filter: np.ndarray | None = None
        """(TAPS,) filter from white noise to that of the line; None: audio came since."""
        self._source: np.ndarray | None = None

    def export_state(self) -> ComfortNoiseState:
        return ComfortNoiseState(self._position, to_int16(self._tail).astype("<i2", copy=False).tobytes())

    def import_state(self, state: ComfortNoiseState) -> None:
        """Continues there. Raises ValueError for a state that is none."""
        self._position = state.position % WHITE_SAMPLES
        self._tail = decode_pcm16(state.tail)[-self._most :]

    def hear(self, pcm: np.ndarray) -> None:
        """Takes audio, (n,) float32."""
        self._filter = None
        self._tail = np.concatenate([self._tail, pcm])[-self._most :] if len(pcm) < self._most else pcm[-self._most :]
        self._move(len(pcm))

    def skip(self, samples: int) -> None:
        """Notes silence that is digital zeros."""
        self._move(samples)

    def make(self, samples: int) -> np.ndarray:
        """Returns so many samples of noise, (samples,) float32, 16-bit integers over 32768; zeros before enough audio
        was heard."""
        begin = self._position
        self._move(samples)
        if len(self._tail) < self._most or not samples:
            return np.zeros(samples, np.float32)
        if self._filter is None:
            self._filter = _noise_filter(self._tail)
        if self._source is None:
            self._source = _white()
        made = []
        while samples:
            count = min(samples, WHITE_SAMPLES - begin)
            made.append(np.convolve(self._source[begin : begin + count + TAPS - 1], self._filter, "valid"))
            begin, samples = (begin + count) % WHITE_SAMPLES, samples - count
        return decode_pcm16(to_int16(np.concatenate(made)).astype("<i2", copy=False).tobytes())

    def _move(self, samples: int) -> None:
        self._position = (self._position + samples) % WHITE_SAMPLES


def _noise_filter(tail: np.ndarray) -> np.ndarray:
    """Returns a filter (TAPS,) that gives white noise the spectrum and the level of `tail`."""
    window = np.hanning(TAPS)
    frames = np.lib.stride_tricks.sliding_window_view(tail.astype(np.float64), TAPS)[::FRAME_STEP] * window
    power = np.mean(np.abs(np.fft.rfft(frames)) ** 2, axis=0)
    taps: np.ndarray = np.roll(np.fft.irfft(np.sqrt(power)), TAPS // 2) * window
    energy = np.sum(taps**2)
    level = np.mean(tail.astype(np.float64) ** 2)
    return taps * np.sqrt(level / energy) if energy else np.zeros(TAPS)
