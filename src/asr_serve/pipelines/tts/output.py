"""Conversion of a voice's samples for the client: resampling and watermark."""

from __future__ import annotations

import numpy as np

from asr_serve.audio.pcm import to_float32, to_int16
from asr_serve.audio.resample import Resampler
from asr_serve.audio.watermark import WatermarkEmbedder


class SpeechOutput:
    """Converts (n,) int16 at `from_hz` to (m,) int16 at `to_hz`, with a watermark if `mark`.

    Samples pass unchanged where neither is needed. Resampling holds back about 10 ms, the watermark 40 ms; `flush`
    returns them.
    """

    def __init__(self, from_hz: int, to_hz: int, *, mark: bool) -> None:
        self._resampler = Resampler(from_hz, to_hz) if from_hz != to_hz else None
        self._mark = WatermarkEmbedder(to_hz) if mark else None

    def convert(self, pcm: np.ndarray) -> np.ndarray:
        if self._resampler is None and self._mark is None:
            return pcm
        samples = to_float32(pcm)
        if self._resampler is not None:
            samples = self._resampler.resample(samples)
        if self._mark is not None:
            samples = self._mark.embed(samples)
        return to_int16(samples)

    def flush(self) -> np.ndarray:
        samples = self._resampler.finish() if self._resampler is not None else np.zeros(0, np.float32)
        if self._mark is not None:
            samples = np.concatenate([self._mark.embed(samples), self._mark.flush()])
        return to_int16(samples)
