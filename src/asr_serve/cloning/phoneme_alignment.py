"""Which frames of a recording belong to which phoneme, where another voice says the same and its are known.

Both are told as cepstra, less what a voice and a microphone do to all of them alike, and the recording is warped
onto the other. What it costs to do so tells whether the text is what was said.

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
"""What loudness counts beside a cepstrum: a pause must not be taken for a sound."""
DYNAMIC = 2.0
"""The same of how a cepstrum changes: that is where one sound ends and another begins."""
CHANGE_FRAMES = 2
SLANT = 0.6
"""What it costs more, in mean distances, when one voice waits for the other."""
FLOOR = -9.0
"""Natural log of a mel magnitude below which there is nothing to hear, of speech that is levelled."""


class PhonemeAlignment(NamedTuple):
    """`frames`: of each phoneme, one at least; `cost`: mean distance of the frames that were laid upon each other,
    in that of frames taken at random. 0.3 to 0.5 where both say the same."""

    frames: np.ndarray
    cost: float


class ConsensusAlignment(NamedTuple):
    """What several voices say of a recording. `frames`: of each phoneme; `cost`: as above, their median; `apart`:
    how far they are from each other, in frames, a mean. One or two where the text is what is said, more in long
    pauses; ten where it is not."""

    frames: np.ndarray
    cost: float
    apart: float


def consensus_alignment(
    mel: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]]
) -> ConsensusAlignment | None:
    """The same of several voices: where each sound ends is the median of what they say, which is right more often
    than any of them, and never far off where one of them is lost. None as above."""
    found = [each for each in (align_phonemes(mel, *other) for other in others) if each is not None]
    if not found:
        return None
    ends = np.stack([np.cumsum(each.frames)[:-1] for each in found])
    middle = np.median(ends, 0)
    apart = float(np.abs(ends - middle).mean()) if middle.size else 0.0
    frames = ends_to_durations(np.round(middle).astype(np.int64), len(found[0].frames), len(mel))
    return ConsensusAlignment(frames, float(np.median([each.cost for each in found])), apart)


def align_phonemes(mel: np.ndarray, other: np.ndarray, other_frames: np.ndarray) -> PhonemeAlignment | None:
    """`mel` (frames, 80) of the recording, natural log; `other`, the same of the voice that says it too, whose
    phonemes have so many frames each. None where the recording has fewer frames than phonemes."""
    phonemes = len(other_frames)
    if len(mel) < phonemes:
        return None
    heard, known = alignment_features(mel), alignment_features(other)
    distance = np.sqrt(np.maximum(0, (heard**2).sum(1)[:, None] - 2 * heard @ known.T + (known**2).sum(1)))
    typical = float(distance.mean()) or 1.0
    path = dtw_path(distance / typical)
    cost = float((distance[path[:, 0], path[:, 1]]).mean() / typical)
    # Where the path goes from one frame of the other to the next: the middle of the frames that are laid upon
    # both.
    first, last = np.full(len(other), len(mel)), np.zeros(len(other), np.int64)
    np.minimum.at(first, path[:, 1], path[:, 0])
    np.maximum.at(last, path[:, 1], path[:, 0])
    ends = np.cumsum(other_frames)[:-1]
    found = np.round((last[ends - 1] + 1 + first[ends]) / 2).astype(np.int64)
    return PhonemeAlignment(ends_to_durations(found, phonemes, len(mel)), cost)


def ends_to_durations(ends: np.ndarray, phonemes: int, frames: int) -> np.ndarray:
    """Ends of all phonemes but the last, in rising order -> frames of each, one at least."""
    order = np.arange(phonemes - 1)
    ends = np.maximum.accumulate(ends - order) + order
    ends = np.clip(ends, order + 1, frames - phonemes + 1 + order)
    return np.diff(np.concatenate([[0], ends, [frames]])).astype(np.int64)


def alignment_features(mel: np.ndarray) -> np.ndarray:
    """(frames, 80) -> what frames are compared by: cepstra of mean 0 and deviation 1 each, their changes,
    loudness."""
    log = np.maximum(mel.astype(np.float64), FLOOR)
    cepstra = log @ dct_matrix()
    loud = cepstra[:, 0] > np.median(cepstra[:, 0])
    # What is heard while somebody speaks is the voice's and the microphone's; pauses differ less than voices do.
    spoken = cepstra[loud] if loud.any() else cepstra
    cepstra = (cepstra - spoken.mean(0)) / (spoken.std(0) + 1e-6)
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
    """(n, m) -> the cheapest path from (0, 0) to (n - 1, m - 1), (steps, 2): both go on, or one waits. Diagonal by
    diagonal, since each depends on the two before it alone."""
    n, m = distance.shape
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0.0
    for diagonal in range(n + m - 1):
        i = np.arange(max(0, diagonal - m + 1), min(n, diagonal + 1))
        j = diagonal - i
        here = distance[i, j]
        both = total[i, j] + 2 * here
        one = np.minimum(total[i, j + 1], total[i + 1, j]) + here + SLANT
        total[i + 1, j + 1] = np.minimum(both, one)
    path = [(n - 1, m - 1)]
    i, j = n, m
    while (i, j) != (1, 1):
        here = distance[i - 1, j - 1]
        ways = (
            (total[i - 1, j - 1] + 2 * here, i - 1, j - 1),
            (total[i - 1, j] + here + SLANT, i - 1, j),
            (total[i, j - 1] + here + SLANT, i, j - 1),
        )
        _, i, j = min(ways)
        path.append((i - 1, j - 1))
    return np.array(path[::-1])
