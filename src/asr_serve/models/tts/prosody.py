"""Prosody of a sentence as numbers for each of its phonemes; gain and trimming of the synthesized samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asr_serve.models.interfaces import SynthesizedSentence
from asr_serve.types import Sentence

QUIET = 0.003
"""Threshold of an absolute sample value below which the ends are trimmed."""
EDGE_MS, RAMP_MS = 20, 12.5
"""Silence that remains at either end; length of the ramp from one gain to the next."""


def per_phoneme(sentence: Sentence, values: Sequence[float]) -> np.ndarray:
    """Repeats one number for every span to (phonemes + 2,) float32; the pauses at the ends get their neighbour's."""
    lengths = [len(stretch.phonemes) for stretch in sentence.spans]
    inner = np.repeat(np.array(values, np.float32), lengths)
    return np.concatenate([inner[:1], inner, inner[-1:]])


def finish_sentence(sentence: Sentence, pcm: np.ndarray, ends: np.ndarray, rate_hz: int) -> SynthesizedSentence:
    """Applies the requested energy and trims the silence at both ends. `pcm` (n,) float32; `ends` (phonemes + 2,)
    int64: ends of a pause, each phoneme and a pause, in samples."""
    db = per_phoneme(sentence, [stretch.energy for stretch in sentence.spans])
    if db.any():
        pcm = pcm * gains(db, ends, rate_hz)
    first, last = trim_silence(pcm, rate_hz * EDGE_MS // 1_000)
    inner = np.clip(ends[1:-1] - first, 0, last - first)
    inner[-1:] = last - first
    return SynthesizedSentence(np.clip(pcm[first:last], -1.0, 1.0), tuple(map(int, inner)))


def gains(db: np.ndarray, ends: np.ndarray, rate_hz: int) -> np.ndarray:
    """Returns a gain for each sample: that of its phoneme in `db`, with linear ramps between."""
    step = round(rate_hz * RAMP_MS / 1_000)
    middles = np.arange(step // 2, max(int(ends[-1]), step), step)
    levels = db[np.minimum(np.searchsorted(ends, middles, side="right"), len(db) - 1)]
    curve = np.interp(np.arange(int(ends[-1])), middles, levels)
    factors: np.ndarray = (10 ** (curve / 20)).astype(np.float32)
    return factors


def trim_silence(pcm: np.ndarray, edge: int) -> tuple[int, int]:
    """Returns the range of samples that are not silent, and `edge` samples around; everything where all is silent."""
    loud = np.flatnonzero(np.abs(pcm) > QUIET)
    if not len(loud):
        return 0, len(pcm)
    return max(0, int(loud[0]) - edge), min(len(pcm), int(loud[-1]) + 1 + edge)
