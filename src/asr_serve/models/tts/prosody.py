"""How a sentence is to be said, as numbers for each of its phonemes; what is cut off and made louder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asr_serve.models.interfaces import SynthesizedSentence
from asr_serve.types import Sentence

QUIET = 0.003
"""Of 1: what is below it at the ends is cut."""
EDGE_MS, RAMP_MS = 20, 12.5
"""Of the silence at either end that stays; in the course of which one loudness becomes another."""


def per_phoneme(sentence: Sentence, values: Sequence[float]) -> np.ndarray:
    """(phonemes + 2,) float32 of one number for every stretch; a pause at either end has that of its neighbour."""
    lengths = [len(stretch.phonemes) for stretch in sentence.spans]
    inner = np.repeat(np.array(values, np.float32), lengths)
    return np.concatenate([inner[:1], inner, inner[-1:]])


def finish_sentence(sentence: Sentence, pcm: np.ndarray, ends: np.ndarray, rate_hz: int) -> SynthesizedSentence:
    """What a voice said, with the loudness that is asked for and without the silence in front and behind.

    `pcm` (n,) float32; `ends` (phonemes + 2,) int64: the samples at which a pause, each phoneme and a pause end.
    """
    db = per_phoneme(sentence, [stretch.energy for stretch in sentence.spans])
    if db.any():
        pcm = pcm * gains(db, ends, rate_hz)
    first, last = trim_silence(pcm, rate_hz * EDGE_MS // 1_000)
    inner = np.clip(ends[1:-1] - first, 0, last - first)
    inner[-1:] = last - first
    return SynthesizedSentence(np.clip(pcm[first:last], -1.0, 1.0), tuple(map(int, inner)))


def gains(db: np.ndarray, ends: np.ndarray, rate_hz: int) -> np.ndarray:
    """A factor for each sample: `db` of the sound that it belongs to, from one to the next in a ramp."""
    step = round(rate_hz * RAMP_MS / 1_000)
    middles = np.arange(step // 2, max(int(ends[-1]), step), step)
    held = db[np.minimum(np.searchsorted(ends, middles, side="right"), len(db) - 1)]
    curve = np.interp(np.arange(int(ends[-1])), middles, held)
    found: np.ndarray = (10 ** (curve / 20)).astype(np.float32)
    return found


def trim_silence(pcm: np.ndarray, edge: int) -> tuple[int, int]:
    """From where to where there is sound, and `edge` samples around it; all of what is silent throughout."""
    loud = np.flatnonzero(np.abs(pcm) > QUIET)
    if not len(loud):
        return 0, len(pcm)
    return max(0, int(loud[0]) - edge), min(len(pcm), int(loud[-1]) + 1 + edge)
