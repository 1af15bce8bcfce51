"""Voices that belong together: bottom up, the two groups that are most alike first.

Groups are as alike as the mean directions of their voices, each weighted by how long it was heard. Two that spoke
at once, or side by side in one window, are two people and never come together, unless more spoke at once than
there are said to be.
"""

from __future__ import annotations

import msgspec
import numpy as np


class SpeakerCount(msgspec.Struct, frozen=True):
    """Speakers: so many, or as many as are heard within bounds."""

    minimum: int = 1
    maximum: int | None = None

    @classmethod
    def of(cls, exactly: int | None, least: int | None, most: int | None) -> SpeakerCount:
        if exactly is not None:
            return cls(exactly, exactly)
        return cls(least or 1, most)


ANY = SpeakerCount()


def cluster(
    voices: np.ndarray, weights: np.ndarray, apart: np.ndarray, alike: float, how_many: SpeakerCount = ANY
) -> np.ndarray:
    """The group of each voice, (n,) int64, numbered by first appearance.

    In      voices (n, width), each of length 1; weights (n,) above 0; apart (n, n) bool, symmetric: these two are
            two people; alike: least cosine of two groups that are one speaker
    """
    count = len(voices)
    labels = np.arange(count)
    if not count:
        return labels
    sums = voices * weights[:, None]
    units = _units(sums)
    apart = apart.copy()
    closeness = np.asarray(units @ units.T, np.float32)
    closeness[apart] = -np.inf
    np.fill_diagonal(closeness, -np.inf)
    best = closeness.argmax(1)
    value = closeness[np.arange(count), best]
    left, alive = count, np.ones(count, bool)
    most = how_many.maximum if how_many.maximum is not None else count
    while left > how_many.minimum:
        one = int(value.argmax())
        other = int(best[one])
        if value[one] == -np.inf or (value[one] < alike and left <= most):
            break
        labels[labels == labels[other]] = labels[one]
        sums[one] += sums[other]
        units[one] = _units(sums[one])
        apart[one] |= apart[other]
        apart[:, one] = apart[one]
        closeness[other] = closeness[:, other] = -np.inf
        value[other], alive[other] = -np.inf, False
        fresh = np.asarray(units @ units[one], np.float32)
        fresh[apart[one] | ~alive] = -np.inf
        fresh[one] = -np.inf
        closeness[one] = closeness[:, one] = fresh
        gone = (best == one) | (best == other)
        gone[one] = True
        gone[other] = False
        best[gone] = closeness[gone].argmax(1)
        value[gone] = closeness[gone, best[gone]]
        better = fresh > value
        best[better], value[better] = one, fresh[better]
        left -= 1
    if left > most:  # so many spoke at once, and so many there are not: then some of those are one
        kept = np.flatnonzero(alive)
        heavy = np.array([weights[labels == labels[each]].sum() for each in kept])
        nobody = np.zeros((len(kept), len(kept)), bool)
        joined = cluster(sums[kept] / heavy[:, None], heavy, nobody, alike, how_many)
        first_of = {int(each): int(kept[joined == number][0]) for each, number in zip(kept, joined, strict=True)}
        labels = np.array([first_of[int(each)] for each in labels])
    _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return np.asarray(order[numbers])


def _units(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12))
