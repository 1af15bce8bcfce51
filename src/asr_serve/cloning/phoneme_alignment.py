"""Phoneme alignment of a recording with another voice that says the same and whose durations are known.

Both are compared as cepstra, normalized for voice and microphone, and the recording is aligned to the other by
dynamic time warping. The cost of the alignment tells whether the text matches the recording.

Source  dynamic time warping: Sakoe & Chiba 1978, symmetric steps.
        tests/cloning/test_phoneme_alignment.py compares with voices whose durations are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

CEPSTRA = 13
LOUDNESS = 2.0
"""Weight of loudness beside a cepstrum: a pause must not be aligned with a sound."""
DYNAMIC = 2.0
"""Weight of a cepstrum's changes, which mark the boundaries of sounds."""
CHANGE_FRAMES = 2
SLANT = 0.6
"""Additional cost, in mean distances, of a step that advances one voice only."""
FLOOR = -9.0
"""Floor of mel magnitudes, natural log, for normalized speech: below it is silence."""


class PhonemeAlignment(NamedTuple):
    """Alignment with one voice. `frames`: of each phoneme, one at least; `cost`: mean distance of aligned frames
    relative to that of random pairs. 0.3 to 0.5 where both say the same."""

    frames: np.ndarray
    cost: float


class ConsensusAlignment(NamedTuple):
    """Alignment with several voices. `frames`: of each phoneme; `cost`: the median of their costs; `apart`: mean
    deviation of their boundaries from the median, in frames. One or two where the text matches, more in long
    pauses; ten where it does not."""

    frames: np.ndarray
    cost: float
    apart: float


def consensus_alignment(mel: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]]) -> ConsensusAlignment | None:
    """Aligns with several voices: each boundary is the median of theirs, which is right more often than any of
    them, and robust against a single failure. None as in `align_phonemes`."""
    alignments = [each for each in (align_phonemes(mel, *other) for other in others) if each is not None]
    if not alignments:
        return None
    ends = np.stack([np.cumsum(each.frames)[:-1] for each in alignments])
    middle = np.median(ends, 0)
    apart = float(np.abs(ends - middle).mean()) if middle.size else 0.0
    frames = ends_to_durations(np.round(middle).astype(np.int64), len(alignments[0].frames), len(mel))
    return ConsensusAlignment(frames, float(np.median([each.cost for each in alignments])), apart)


def align_phonemes(mel: np.ndarray, other: np.ndarray, other_frames: np.ndarray) -> PhonemeAlignment | None:
    """Aligns `mel` (frames, 80) of the recording, natural log, with `other`, that of a voice that says the same
    and whose phonemes have `other_frames` frames each. None where the recording has fewer frames than phonemes."""
    phonemes = len(other_frames)
    if len(mel) < phonemes:
        return None
    features, other_features = alignment_features(mel), alignment_features(other)
    distance = np.sqrt(
        np.maximum(0, (features**2).sum(1)[:, None] - 2 * features @ other_features.T + (other_features**2).sum(1))
    )
    typical = float(distance.mean()) or 1.0
    path = dtw_path(distance / typical)
    cost = float((distance[path[:, 0], path[:, 1]]).mean() / typical)
    # A boundary is where the path goes from one frame of the other to the next: the middle of the frames aligned
    # with both.
    first, last = np.full(len(other), len(mel)), np.zeros(len(other), np.int64)
    np.minimum.at(first, path[:, 1], path[:, 0])
    np.maximum.at(last, path[:, 1], path[:, 0])
    ends = np.cumsum(other_frames)[:-1]
    boundaries = np.round((last[ends - 1] + 1 + first[ends]) / 2).astype(np.int64)
    return PhonemeAlignment(ends_to_durations(boundaries, phonemes, len(mel)), cost)


def ends_to_durations(ends: np.ndarray, phonemes: int, frames: int) -> np.ndarray:
    """Converts ascending ends of all phonemes but the last to frames of each, one at least."""
    order = np.arange(phonemes - 1)
    ends = np.maximum.accumulate(ends - order) + order
    ends = np.clip(ends, order + 1, frames - phonemes + 1 + order)
    return np.diff(np.concatenate([[0], ends, [frames]])).astype(np.int64)


def alignment_features(mel: np.ndarray) -> np.ndarray:
    """Computes features for the comparison of frames (frames, 80): cepstra of mean 0 and deviation 1 each, and
    their changes; loudness is the first cepstrum."""
    log = np.maximum(mel.astype(np.float64), FLOOR)
    cepstra = log @ dct_matrix()
    is_speech = cepstra[:, 0] > np.median(cepstra[:, 0])
    # Statistics of speech frames characterize voice and microphone; pauses differ less than voices do.
    speech = cepstra[is_speech] if is_speech.any() else cepstra
    cepstra = (cepstra - speech.mean(0)) / (speech.std(0) + 1e-6)
    cepstra[:, 0] *= LOUDNESS
    padded = np.pad(cepstra, ((CHANGE_FRAMES, CHANGE_FRAMES), (0, 0)), mode="edge")
    change = padded[2 * CHANGE_FRAMES :] - padded[: -2 * CHANGE_FRAMES]
    return np.concatenate([cepstra, DYNAMIC / 2 * change], 1)


@cache
def dct_matrix() -> np.ndarray:
    """DCT-II, (80, CEPSTRA)."""
    angles = (np.arange(80) + 0.5)[:, None] * np.arange(CEPSTRA) * np.pi / 80
    return np.asarray(np.cos(angles) * np.sqrt(2 / 80))


def dtw_path(distance: np.ndarray) -> np.ndarray:
    """Finds the cheapest path through (n, m) from (0, 0) to (n - 1, m - 1), (steps, 2): both advance, or one does.
    Computed by diagonals, since each depends on the two before it alone."""
    n, m = distance.shape
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0.0
    for diagonal in range(n + m - 1):
        i = np.arange(max(0, diagonal - m + 1), min(n, diagonal + 1))
        j = diagonal - i
        local = distance[i, j]
        diagonal_cost = total[i, j] + 2 * local
        single = np.minimum(total[i, j + 1], total[i + 1, j]) + local + SLANT
        total[i + 1, j + 1] = np.minimum(diagonal_cost, single)
    path = [(n - 1, m - 1)]
    i, j = n, m
    while (i, j) != (1, 1):
        local = distance[i - 1, j - 1]
        steps = (
            (total[i - 1, j - 1] + 2 * local, i - 1, j - 1),
            (total[i - 1, j] + local + SLANT, i - 1, j),
            (total[i, j - 1] + local + SLANT, i, j - 1),
        )
        _, i, j = min(steps)
        path.append((i - 1, j - 1))
    return np.array(path[::-1])
